"""The control of a run: a process for each worker, a journal of the records, the reports to pytest, and the report files."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import shlex
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from fxopt.errors import error_text

from .. import report, store
from ..judging import repro
from ..records import AGAIN, EXCUSED, FAILING, Case, Outcome, Record
from ..timing import timing_threads
from .fleet import Fleet
from .pool import Pool


@dataclasses.dataclass(eq=False)
class Controller:
    """A pytest plugin that runs the cases in a pool, the timed ones alone and last, and writes their records."""

    cases: Mapping[str, Case]  # the cases that may be run, by id
    planned: Sequence[str]  # the ids of the whole plan; a run without some of them is a part
    left_out: str  # the models that the plan leaves out, each with the missing package
    devices: Sequence[str]  # the devices of the cases
    directory: Path  # of the reports
    root: Path  # the repository whose commit is recorded
    pool: Pool | Fleet  # runs the cases, in processes of this machine or on a cluster
    workers: int  # the number of processes at once
    content: Callable[[Case], str]  # the digest of the definition of a case
    resume: bool = False  # continue an interrupted run

    def __post_init__(self) -> None:
        self._journal: store.Journal | None = None
        self._records: dict[str, Record] = {}
        self._problems: list[str] = []
        self._message = ""
        self._unwritten = ""  # text on the record that the journal lacks, for example on a full disk
        self._handlers: dict[signal.Signals, Any] = {}

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        if session.config.option.collectonly:
            return
        run = store.Run.now(
            threads=timing_threads(),
            devices=self.devices,
            plan=store.plan_of(self.planned),
            left_out=self.left_out,
            options=options(session.config),
            root=self.root,
        )
        try:
            self._journal = store.Journal(self.directory, run, self.resume)
        except store.ReportError as error:
            raise pytest.UsageError(str(error)) from error
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, _once) for number in ENDING}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Run the cases in place of pytest's own loop."""
        option = session.config.option
        if option.collectonly:
            return None
        if session.testsfailed and not option.continue_on_collection_errors:
            return None  # pytest reports this and ends
        items = {case_id(item.nodeid): item for item in session.items if case_id(item.nodeid) in self.cases}
        # Other tests, or pytest's placeholder for no cases.
        others = [item for item in session.items if case_id(item.nodeid) not in self.cases]
        for item, following in itertools.zip_longest(others, others[1:]):
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            _stop_if_asked(session)

        def begun(case: Case) -> None:
            item = items[case.id]
            item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)

        with contextlib.closing(self._recorded([self.cases[name] for name in items], begun)) as records:
            for record in records:
                item = items[record.case.id]
                self._keep(record)
                now = time.time()
                for each in reports(item, record, now - record.seconds, now):
                    item.ihook.pytest_runtest_logreport(report=each)
                item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
                _stop_if_asked(session)
        return True

    def _recorded(
        self, cases: Sequence[Case], begun: Callable[[Case], None]
    ) -> Generator[Record, None, None]:
        """Yield the records of the resumed run, then of cases that may share the machine, then of the timed ones, alone."""
        assert self._journal is not None
        earlier, left = self._journal.earlier, list[Case]()
        for case in cases:
            # A zoo outside of git may have changed since, although the commit is the same.
            if case in earlier and earlier[case].content == self.content(case):
                begun(case)
                yield earlier[case]
            else:
                left.append(case)
        yield from self.pool.run([case for case in left if not case.timed], self.workers, begun)
        yield from self.pool.run([case for case in left if case.timed], 1, begun)

    def _keep(self, record: Record) -> None:
        assert self._journal is not None
        is_new = record is not self._journal.earlier.get(record.case)
        record = dataclasses.replace(record, content=self.content(record.case))
        self._records[record.case.id] = record
        try:
            if is_new:
                self._journal.append(record)
        except OSError as error:  # such as a full disk: earlier records are in the journal
            self._unwritten = f" but that of {record.case.id}"
            pytest.exit(
                f"{self._journal.file}: cannot be written: {error}", returncode=pytest.ExitCode.USAGE_ERROR
            )

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._journal is None:
            return
        for number in self._handlers:
            signal.signal(number, signal.SIG_IGN)
        if self._records:
            self._write(session)
        left = {case.id for case in self._journal.earlier} - {*self._records}
        # After an interruption (budget, Ctrl-C, end of a job, full disk) the journal stays, so that the run can be
        # resumed.
        is_cut = session.exitstatus == pytest.ExitCode.INTERRUPTED or self._unwritten
        self._journal.close(written=not self._problems and not left and not is_cut)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _write(self, session: pytest.Session) -> None:
        assert self._journal is not None
        try:
            records = list(self._records.values())
            table = store.table_of(records, self._journal.run)
            written = report.write_run(table, self.directory, self.planned)
            whole = self._records.keys() >= {*self.planned}
            written.files += repro.write(records, written.directory / repro.FOLDER, whole)
        except Exception as error:  # the records are safe, and must not be lost by an error here
            self._problems.append(f"no report was written: {error_text(error)}")
        else:
            self._problems += written.problems
            self._message = report.terminal_summary(table.to_pandas(), written)
        if self._problems:
            self._problems.append(
                f"all records{self._unwritten} are in {self._journal.file}: `fxopt merge` takes it"
            )
            session.exitstatus = pytest.ExitCode.USAGE_ERROR

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._message or self._problems:
            terminalreporter.section("fxopt validation")
            not_resumed = self._journal.not_resumed if self._journal else ""
            for line in filter(None, [not_resumed, self._message, *self._problems]):
                terminalreporter.line(line)


def _stop_if_asked(session: pytest.Session) -> None:
    """End the run if requested by `-x`, `--maxfail` or a plugin, as pytest's own loop does after a test."""
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)


ENDING = (signal.SIGINT, signal.SIGTERM)
"""The signals of Ctrl-C, and of `timeout` or the end of a CI job."""


def _once(*_: object) -> None:
    """End the cases at the first signal, and ignore later ones, which would interrupt the writing of the records."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def case_id(nodeid: str) -> str:
    """The id of the case behind a test of the harness."""
    return nodeid.partition("[")[2].removesuffix("]")


def reports(item: pytest.Item, record: Record, start: float, stop: float) -> Iterable[pytest.TestReport]:
    """The reports that pytest would make if it had run the case itself: for the call and the teardown."""
    outcome = "passed"
    longrepr: str | tuple[str, int, str] | None = None
    if record.outcome in FAILING:
        outcome, longrepr = "failed", failure(record, item)
    elif record.outcome in (*EXCUSED, Outcome.SKIP):
        path, line, _ = item.location
        outcome, longrepr = "skipped", (path, line or 0, f"Skipped: {record.reason}")
    made: Any = functools.partial(
        pytest.TestReport, item.nodeid, item.location, dict.fromkeys(item.keywords, 1), stop=stop
    )
    call = made(outcome, longrepr, "call", duration=stop - start, start=start)
    call.is_no_op = record.outcome is Outcome.NO_OP
    if record.outcome in EXCUSED:
        call.wasxfail = record.reason
    return call, made("passed", None, "teardown", start=stop)


def failure(record: Record, item: pytest.Item) -> str:
    """The reason why a case failed, and the command that runs it again."""
    where = f" in {record.stage}" if record.stage else ""
    return f"{record.outcome}{where}: {record.reason}\nagain: {command(record.case, item)}"


def command(case: Case, item: pytest.Item) -> str:
    """The command that runs only one case."""
    return AGAIN.format(model=case.model, case=case.id) + options(item.config)


def options(config: pytest.Config) -> str:
    """The options with which `fxopt validate` finds the zoo and the passes of this run."""
    named = [f" --pass {shlex.quote(name)}" for name in config.getoption("--fx-pass") or () if "." in name]
    zoo = config.getoption("--fx-zoo")
    return "".join([f" --zoo {shlex.quote(zoo)}" if zoo else "", *named])
