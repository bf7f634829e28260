"""Records as pytest sees them: a property of a test's report, and the report that a record comes to."""

from __future__ import annotations

import functools
import json
import shlex
from collections.abc import Iterable
from typing import Any

import pytest

from .records import AGAIN, FAILING, Case, Outcome, Record

PROPERTY = "fx-record"


def send(record: Record) -> tuple[str, str]:
    """A record as a property of a test report: name and value."""
    return PROPERTY, json.dumps(record.to_json())


def received(properties: Iterable[tuple[str, object]]) -> Record | None:
    """The record among the properties of a test report, if there is one."""
    sent = [value for name, value in properties if name == PROPERTY]
    return Record.from_json(json.loads(str(sent[-1]))) if sent else None


def case_id(nodeid: str) -> str:
    """The id of the case that a test of the harness is."""
    return nodeid.partition("[")[2].removesuffix("]")


def reports(item: pytest.Item, record: Record, start: float, stop: float) -> Iterable[pytest.TestReport]:
    """The reports that pytest would make if it had run the case itself: of the call, and that it was cleared up."""
    outcome = "passed"
    longrepr: str | tuple[str, int, str] | None = None
    if record.outcome in FAILING:
        outcome, longrepr = "failed", failure(record, item)
    elif record.outcome in (Outcome.EXPECTED, Outcome.REFUSED, Outcome.SKIP):
        path, line, _ = item.location
        outcome, longrepr = "skipped", (path, line or 0, f"Skipped: {record.reason}")
    made: Any = functools.partial(
        pytest.TestReport, item.nodeid, item.location, dict.fromkeys(item.keywords, 1), stop=stop
    )
    call = made(outcome, longrepr, "call", user_properties=[send(record)], duration=stop - start, start=start)
    if record.outcome in (Outcome.EXPECTED, Outcome.REFUSED):
        call.wasxfail = record.reason
    return call, made("passed", None, "teardown", start=stop)


def failure(record: Record, item: pytest.Item) -> str:
    """Why a case failed, and the command that runs it again."""
    where = f" in {record.stage}" if record.stage else ""
    return f"{record.outcome}{where}: {record.reason}\nagain: {command(record.case, item)}"


def command(case: Case, item: pytest.Item) -> str:
    """The command that runs one case alone, with the zoo and the passes of this run."""
    option = item.config.getoption
    named = [f"--pass {shlex.quote(name)}" for name in option("--fx-pass") or () if "." in name]
    zoo = [f"--zoo {shlex.quote(option('--fx-zoo'))}"] if option("--fx-zoo") else []
    return " ".join([AGAIN.format(model=case.model, case=case.id), *zoo, *named])
