"""All planted faults."""

from __future__ import annotations

from tests.mutation.capture import CAPTURE
from tests.mutation.core import CORE
from tests.mutation.passes import PASSES
from tests.mutation.skeleton import SKELETON

FAULTS = (*PASSES, *SKELETON, *CORE, *CAPTURE)
