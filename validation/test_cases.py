"""Every case of the plan as a test: `pytest -n auto validation`."""

from __future__ import annotations

from .records import Case


def test_case(case: Case) -> None:
    """A name for pytest: the controller has the case run by a process of its own, in the place of this."""
    raise RuntimeError(f"{case.id}: only the controller runs cases")
