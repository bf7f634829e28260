"""The operators, planting in functions that are there, which tests are chosen, and the page."""

from __future__ import annotations

import ast
import importlib
import os
import sqlite3
import subprocess
import sys
import tomllib
import types

import pytest

from tests.mutation import planting, report
from tests.mutation.__main__ import EQUIVALENT
from tests.mutation.executed import CHILDREN, Executed
from tests.mutation.forks import NOT_PLANTED, in_fork
from tests.mutation.operators import mutants, mutated
from tests.mutation.planting import ROOT, functions_by_file, plant

RULES_MADE = """
return not a                         | negate: not a -> a
return a[1:]                         | off by one: a[1:] -> a
return a @ b                         | swap operands: a @ b -> b @ a
return a if b else c                 | swap branches: a if b else c -> c if b else a
return a if b else c                 | drop a condition: b -> True
return a and b                       | drop a condition: b -> True
return a or b                        | drop a condition: a -> False
return [a for a in b if c]           | drop a condition: c -> True
return 'a b' if b else None          | forget a refusal: b -> False
return a(b, c=1)                     | drop an argument: a(b, c=1) -> a(b)
return {a: 1, **b}                   | drop an element: {a: 1, **b} -> {a: 1}
return copy.deepcopy(a)              | forget a call: copy.deepcopy(a) -> a
return any(a)                        | another operation: any -> all
return 2                             | off by one: 2 -> 3
return 1e-3                          | another constant: 0.001 -> 1.0
for a in b: a()                      | first alone: b -> tuple(b)[:1]
return True                          | another constant: True -> False
raise A(a) from b                    | forget a guard: raise A(a) from b -> pass
yield Refusal(a, b)                  | forget a refusal: yield Refusal(a, b) -> pass
a.b = c                              | drop a statement: a.b = c -> pass
a = b(a)                             | drop a statement: a = b(a) -> pass
with a: b()                          | drop a statement: with a: b() -> if True: b()
if a: raise b                        | forget a guard: a -> False
while a: b()                         | never true: a -> False
try: a() except B: c()               | another exception: B -> ArithmeticError
try: a() finally: b()                | forget an undo: try: a() finally: b() -> if True: a()
"""


@pytest.mark.parametrize("row", RULES_MADE.strip().splitlines())
def test_a_fault_is_made(row):
    code, change = (part.strip() for part in row.split("|"))
    code = code.replace(" except", "\n except").replace(" finally", "\n finally")
    made = {" ".join(mutant.change.split()) for mutant in mutants("x.py", f"def f():\n {code}")}
    assert change in made


def test_a_mark_tells_faults_apart_that_read_alike():
    one, other = (
        mutant for mutant in mutants("x.py", "def f(a):\n return a[0] + g(0)") if mutant.before == "0"
    )
    assert (one.change, other.change) == ("off by one: 0 -> 1", "off by one: 0 -> 1 (2)")
    assert one.digest == other.digest != mutants("x.py", "def f(a):\n return a[0]")[0].digest


@pytest.mark.parametrize(
    "code",
    ["f(f'{a + 1}')", "assert a < b", "'''Text.'''", "def g(a: int | None): ...", "__all__ = ['a', 'b']"],
)
def test_texts_and_types_are_left_alone(code):
    changes = [mutant.change for mutant in mutants("x.py", f"def f():\n {code}\n")]
    assert changes in ([], [f"drop a statement: {ast.unparse(ast.parse(code))} -> pass"])


def test_mutants_compile_with_the_variables_that_functions_had():
    file = "fxopt/rewriting/attempt.py"
    source = (ROOT / file).read_text(encoding="utf-8")
    had = variables(compile(source, file, "exec"))
    for mutant in mutants(file, source)[::20]:
        assert variables(compile(mutated(mutant, source), file, "exec")) <= had, mutant


def variables(code):
    return {(each.co_qualname, each.co_freevars) for each in planting._codes(code)}


SOURCE = """
import functools

class Base:
    def __init__(self):
        self.made = True

class One(Base):
    def __init__(self, n):
        super().__init__()
        self.add = lambda x: x + n

@functools.cache
def doubled(n):
    return 2 * n
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "planted_in.py").write_text(SOURCE)
    monkeypatch.setattr(planting, "ROOT", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(planting.SourceFileLoader, "get_code", planting.SourceFileLoader.get_code)
    yield importlib.import_module("planted_in")
    del sys.modules["planted_in"]


def planted(change):
    return next(mutant for mutant in mutants("planted_in.py", SOURCE) if mutant.change == change)


def test_code_is_exchanged_in_functions_that_are_there_and_in_modules_to_come(module):
    functions = functions_by_file()["planted_in.py"]
    doubled, one = module.doubled, module.One
    plant(planted("another operation: 2 * n -> 2 // n"), functions)
    assert doubled(5) == 0
    plant(planted("drop a statement: super().__init__() -> pass"), functions)
    assert not hasattr(one(1), "made")
    assert doubled(6) == 12
    assert not hasattr(importlib.reload(module).One(1), "made")


def test_a_process_that_a_test_starts_has_the_fault():
    file = "pytest_fxopt.py"
    found = mutants(file, (ROOT / file).read_text(encoding="utf-8"))
    number = next(
        mutant.number for mutant in found if mutant.change.startswith("swap operands: (int(found[1])")
    )
    code = "import pytest_fxopt; print(pytest_fxopt._part('3/10'))"
    environment = {
        **os.environ,
        "PYTHONPATH": f"{CHILDREN}{os.pathsep}{ROOT}",
        "MUTANT": f"{file}:{number}",
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, check=True)
    assert done.stdout == b"(10, 3)\n"


def test_the_first_test_that_fails_ends_the_process(monkeypatch):
    def run(first_failure):
        first_failure.pytest_runtest_logreport(types.SimpleNamespace(failed=True, nodeid="a::b"))

    assert in_fork(run, 1, None) == (1, "a::b")
    assert in_fork(lambda first_failure: 0, 1, None) == (0, "")
    gone = types.SimpleNamespace(file="gone.py", number=0)
    assert in_fork(lambda first_failure: 0, 1, gone) == (NOT_PLANTED, "")


@pytest.fixture
def executed(tmp_path):
    """Three tests of lines 2 and 3 of a file, one of its import, and one that fails."""
    with sqlite3.connect(tmp_path / "executed.db") as database:
        database.execute("create table test (nodeid, seconds, outcome)")
        database.execute("create table line (nodeid, file, lines)")
        for test, seconds, outcome, lines in (
            ("", 1, "collected", [1, 3, 5]),
            ("slow", 5, "passed", [2, 3]),
            ("quick", 0.1, "passed", [2, 3]),
            ("of another line", 0.1, "passed", [3]),
            ("fails", 0.1, "failed", [2, 3]),
        ):
            database.execute("insert into test values (?, ?, ?)", (test, seconds, outcome))
            bits = sum(1 << line for line in lines).to_bytes(1, "little")
            database.execute("insert into line values (?, ?, ?)", (test, "x.py", bits))
    return Executed(tmp_path / "executed.db")


def test_tests_that_execute_the_line_are_chosen_and_cheap_ones_come_first(executed):
    inside, last, early = mutants("x.py", "def f():\n a[1]\n return 2\ndef g():\n return 3")[-3:]
    assert executed.tests(inside, 20) == (["quick", "slow"], 5.1)
    assert executed.tests(inside, 2) == (["quick"], 0.1)
    assert executed.tests(inside, 20, {"quick"}) == (["slow"], 5)
    assert {*executed.tests(last, 20)[0]} == {"quick", "slow", "of another line"}
    assert [executed.at_import(each) for each in (inside, last, early)] == [False, False, True]


RECORDED = """
import pytest, subprocess, sys

@pytest.fixture(scope="module")
def shared():
    from validation import timing
    return timing

def test_first(shared): pass
def test_second(shared): pass
def test_process():
    subprocess.run([sys.executable, "-c", "import validation.timing"], check=True)
def test_nothing(): pass
"""


@pytest.mark.skipif(sys.version_info < (3, 12), reason="needs sys.monitoring")
def test_lines_are_recorded_with_their_test(tmp_path):
    (tmp_path / "test_recorded.py").write_text(RECORDED)
    database = tmp_path / "executed.db"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.mutation.executed",
        "-p",
        "no:cacheprovider",
    ]
    environment = {**os.environ, "EXECUTED": str(database), "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [*command, str(tmp_path)], cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL
    )
    with sqlite3.connect(database) as rows:
        tests = {
            test.rpartition("::")[2]: outcome
            for test, outcome in rows.execute("select nodeid, outcome from test")
        }
        files = {
            test.rpartition("::")[2]: file
            for test, file in rows.execute("select nodeid, file from line where file like '%timing.py'")
        }
    assert tests.pop("") == "collected"
    assert {*tests.values()} == {"passed"}
    assert {*files} == {"test_first", "test_second", "test_process"}


def test_the_page_has_the_score_of_each_folder_and_what_survived(tmp_path):
    sample = mutants("fxopt/passes/x.py", "def f(a):\n return a < 1\n")
    for mutant, outcome in zip(sample, (report.SURVIVED, report.SURVIVED, report.CAUGHT), strict=False):
        report.append(tmp_path / "verdicts.jsonl", mutant, outcome, "", 5)
    report.append(tmp_path / "verdicts.jsonl", sample[0], report.CAUGHT, "a test", 5)  # again
    text, score = report.page(report.read(tmp_path / "verdicts.jsonl"), "seed 7")
    assert score == 2 / 3
    lines = text.splitlines()
    assert lines[2].endswith(": 2 of 3 caught; seed 7.")
    assert "| fxopt/passes | 2 | 3 |" in lines
    assert lines[-1].startswith("| fxopt/passes/x.py:2 | SURVIVED | 5 | ")


def test_equivalent_mutants_have_reasons():
    for mark in tomllib.loads(EQUIVALENT.read_text(encoding="utf-8")).get("mutant", []):
        assert mark.keys() == {"in", "digest", "change", "reason"}
        assert len(mark["reason"].split()) > 3
