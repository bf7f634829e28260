"""Names in the short run: each public name, each reason of a pass, and each other refusal that any test names.

The tests are read, not run. Long is what has the mark `long` on itself or on its file.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import fxopt

ROOT = Path(__file__).resolve().parents[1]
FEWEST, MANY, TELLING = 10, 16, 14
"""The letters of a text in a short test that names a refusal; those that both have in a row, if the text is longer; and the
letters of a text in a long test, where fewer are words that stand anywhere.
"""

UNNAMED = {
    "which is kept in float32, uses it as well"
}  # tests see the dtype of the parameter, not the reason

UNNAMED = {
    "which is kept in float32, uses it as well"
}  # tests see the dtype of the parameter, not the reason


@functools.cache
def constants(node: ast.AST) -> set[str]:
    found = (each.value for each in ast.walk(node) if isinstance(each, ast.Constant))
    return {value for value in found if isinstance(value, str)}


@functools.cache
def names(node: ast.AST) -> set[str]:
    """The names in a statement, among them those of attributes and of arguments, which may be fixtures."""
    fields = ("id", "arg", "attr", "name")
    return {str(getattr(each, field, "")) for each in ast.walk(node) for field in fields}


def is_long(*marks: ast.expr) -> bool:
    return any(ast.unparse(mark) == "pytest.mark.long" for mark in marks)


def short(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The tests of a file that are not long, and what they use of it."""
    tests = [s for s in body if isinstance(s, ast.FunctionDef) and s.name.startswith("test_")]
    wanted, seen = [test for test in tests if not is_long(*test.decorator_list)], set()
    while wanted:
        statement = wanted.pop()
        seen.add(statement)
        yield statement
        wanted += [s for s in body if s not in {*seen, *wanted, *tests} and names(s) & names(statement)]


@functools.cache
def statements() -> tuple[set[ast.stmt], set[ast.stmt]]:
    """All statements of the tests, and those of the short run."""
    every, chosen = set[ast.stmt](), set[ast.stmt]()
    for file in {*(ROOT / "tests").rglob("*.py")} - {Path(__file__)}:
        body = ast.parse(file.read_text()).body
        every |= {*body}
        marked = [
            s.value for s in body if isinstance(s, ast.Assign) and ast.unparse(s.targets[0]) == "pytestmark"
        ]
        if not is_long(*marked):
            chosen |= {*short(body)} if file.name.startswith("test_") else {*body}
    return every, chosen


def texts(found: Iterable[ast.stmt]) -> set[str]:
    """The texts in statements; of a pattern, the longest part without its signs."""
    parts = (re.split(r"[][\\(){}|^$?+*]|\.[*+]", text) for text in set[str]().union(*map(constants, found)))
    return {longest.strip() for each in parts if len(longest := max(each, key=len)) >= TELLING}


def parsed(*folders: str) -> Iterator[list[ast.AST]]:
    for file in sorted(file for folder in folders for file in (ROOT / "fxopt").glob(f"{folder}*.py")):
        yield [*ast.walk(ast.parse(file.read_text()))]


def reasons() -> Iterator[tuple[str, set[str]]]:
    """The fixed parts of what functions about obstacles return, and of what refusals are made with."""
    for nodes in parsed("passes/", "obstacles/", ""):
        said = [
            call.args[1:]
            for call in nodes
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "Refusal"
        ]
        for function in nodes:
            returns = ast.unparse(getattr(function, "returns", None) or ast.Pass())
            if isinstance(function, ast.FunctionDef) and returns in ("str | None", "nn.Module | str"):
                said.append([r.value for r in ast.walk(function) if isinstance(r, ast.Return) and r.value])
        for value in (value for values in said for value in values):
            if parts := {part.strip(" ,;:(") for part in constants(value) if len(part) > 6}:
                yield max(parts, key=len), parts


def by_short_tests() -> Callable[[str], bool]:
    """Tell of a text whether a short test has so many letters of it in a row, or whether it holds a line of one."""
    said = "\n".join(set[str]().union(*map(constants, statements()[1])))
    lines = [line for line in said.splitlines() if len(line) >= FEWEST]

    def named(text: str) -> bool:
        inside = (text[at : at + MANY] for at in range(max(1, len(text) - MANY + 1)))
        return any(piece in said for piece in inside) or any(line in text for line in lines)

    return named


def test_each_reason_of_a_pass_is_named_by_a_short_test() -> None:
    named, found = by_short_tests(), dict(reasons())
    assert len(found) > 40
    assert {reason for reason, parts in found.items() if not any(map(named, parts))} == UNNAMED


def test_what_a_long_test_names_a_short_one_names() -> None:
    every, chosen = statements()
    by_long, named = texts(every) - texts(chosen), by_short_tests()
    files = [*parsed("**/")]
    docstrings = {node.value for nodes in files for node in nodes if isinstance(node, ast.Expr)}
    code = (
        node for nodes in files for node in nodes if isinstance(node, ast.Constant) and node not in docstrings
    )
    refusals = {node.value for node in code if isinstance(node.value, str) and node.value.count(" ") > 1}
    alone = {said for said in refusals if any(text in said for text in by_long)}
    assert {said for said in alone if not named(said)} == set()
    in_all, in_short = (set[str]().union(*map(names, found)) for found in (every, chosen))
    assert in_all & {*fxopt.__all__} <= in_short
