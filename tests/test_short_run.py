"""Names in the short run: each public name, each reason of a pass, and each other refusal that any test names.

The tests are read, not run. Long is what has the mark `long` on itself or on its file.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import fxopt

ROOT = Path(__file__).resolve().parents[1]
SHARED, FEWEST, TELLING = 16, 10, 14
"""The letters in a row that a text and a test that names it share; those that a test has at least where it names a part
of a text in fewer; and those in a long test, where fewer are words that stand anywhere.
"""

UNNAMED = {
    "which is kept in float32, uses it as well",
    "kept in float32",
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


def texts(*patterns: str) -> Iterator[set[str]]:
    """The fixed parts of each text of three words or more in files of fxopt, but for docstrings."""
    for file in sorted(file for pattern in patterns for file in (ROOT / "fxopt").glob(pattern)):
        nodes = [*ast.walk(ast.parse(file.read_text()))]
        whole = (node for node in nodes if isinstance(node, ast.Expr | ast.JoinedStr))
        inside = {part for node in whole for part in ast.iter_child_nodes(node)}
        for node in nodes:
            if isinstance(node, ast.Constant | ast.JoinedStr) and node not in inside:
                parts = {part.strip(" ,;:(") for part in constants(node) if len(part) > 6}
                if sum(part.count(" ") for part in parts) > 1:
                    yield parts


def named_by(found: Iterable[ast.stmt], fewest: int) -> Callable[[set[str]], bool]:
    """Tell of the parts of a text whether statements share a piece of one, or have a line that is in one."""
    said = "\n".join(set[str]().union(*map(constants, found)))
    lines = [line for line in said.splitlines() if len(line) >= fewest]

    def named(part: str) -> bool:
        pieces = (part[at : at + SHARED] for at in range(max(1, len(part) - SHARED + 1)))
        return any(piece in said for piece in pieces) or any(line in part for line in lines)

    return lambda parts: any(map(named, parts))


def test_each_reason_of_a_pass_is_named_by_a_short_test() -> None:
    named = named_by(statements()[1], FEWEST)
    found = [*texts("passes/*.py", "obstacles/*.py", "graph_index.py")]
    assert len(found) > 40
    assert {max(parts, key=len) for parts in found if not named(parts)} == UNNAMED


def test_what_a_long_test_names_a_short_one_names() -> None:
    every, chosen = statements()
    by_any, by_short = named_by(every, TELLING), named_by(chosen, FEWEST)
    assert [parts for parts in texts("**/*.py") if by_any(parts) and not by_short(parts)] == []
    in_all, in_short = (set[str]().union(*map(names, found)) for found in (every, chosen))
    assert in_all & {*fxopt.__all__} <= in_short
