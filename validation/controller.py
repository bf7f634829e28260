"""What happens outside of the workers: the records are collected, and at the end the reports are written."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from validation import report, store
from validation.checks.latency import timing_threads
from validation.gather import Death, Notes, case_id, complete, received
from validation.records import Case, Record


class Controller:
    """A plugin of the process that has the workers, or has none: collects the records, writes the reports."""

    def __init__(self, config: pytest.Config, cases: Mapping[str, Case], devices: Sequence[str]) -> None:
        self._config = config
        self._cases = cases
        self._devices = devices
        self._directory = Path(tempfile.mkdtemp(prefix="fxopt-validation-"))
        self._selected: list[str] = []
        self._started: set[str] = set()
        self._records: dict[str, Record] = {}
        self._deaths: dict[str, Death] = {}
        self._message = ""

    def pytest_sessionstart(self) -> None:
        self._run = store.Run.now(threads=timing_threads(), devices=self._devices)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["fx_notes"] = str(self._directory)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._select([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self._select(ids)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._started.add(case_id(nodeid))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if record := received(report.user_properties):
            self._records[record.case.id] = record

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        if error:
            case, death = Notes(self._directory, node.gateway.id).read()
            self._deaths[case] = death

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        selected = [self._cases[name] for name in self._selected if name in self._cases]
        if not selected or self._config.option.collectonly:
            return
        stopped = session.shouldstop or session.shouldfail or exitstatus not in (0, 1)
        left = [case for case in selected if case.id not in self._records and case.id not in self._started]
        if stopped and (left or exitstatus not in (0, 1)):
            self._message = (
                f"no report was written: the run stopped with {len(left)} of {len(selected)} cases left"
            )
            return
        records = complete(selected, self._records, self._started, self._deaths)
        try:
            files = report.write_run(records, self._config.getoption("--fx-report-dir"), self._run)
            table = store.read_run(next(file for file in files if file.name == "records.parquet"))
        except store.ReportError as error:
            self._message = f"no report was written: {error}"
            session.exitstatus = pytest.ExitCode.USAGE_ERROR
            return
        self._message = report.terminal_summary(table, files)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._message:
            terminalreporter.section("fxopt validation")
            terminalreporter.line(self._message)

    def pytest_unconfigure(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)

    def _select(self, ids: Sequence[str]) -> None:
        self._selected = self._selected or [case_id(nodeid) for nodeid in ids]
