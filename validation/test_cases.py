"""Every case of the plan as a test: `pytest -n auto validation`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .records import EXCUSED, FAILING, Case, Outcome
from .running.controller import failure, send
from .running.run import Runner


def test_case(
    case: Case,
    runner: Runner,
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> None:
    """Run one case here, as under `--pdb`; else the controller has it run by a process of its own."""
    record = runner.run(case)
    record_property(*send(record))
    if record.outcome in FAILING:
        pytest.fail(failure(record, request.node), pytrace=False)
    if record.outcome in EXCUSED:
        pytest.xfail(record.reason)
    if record.outcome is Outcome.SKIP:
        pytest.skip(record.reason)
