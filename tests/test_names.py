"""Names: one name stands for one thing."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import fxopt
import validation
from validation.records import Check

EVERY_PACKAGE_HAS = {"__init__.py", "__main__.py"}


def test_no_two_files_have_one_name() -> None:
    files = list(Path(fxopt.__file__).parent.rglob("*.py"))
    assert len(files) > 50
    names = Counter(file.name for file in files if file.name not in EVERY_PACKAGE_HAS)
    assert [name for name, count in names.items() if count > 1] == []


def test_trace_is_the_function_that_captures_and_no_check_or_stage_of_the_harness() -> None:
    text = "".join(file.read_text() for file in Path(validation.__file__).parent.rglob("*.py"))
    stages = set(re.findall(r'entering\("(.+?)"\)', text))
    assert {"transform", "compare"} <= stages
    assert "trace" not in stages | {*Check}


def test_docstrings_begin_with_what_is_said_and_not_with_a_question_word() -> None:
    root = Path(__file__).parent.parent
    folders = ("fxopt", "validation", "tests", "examples", "docs", ".ci")
    files = [*root.glob("*.py"), *(file for name in folders for file in (root / name).rglob("*.py"))]
    assert len(files) > 300
    begin_so = [
        f"{file.relative_to(root)}:{statement.lineno}: {text.splitlines()[0]}"
        for file in files
        for statement, text in texts(ast.parse(file.read_text()))
        if re.match(r"(What|Whether|Which)\b", text)
    ]
    assert begin_so == []


def texts(module: ast.Module) -> Iterator[tuple[ast.stmt, str]]:
    """The docstrings of a file: statements that are a string, below a constant, too."""
    for node in ast.walk(module):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node, text.lstrip()
