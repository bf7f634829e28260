"""The planted faults fit the code: what they replace stands there, once."""

from __future__ import annotations

import ast
import collections
import dataclasses
import functools

import pytest

from tests.mutation.__main__ import _stages
from tests.mutation.fault import ROOT, FaultError, guards
from tests.mutation.faults import FAULTS
from tests.mutation.listing import CAUGHT, SURVIVED, Outcome, seen_before, write


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


def test_every_fault_has_tests_that_see_it_soon():
    assert [fault.name for fault in FAULTS if not any(_stages(fault, soon=True))] == []


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


def test_the_test_that_saw_a_fault_before_is_found_by_its_name(tmp_path):
    named = [dataclasses.replace(FAULTS[n], name=name) for n, name in enumerate(("a < b", "a | b", "gone"))]
    here = "tests/mutation/test_faults.py::test_no_fault_is_planted_twice"
    tests = (f"{here}[x::y|z]", here, "tests/mutation/test_faults.py::test_that_there_is_no_more")
    file = write(
        "faults", "", [Outcome(f, CAUGHT, test) for f, test in zip(named, tests, strict=True)], tmp_path
    )
    assert seen_before(file) == {"a < b": here, "a | b": here}
    assert seen_before(tmp_path / "none.md") == {}
