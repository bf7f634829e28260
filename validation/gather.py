"""The records of a run, brought together: those that cases sent, and a row for each case that sent none.

Records travel in the properties of pytest's reports, from the worker that ran the case to the controller.
What a worker is about to do it also writes into a file, which outlives it.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from validation.records import Case, Outcome, Record

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


class Notes:
    """What a worker is doing, and the stack if it is ended, in two files that the controller reads when it died.

    Args:
        directory: where workers write.
        worker: the worker's name.
    """

    def __init__(self, directory: Path, worker: str) -> None:
        self._stage = directory / f"{worker}.stage"
        self._stack = directory / f"{worker}.stack"

    def start(self) -> None:
        """From now on, fatal errors of this process are noted, too."""
        self._file = self._stack.open("w")
        faulthandler.enable(self._file)

    def enter(self, case: Case, stage: str) -> None:
        """Note the stage of a case that begins now."""
        self._stage.write_text(f"{case.id}\n{stage}", encoding="utf-8")

    def end_after(self, seconds: float) -> None:
        """End this process after `seconds`, even inside compiled code, where no signal handler runs."""
        faulthandler.dump_traceback_later(seconds, exit=True, file=self._file)

    def read(self) -> tuple[str, Death]:
        """The id of the case during which the process died, and how it died."""
        stage = self._stage.read_text(encoding="utf-8") if self._stage.exists() else "\n"
        case, _, stage = stage.partition("\n")
        stack = self._stack.read_text(encoding="utf-8") if self._stack.exists() else ""
        return case, _death(stage, stack)


@dataclasses.dataclass(frozen=True)
class Death:
    """How a process ended while it ran a case."""

    outcome: Outcome
    stage: str
    reason: str


def _death(stage: str, stack: str) -> Death:
    # A fatal error marks its thread; after a time-out the main thread, which runs the cases, comes last.
    thread = stack[max(stack.find("Current thread"), stack.rfind("\nThread"), 0) :]
    frame = re.search(r'File "(.*)", line (\d+) in (.*)', thread)
    place = f", in {frame[3]} ({Path(frame[1]).name}:{frame[2]})" if frame else ""
    if stack.startswith("Timeout"):
        reason = f"it did not come back to the interpreter in time, so its process was ended{place}"
        return Death(Outcome.TIMEOUT, stage, reason)
    fatal = re.search(r"Fatal Python error: (.*)", stack)
    if fatal:
        return Death(Outcome.CRASH, stage, f"the process died: {fatal[1]}{place}")
    reason = "the process was killed from outside, as the kernel does when memory runs out, or ended itself"
    return Death(Outcome.CRASH, stage, reason)


def complete(
    selected: Sequence[Case],
    records: Mapping[str, Record],
    started: Iterable[str],
    deaths: Mapping[str, Death],
) -> list[Record]:
    """A record for every selected case, also for those that sent none.

    Args:
        selected: the cases that were to be run.
        records: what was received, by the id of the case.
        started: the ids of the cases that some process began.
        deaths: how processes died, by the id of the case that they ran.
    """
    begun = set(started)
    rows = []
    for case in selected:
        death = deaths.get(case.id)
        if case.id in records:
            rows.append(records[case.id])
        elif death is not None:
            rows.append(Record(case, death.outcome, death.stage, death.reason))
        elif case.id in begun:
            rows.append(
                Record(case, Outcome.CRASH, "", "the process that ran it ended and sent nothing back")
            )
        else:
            rows.append(Record(case, Outcome.CRASH, "", "never begun: too many processes had died before it"))
    return rows
