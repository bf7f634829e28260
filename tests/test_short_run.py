"""The long tests name nothing alone: each public name, and each refusal that a test names, is in a test of the short run.

The tests are read, not run. Long is what has the mark `long` on itself or on its file.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import fxopt

ROOT = Path(__file__).resolve().parents[1]
FEWEST = 10
"""The letters that a text in a test must share with a refusal to name it."""


@functools.cache
def constants(node: ast.AST) -> set[str]:
    return {
        each.value
        for each in ast.walk(node)
        if isinstance(each, ast.Constant) and isinstance(each.value, str)
    }


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


def statements() -> tuple[set[ast.stmt], set[ast.stmt]]:
    """All statements of the tests, and those of the short run."""
    every, chosen = set[ast.stmt](), set[ast.stmt]()
    for file in (ROOT / "tests").rglob("*.py"):
        body = ast.parse(file.read_text()).body
        every |= {*body}
        marked = [
            s.value for s in body if isinstance(s, ast.Assign) and ast.unparse(s.targets[0]) == "pytestmark"
        ]
        if not is_long(*marked):
            chosen |= {*short(body)} if file.name.startswith("test_") else {*body}
    return every, chosen


def texts(found: set[ast.stmt]) -> set[str]:
    """The texts in statements; of a pattern, the longest part without its signs."""
    parts = (re.split(r"[][\\(){}|^$?+*]|\.[*+]", text) for text in set[str]().union(*map(constants, found)))
    return {longest.strip() for each in parts if len(longest := max(each, key=len)) >= FEWEST}


def refusals() -> set[str]:
    """The words of errors and reasons, without what is filled in: each text that is no docstring."""
    files = [[*ast.walk(ast.parse(file.read_text()))] for file in (ROOT / "fxopt").rglob("*.py")]
    docstrings = {node.value for nodes in files for node in nodes if isinstance(node, ast.Expr)}
    found = (node for nodes in files for node in nodes if node not in docstrings)
    said = {node.value for node in found if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {text for text in said if text.count(" ") > 1}


def test_what_a_long_test_names_a_short_one_names() -> None:
    every, chosen = statements()
    by_short = texts(chosen)
    by_long = texts(every) - by_short
    alone = {said for said in refusals() if any(text in said for text in by_long)}
    assert {said for said in alone if not any(text in said for text in by_short)} == set()
    named, named_by_short = (set[str]().union(*map(names, found)) for found in (every, chosen))
    assert named & {*fxopt.__all__} <= named_by_short
