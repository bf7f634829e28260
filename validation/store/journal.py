"""The journal of a run: its records as they arrive, so that no record is lost."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
from pathlib import Path

import filelock
import pyarrow as pa
import pydantic

from ..records import Case, Record
from .provenance import Run
from .table import SCHEMA, ReportError, check_schema, first_line, replace, table_of

RECORD = pydantic.TypeAdapter(Record)


class Journal:
    """The records of a run as they arrive, one line each, in a folder that no other run uses meanwhile.

    With `resume`, the journal continues the newest interrupted run in this folder that has the same commit, versions,
    devices and plan. Then `earlier` has the records of that run, and `run` is that run. Without a commit, or with changed
    files, no run is resumed. Raises `ReportError` if the folder cannot be written, or another run uses it.
    """

    def __init__(self, directory: Path, run: Run, resume: bool = False) -> None:
        self._lock = filelock.FileLock(directory / ".lock")
        self.run = run
        self.earlier: dict[Case, Record] = {}
        self.not_resumed = ""  # message on an interrupted run that cannot be resumed
        try:
            running = directory / "running"
            running.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
            if resume and run.commit and not run.commit.endswith("-dirty"):
                self.run, self.earlier = _newest_cut(running, run)
            if resume and self.run is run and (cut := sorted(running.glob("*.jsonl"))):
                unlike = "commit, options, machine or versions, or from changed files: `fxopt merge` takes it"
                self.not_resumed = f"Not resumed: {cut[-1]} is of another {unlike}"
            self.file = running / f"{self.run.id}.jsonl"
            facts = {**dataclasses.asdict(self.run), "started": self.run.started.isoformat()}
            lines = [{"schema": SCHEMA, "run": facts}, *map(dataclasses.asdict, self.earlier.values())]
            replace(self.file, "".join(json.dumps(line) + "\n" for line in lines).encode())
        except filelock.Timeout as error:
            text = "another run writes here: wait for it, or choose another folder with --fx-report-dir"
            raise ReportError(f"{directory}: {text}") from error
        except OSError as error:
            self._lock.release()
            raise ReportError(f"{directory}: cannot be written ({error}); choose another folder") from error

    def append(self, record: Record) -> None:
        """Add a record. Raises `OSError`, for example for a full disk; earlier records are safe."""
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(dataclasses.asdict(record)) + "\n")

    def close(self, written: bool) -> None:
        """Release the folder; delete the file if all its records are `written` elsewhere."""
        if written:
            self.file.unlink(missing_ok=True)
        self._lock.release()


def read_journal(file: Path) -> pa.Table:
    """The table of a journal, without a line that was cut off when the process died."""
    run, records = _read(file)
    return table_of(list(records.values()), run)


def _newest_cut(running: Path, run: Run) -> tuple[Run, dict[Case, Record]]:
    """The newest interrupted run like this one, and its records; otherwise this run, without records."""
    for file in sorted(running.glob("*.jsonl"), reverse=True):
        with contextlib.suppress(ReportError):  # not resumed; `fxopt merge` reports the error
            cut, records = _read(file)
            if dataclasses.replace(cut, started=run.started) == run:
                return cut, records
    return run, {}


def _read(file: Path) -> tuple[Run, dict[Case, Record]]:
    try:
        first, *lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
        header = json.loads(first)
        check_schema(file, header["schema"])
        started = datetime.datetime.fromisoformat(header["run"]["started"])
        run = Run(**{**header["run"], "started": started})
        records = [
            RECORD.validate_python(json.loads(line)) for line in lines[:-1]
        ]  # the last is empty, or cut off
    except (ValueError, KeyError, TypeError) as error:
        raise ReportError(f"{file}: not the journal of a run ({first_line(error)})") from error
    return run, {record.case: record for record in records}
