"""Runs tests with a mutant in a forked process: what takes long to import is there."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import tempfile
import time
import types
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

from tests.mutation.operators import Mutant
from tests.mutation.planting import ROOT, plant

Say = Callable[[str], object]
CHILDREN = Path(__file__).with_name("children")

MEMORY = 12 << 30
"""Bytes of data that a process may have: a mutant may fill a list without end."""


class FirstFailure:
    """Ends the process with the first test that fails, and says which it was."""

    def __init__(self, say: Say) -> None:
        self._say = say

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._say(report.nodeid)
            os._exit(1)

    pytest_collectreport = pytest_runtest_logreport


def in_fork(work: Callable[[Say], int], seconds: float, mutant: Mutant | None) -> tuple[int | str, str]:
    """Call `work(say)` in a process of its own; return its exit status, or "time limit", and what it said.

    Args:
        seconds: of CPU time that it takes without a fault.
        mutant: what processes that it starts are told to plant.
    """
    folder = tempfile.mkdtemp(prefix="m")
    said = Path(folder) / "said"
    child = os.fork()
    if not child:
        status = 99
        try:
            os.setsid()
            _set_up(folder, seconds, mutant)
            status = work(said.write_text)
        finally:
            os._exit(status)
    deadline = time.monotonic() + 120 + 20 * seconds
    done = 0
    while not done and time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):  # and what it has started
        os.killpg(child, signal.SIGKILL)
    if not done:
        os.waitpid(child, 0)
    text = said.read_text() if said.exists() else ""
    shutil.rmtree(folder, ignore_errors=True)
    code = os.waitstatus_to_exitcode(status) if done else -signal.SIGXCPU
    return ("time limit" if code in (-signal.SIGXCPU, -signal.SIGKILL) else code), text


def _set_up(folder: str, seconds: float, mutant: Mutant | None) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    limit = int(20 + 3 * seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    tempfile.tempdir = folder
    path = os.pathsep.join(filter(None, (str(CHILDREN), str(ROOT), os.environ.get("PYTHONPATH"))))
    os.environ |= {"TMPDIR": folder, "PYTHONPATH": path, "PYTEST_ADDOPTS": "--assert=plain"}
    if mutant:
        os.environ["MUTANT"] = f"{mutant.file}:{mutant.number}"


def run_afresh(tests: Sequence[str], mutant: Mutant | None, say: Say) -> int:
    """Import our packages with the mutant, and run tests."""
    if mutant:
        plant(mutant)
    os.environ["NIGHTLY"] = "1"  # a case of a sweep that is named runs
    options = ["-q", "-s", "-p", "no:cacheprovider", *tests]
    return int(pytest.main(options, plugins=[FirstFailure(say)]))


def run_items(
    items: Sequence[pytest.Item], mutant: Mutant | None, functions: Iterable[types.FunctionType], say: Say
) -> int:
    """Run tests that are collected, with the mutant in functions that are imported."""
    if mutant:
        plant(mutant, functions)
    if not items:
        return pytest.ExitCode.NO_TESTS_COLLECTED
    items[0].config.pluginmanager.register(FirstFailure(say))
    for item, following in zip(items, [*items[1:], None]):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
    return 0
