"""The checks: each file has one function `check(subject, pipeline)`, and is found by its name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from ..records import Check, Finding

Function = Callable[[Any, tuple[str, ...]], Finding]


def available() -> dict[Check, Function]:
    """Every check of this package; the file `round_trip.py` has the check `round-trip`."""
    return {check: importlib.import_module(f"{__name__}.{check.replace('-', '_')}").check for check in Check}
