"""The tests that execute a line: of one run of all tests under coverage.py, which takes some half an hour."""

from __future__ import annotations

import ast
import itertools
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import coverage
import filelock

from tests.mutation.fault import ROOT, Fault
from tests.mutation.listing import FOLDER

DATA = FOLDER / "coverage"

FIRST = 40
"""Tests that are collected at once, before all others: mostly one of them sees the fault."""


class TestsError(Exception):
    """The tests fail without a fault, so that a failing test would say nothing of one."""


def run_all(workers: str = "auto") -> None:
    """Run all tests and note which lines each executes, if the code or a test has changed since that was done.

    Raises:
        TestsError: one fails.
    """
    DATA.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(f"{DATA}.lock"):  # other parts of the list wait for it
        files = (file for folder in ("fxopt", "tests") for file in (ROOT / folder).rglob("*.py"))
        if not DATA.exists() or DATA.stat().st_mtime < max(file.stat().st_mtime for file in files):
            _run_all(workers)


def _run_all(workers: str) -> None:
    DATA.unlink(missing_ok=True)
    options = ["-q", "-n", workers, "--dist", "worksteal", "-p", "no:cacheprovider"]
    noted = ["--cov=fxopt", "--cov-context=test", "--cov-report="]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *noted, "tests"],
        cwd=ROOT,
        env={**os.environ, "COVERAGE_FILE": str(DATA), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    if done.returncode:
        DATA.unlink(missing_ok=True)
        raise TestsError("tests fail without a fault, so that one that fails with it would say nothing")


class Executed:
    """The tests that execute a line, those first that execute least: they say most, and soonest."""

    def __init__(self, data: Path = DATA) -> None:
        self._data = coverage.CoverageData(str(data))
        self._data.read()
        self._files = {file: self._data.contexts_by_lineno(file) for file in self._data.measured_files()}
        self._size = Counter(
            test for lines in self._files.values() for contexts in lines.values() for test in _tests(contexts)
        )

    def stages(self, fault: Fault, chosen: Callable[[str], bool] = lambda test: True) -> Iterator[list[str]]:
        """The tests that execute the lines of a fault, and then those that execute any line of its file.

        The second are for what runs at import, or in the first test alone that asks for it.
        """
        lines = self._files.get(str(ROOT / fault.path), {})
        span = statement_of(fault, (ROOT / fault.path).read_text(encoding="utf-8"))
        near = self._sorted(test for line in span for test in _tests(lines.get(line, ())) if chosen(test))
        of_file = self._sorted(
            test for contexts in lines.values() for test in _tests(contexts) if chosen(test)
        )
        tests = list(dict.fromkeys([*near, *of_file]))
        for some in (tests[:FIRST], tests[FIRST : len(near)], tests[max(FIRST, len(near)) :]):
            if some:
                yield some

    def _sorted(self, tests: Iterable[str]) -> list[str]:
        return sorted(set(tests), key=lambda test: (self._size[test], test))


def _tests(contexts: Iterable[str]) -> Iterator[str]:
    """The tests of contexts such as `tests/test_graph.py::test_users|run`; what runs at import has an empty one."""
    return (context.rpartition("|")[0] for context in contexts if context)


def statement_of(fault: Fault, source: str) -> range:
    """The lines of what a fault changes, from the beginning of the innermost statement around it."""
    old, new = fault.old, fault.new
    same = _alike(old, new)
    behind = _alike(old[same:][::-1], new[same:][::-1])
    at = source.index(old)
    first, last = (source.count("\n", 0, at + end) + 1 for end in (same, len(old) - behind))
    around = [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.stmt) and node.lineno <= first and last <= (node.end_lineno or 0)
    ]
    return range(max(around, default=first), last + 1)


def _alike(text: str, other: str) -> int:
    """How many characters both begin with."""
    return sum(
        1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(text, other, strict=False))
    )
