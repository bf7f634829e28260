"""All planted faults."""

from __future__ import annotations

from tests.mutation.attention import ATTENTION
from tests.mutation.capture import CAPTURE
from tests.mutation.cleaning import CLEANING
from tests.mutation.core import CORE
from tests.mutation.harness import HARNESS
from tests.mutation.packing import PACKING
from tests.mutation.passes import PASSES
from tests.mutation.skeleton import SKELETON

FAULTS = (*PASSES, *ATTENTION, *CLEANING, *PACKING, *SKELETON, *CORE, *CAPTURE, *HARNESS)
