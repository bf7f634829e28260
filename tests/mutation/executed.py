"""A pytest plugin that records which lines each test executes, and what it costs: `-p tests.mutation.executed`.

`EXECUTED` in the environment names the SQLite file. Processes that tests start record their lines, too: they import
`children/sitecustomize.py`. The plugin stands on `sys.monitoring` (Python 3.12): a line reports once a test, which costs a
few percent. coverage.py doubles the time: its core on `sys.monitoring` does not tell tests apart.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import os
import sqlite3
import sys
import time
from pathlib import Path

import pytest

from tests.mutation.children import sitecustomize

CHILDREN = str(Path(sitecustomize.__file__).parent)


class Executed:
    """Reads the record: the tests that execute a line."""

    def __init__(self, database):
        self._rows = sqlite3.connect(f"file:{database}?mode=ro", uri=True)
        self._seconds = dict(self._rows.execute("select nodeid, seconds from test where outcome = 'passed'"))
        self._size = collections.Counter()
        for test, lines in self._rows.execute("select nodeid, lines from line"):
            self._size[test] += int.from_bytes(lines).bit_count()

    @functools.cache  # noqa: B019 (there is one of these objects)
    def _lines(self, file):
        lines = collections.Counter()
        for test, bits in self._rows.execute("select nodeid, lines from line where file = ?", (file,)):
            if test in self._seconds:
                lines[test] |= int.from_bytes(bits, "little")
        return lines

    def _executing(self, mutant):
        lines = self._lines(mutant.file)
        masks = (sum(1 << line for line in some) for some in mutant.lines)
        found = ([test for test, bits in lines.items() if bits & mask] for mask in masks)
        return next(filter(None, found), [])

    def at_import(self, mutant):
        """Tell whether its line runs when modules are imported, and never later."""
        rows = self._rows.execute("select lines from line where nodeid = '' and file = ?", (mutant.file,))
        mask = sum(1 << line for line in mutant.lines[0])
        return any(int.from_bytes(bits, "little") & mask for (bits,) in rows) and not self._executing(mutant)

    def tests(self, mutant, limit, without=()):
        """The tests that may see a mutant, up to a limit of CPU seconds, and the seconds that they take.

        Those come first that cost little and execute little else than the file; of those in
        one file that execute the same lines of the function first one, then a second.
        """
        lines = self._lines(mutant.file)
        price = {
            test: (0.02 + self._seconds[test]) * self._size[test] / (1 + lines[test].bit_count())
            for test in {*self._executing(mutant)} - {*without}
        }
        turns, span = collections.defaultdict(itertools.count), sum(1 << line for line in mutant.span)
        ordered = sorted(
            (next(turns[test.partition("::")[0], lines[test] & span]), price[test], test)
            for test in sorted(price, key=price.get)
        )
        chosen, spent = [], 0.0
        for *_, test in ordered:
            if not chosen or spent + self._seconds[test] <= limit:
                chosen.append(test)
                spent += self._seconds[test]
        return chosen, spent


class Recorder:
    """Writes a row into `test` for each test, and one into `line` for each file that it executes: bit n is line n."""

    def __init__(self, database):
        self._database, self._of_children = database, Path(f"{database}.{os.getpid()}")
        self._lines, self._of_fixtures, self._outcome = collections.Counter(), {}, ""
        paths = (CHILDREN, os.environ.get("PYTHONPATH"))
        os.environ |= {
            "EXECUTED_LINES": str(self._of_children),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }
        sitecustomize.listen(self._note)

    def _note(self, file, number):
        self._lines[file] |= 1 << number

    @contextlib.contextmanager
    def _apart(self):
        """Collect the lines that are executed here apart from others."""
        before, self._lines = self._lines, collections.Counter()
        sys.monitoring.restart_events()
        try:
            yield self._lines
        finally:
            self._lines = before

    def _write(self, test, seconds, outcome, lines):
        rows = [
            (test, file, bits.to_bytes(bits.bit_length() // 8 + 1, "little")) for file, bits in lines.items()
        ]
        with contextlib.closing(sqlite3.connect(self._database, timeout=60)) as database, database:
            database.execute("insert into test values (?, ?, ?)", (test, seconds, outcome))
            database.executemany("insert into line values (?, ?, ?)", rows)

    def pytest_collection_finish(self):
        """Lines that run when modules are imported belong to no test."""
        self._write("", _spent(), "collected", self._lines)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        """Write the rows of one test."""
        self._outcome, started = "passed", _spent()
        with self._apart() as lines:
            result = yield
        for fixture in (each for some in item._fixtureinfo.name2fixturedefs.values() for each in some):
            _add(lines, self._of_fixtures.get(fixture, {}))
        if self._of_children.exists():
            for row in self._of_children.read_text().splitlines():
                file, number = row.split("\t")
                lines[file] |= 1 << int(number)
            os.truncate(self._of_children, 0)  # processes of this test may still have it open
        self._write(item.nodeid, _spent() - started, self._outcome, lines)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef):
        """Count the lines of a fixture of many tests for each of them."""
        if fixturedef.scope == "function":
            return (yield)
        with self._apart() as lines:
            result = yield
        _add(self._of_fixtures.setdefault(fixturedef, collections.Counter()), lines)
        return result

    def pytest_runtest_logreport(self, report):
        """Keep what becomes of the test."""
        if not report.passed:
            self._outcome = report.outcome


def _spent():
    return time.process_time() + sum(os.times()[2:4])


def _add(lines, more):
    for file, bits in more.items():
        lines[file] |= bits


def pytest_configure(config):
    """Record in the processes that run tests."""
    with contextlib.closing(sqlite3.connect(os.environ["EXECUTED"], timeout=60)) as database:
        database.execute("create table if not exists test (nodeid, seconds, outcome)")
        database.execute("create table if not exists line (nodeid, file, lines)")
    if config.getoption("dist", "no") == "no" or hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(os.environ["EXECUTED"]))
