"""Plants a mutant in a forked process, in which all that takes long to import is there, and runs tests in it."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import tempfile
import time
import types
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.mutation.executed import CHILDREN
from tests.mutation.operators import Mutant
from tests.mutation.planting import ROOT, plant

MEMORY = 12 << 30
"""Bytes of data that a process may have: a mutant may fill a list without end."""

TIME_LIMIT = -signal.SIGXCPU
NOT_PLANTED = 98
"""Statuses of a process."""


class FirstFailure:
    """Ends the process with the first test that fails, and writes its id into a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Look at each report."""
        if report.failed:
            self._file.write_text(report.nodeid)
            os._exit(pytest.ExitCode.TESTS_FAILED)

    pytest_collectreport = pytest_runtest_logreport


def in_fork(
    run: Callable[[FirstFailure], int],
    seconds: float,
    mutant: Mutant | None,
    functions: Iterable[types.FunctionType] = (),
) -> tuple[int, str]:
    """Run tests in a process of its own; return its status, and the test that failed.

    Args:
        run: gives a status, or ends the process with the plugin that it is given.
        seconds: of CPU time that it takes without a fault.
        mutant: the fault, if there is to be one.
        functions: those that are imported already.
    """
    folder = Path(tempfile.mkdtemp(prefix="m"))
    with warnings.catch_warnings(action="ignore"):  # of threads, which are idle
        child = os.fork()
    if not child:
        status = NOT_PLANTED
        try:
            _set_up(str(folder), int(20 + 3 * seconds), mutant)
            if mutant:
                plant(mutant, functions)
            status = pytest.ExitCode.INTERNAL_ERROR
            status = run(FirstFailure(folder / "failed"))
        finally:
            os._exit(status)
    deadline, ended = time.monotonic() + 120 + 20 * seconds, 0
    while not ended and time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):  # and all that it has started
        os.killpg(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(status if ended else os.waitpid(child, 0)[1])
    failed = folder / "failed"
    test = failed.read_text() if failed.exists() else ""
    shutil.rmtree(folder, ignore_errors=True)
    return TIME_LIMIT if status == -signal.SIGKILL else status, test


def _set_up(folder: str, limit: int, mutant: Mutant | None) -> None:
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    tempfile.tempdir = os.environ["TMPDIR"] = folder
    path = (CHILDREN, str(ROOT), os.environ.get("PYTHONPATH"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    os.environ["PYTEST_ADDOPTS"] = (
        "--assert=plain"  # where pytest rewrites a plugin, it reads the source itself
    )
    if mutant:
        os.environ["MUTANT"] = f"{mutant.file}:{mutant.number}"
