"""A pytest plugin that notes which lines each test executes, and what the test costs: `-p tests.mutation.executed`.

`EXECUTED` in the environment names the SQLite file. Processes that tests start note their lines as well: they load
`children/sitecustomize.py`. It stands on `sys.monitoring` (Python 3.12): a line reports once a test, at a few percent of
the time, where coverage.py doubles it (its core on `sys.monitoring` does not tell tests apart).
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import sqlite3
import sys
import time
from pathlib import Path

import pytest

from tests.mutation.children import sitecustomize

CHILDREN = Path(sitecustomize.__file__).parent
TABLES = """
create table if not exists test (nodeid text, seconds real, outcome text);
create table if not exists line (nodeid text, file text, lines blob);
"""


class Recorder:
    """Writes a row into `test` for each test, and one into `line` for each of its files: bit n is line n."""

    def __init__(self, database):
        self._database, self._of_children = database, Path(f"{database}.{os.getpid()}.lines")
        self._lines = collections.defaultdict(int)
        self._of_fixtures, self._outcome = {}, ""
        os.environ["EXECUTED_LINES"] = str(self._of_children)
        os.environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, (str(CHILDREN), os.environ.get("PYTHONPATH")))
        )
        sitecustomize.listen(self._note)

    def _note(self, file, number):
        self._lines[file] |= 1 << number

    @contextlib.contextmanager
    def _apart(self):
        """Collect the lines that are executed here apart from others."""
        before, self._lines = self._lines, collections.defaultdict(int)
        sys.monitoring.restart_events()
        try:
            yield self._lines
        finally:
            self._lines = before

    def _write(self, nodeid, lines, seconds, outcome):
        with contextlib.closing(sqlite3.connect(self._database, timeout=60)) as database, database:
            database.execute("insert into test values (?, ?, ?)", (nodeid, seconds, outcome))
            rows = (
                (nodeid, file, bits.to_bytes(bits.bit_length() // 8 + 1, "little"))
                for file, bits in lines.items()
            )
            database.executemany("insert into line values (?, ?, ?)", rows)

    def pytest_collection_finish(self):
        """Lines of imports belong to no test."""
        self._write("", self._lines, _spent(), "collected")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        """Write the rows of one test, its own processes included."""
        self._outcome, started = "passed", _spent()
        with self._apart() as lines:
            result = yield
        for fixtures in item._fixtureinfo.name2fixturedefs.values():
            for fixture in fixtures:
                _add(lines, self._of_fixtures.get(fixture, {}))
        if self._of_children.exists():
            for row in self._of_children.read_text().splitlines():
                file, number = row.split("\t")
                lines[file] |= 1 << int(number)
            os.truncate(self._of_children, 0)  # a process of another test may hold it open
        self._write(item.nodeid, lines, _spent() - started, self._outcome)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef):
        """What a fixture of many tests executes counts for each of them."""
        if fixturedef.scope == "function":
            return (yield)
        with self._apart() as lines:
            result = yield
        _add(self._of_fixtures.setdefault(fixturedef, collections.defaultdict(int)), lines)
        return result

    def pytest_runtest_logreport(self, report):
        """Keep what became of the test."""
        if not report.passed:
            self._outcome = report.outcome


def _spent():
    return time.process_time() + sum(os.times()[2:4])


def _add(lines, more):
    for file, bits in more.items():
        lines[file] |= bits


class Executed:
    """What was recorded: the tests that execute a line."""

    def __init__(self, database):
        self._rows = sqlite3.connect(f"file:{database}?mode=ro", uri=True)
        passed = self._rows.execute("select nodeid, seconds from test where outcome = 'passed'")
        self._seconds = dict(passed)
        self._size = collections.Counter()
        for test, lines in self._rows.execute("select nodeid, lines from line"):
            self._size[test] += int.from_bytes(lines).bit_count()

    @functools.lru_cache(maxsize=None)  # noqa: B019: there is one of these objects
    def _lines(self, file):
        lines = collections.defaultdict(int)
        for test, bits in self._rows.execute("select nodeid, lines from line where file = ?", (file,)):
            if test in self._seconds:
                lines[test] |= int.from_bytes(bits, "little")
        return lines

    def _executing(self, mutant):
        lines = self._lines(mutant.file)
        masks = (sum(1 << line for line in some) for some in mutant.lines)
        found = ([test for test, bits in lines.items() if bits & mask] for mask in masks)
        return next(filter(None, found), []) if mutant.in_function else []

    def at_import(self, mutant):
        """Whether modules have to be imported with it: it is outside functions, or no test executes it later."""
        return not self._executing(mutant)

    def tests(self, mutant, limit, without=()):
        """The tests that may see a mutant, up to a limit of CPU seconds, and the seconds that they take.

        Those come first that cost little and execute little else than its file; and of each file of tests first one, then
        a second: they are much alike.
        """
        lines = self._lines(mutant.file)
        tests = {*(self._executing(mutant) or lines)} - {*without}
        price = {
            test: (self._seconds[test] + 0.02) * self._size[test] / (lines[test].bit_count() + 1)
            for test in tests
        }
        of_file, turn = collections.Counter(), {}
        for test in sorted(tests, key=price.__getitem__):
            file = test.partition("::")[0]
            turn[test] = (of_file[file], price[test])
            of_file[file] += 1
        chosen, spent = [], 0.0
        for test in sorted(tests, key=turn.__getitem__):
            if not chosen or spent + self._seconds[test] <= limit:
                chosen.append(test)
                spent += self._seconds[test]
        return chosen, spent


def pytest_configure(config):
    """Record in the process that runs the tests."""
    database = os.environ["EXECUTED"]
    with contextlib.closing(sqlite3.connect(database, timeout=60)) as connection:
        connection.executescript(TABLES)
    if config.getoption("dist", "no") == "no" or hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(database))
