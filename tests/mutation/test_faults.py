"""The planted faults fit the code: what they replace stands there, once."""

from __future__ import annotations

import ast
import collections
import functools

import coverage
import pytest

from tests.mutation.executed import Executed, statement_of
from tests.mutation.fault import ROOT, Fault, FaultError, guards
from tests.mutation.faults import FAULTS
from tests.mutation.harness import seen_by
from tests.mutation.listing import CAUGHT, SURVIVED, Outcome, write


def test_every_fault_fits_the_code_and_is_one():
    stale = []

    @functools.cache
    def dump(source):
        return ast.dump(ast.parse(source))

    for fault in FAULTS:
        if not (ROOT / fault.path).exists():
            stale.append(f"{fault.name}: there is no {fault.path}")
            continue
        source = (ROOT / fault.path).read_text(encoding="utf-8")
        try:
            changed = fault.applied(source)
        except FaultError as error:
            stale.append(str(error))
            continue
        assert dump(changed) != dump(source), fault.name
    assert not stale, "\n".join(stale)


def test_every_fault_in_the_harness_has_tests_that_are_there():
    for fault in FAULTS:
        for test in seen_by(fault) if fault.package == "validation" else ():
            file, _, name = test.partition("::")
            assert f"def {name.partition('[')[0]}" in (ROOT / file).read_text(encoding="utf-8")


def test_a_fault_changes_the_lines_of_a_statement():
    source = "def f(x):\n    y = [\n        x,\n        1,\n    ]\n    if y:\n        return x\n"
    lines = {
        ("        1,", "        2,"): range(2, 5),
        ("    if y:", "    if not y:"): range(6, 7),
        ("return x", "return y"): range(7, 8),
        ("    ]\n    if y:", "    ]\n    z = x\n    if y:"): range(6, 7),
        ("1,\n    ]\n    if y:", "2,\n    ]\n    if z:"): range(1, 7),
    }
    for (old, new), expected in lines.items():
        assert statement_of(Fault("", "", old, new), source) == expected


def test_tests_that_execute_least_come_first(tmp_path):
    fault = next(fault for fault in FAULTS if fault.package == "fxopt")
    source = (ROOT / fault.path).read_text(encoding="utf-8")
    (*_, line), end = statement_of(fault, source), len(source.splitlines())
    data = coverage.CoverageData(str(tmp_path / "coverage"))
    for test, lines in (("much", [line, end + 1, end + 2]), ("little|[|]", [line]), ("other", [end + 1])):
        data.set_context(f"tests/test_x.py::{test}|run")
        data.add_lines({str(ROOT / fault.path): lines})
    data.write()
    stages = list(Executed(tmp_path / "coverage").stages(fault))
    little, much, other = (f"tests/test_x.py::{name}" for name in ("little|[|]", "much", "other"))
    assert [test for tests in stages for test in tests] == [little, much, other]
    chosen = Executed(tmp_path / "coverage").stages(fault, lambda test: test == other)
    assert list(chosen) == [[other]]


def test_no_fault_is_planted_twice():
    names = collections.Counter(fault.name for fault in FAULTS)
    changes = collections.Counter((fault.path, fault.old, fault.new) for fault in FAULTS)
    assert [name for name, count in names.items() if count > 1] == []
    assert [change for change, count in changes.items() if count > 1] == []


def test_a_piece_that_stands_in_two_places_is_refused():
    fault = FAULTS[0]
    with pytest.raises(FaultError, match="occurs 2 times"):
        fault.applied(fault.old * 2)


def test_guards_are_found_and_disabled():
    found = list(guards())
    assert any(guard.file == "obstacles/slicing.py" for guard in found)
    for guard in found:
        source = (ROOT / guard.path).read_text(encoding="utf-8")
        changed = guard.applied(source)
        assert changed.count("False and (") == source.count("False and (") + 1
        ast.parse(changed)


def test_the_list_names_each_fault_and_those_that_survived_first(tmp_path):
    one, two, three = FAULTS[:3]
    outcomes = [Outcome(one, CAUGHT, "a[x|y]"), Outcome(two, SURVIVED), Outcome(three, CAUGHT, "b")]
    lines = write("faults", "Planted faults", outcomes, tmp_path).read_text().splitlines()
    assert lines[2].endswith(": 2 of 3 caught.")
    rows = lines[lines.index("| fault | file | outcome | seen by |") + 2 :]
    assert rows[0] == f"| {two.name} | {two.path} | SURVIVED |  |"
    assert f"| {one.name} | {one.path} | caught | a[x\\|y] |" in rows
    assert len(rows) == 3
