"""A pass is one short file: lines of code, without docstrings, blank lines and comments."""

from __future__ import annotations

import ast
import io
import tokenize
from collections import defaultdict
from pathlib import Path

import pytest

import fxopt

PACKAGE = Path(fxopt.__file__).parent
LIMIT = 120

HALVES = {
    "obstacles/precision_plan.py": "passes/change_precision.py",
    "functional.py": "passes/make_layers.py",
    "obstacles/rounding.py": "passes/change_true_div_to_mul_by_inverse.py",
    "obstacles/slicing.py": "passes/merging.py",
    "obstacles/parametrized.py": "passes/fold_constants.py",
    "obstacles/parameter_constants.py": "passes/fold_scale_and_shift.py",
    **dict.fromkeys(
        (f"attention/{file.name}" for file in PACKAGE.glob("attention/*.py")), "passes/fuse_attention.py"
    ),
}
"""The files outside of `passes` that one pass alone imports, and that pass."""

TOGETHER = {"passes/change_precision.py": 350}
"""The lines that a pass and its halves may have together, where one of them has more than others."""

NOT_LINES = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}


def lines_of_code(source: str) -> int:
    found = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NOT_LINES:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            found.difference_update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(found)


def of(file: str) -> int:
    return lines_of_code((PACKAGE / file).read_text(encoding="utf-8"))


def test_lines_of_code_are_those_that_are_left():
    assert (
        lines_of_code(
            '"""Module."""\n\n# comment\ndef f(\n    x,\n):\n    """Doc."""\n    return """a\nb"""\n'
        )
        == 5
    )


@pytest.mark.parametrize("file", [*(f"passes/{file.name}" for file in PACKAGE.glob("passes/*.py")), *HALVES])
def test_a_pass_is_short(file):
    owner = HALVES.get(file, file)
    if owner in TOGETHER:
        assert of(owner) + sum(of(half) for half in HALVES if HALVES[half] == owner) <= TOGETHER[owner]
    else:
        assert of(file) <= LIMIT


def test_the_contract_is_short():
    """The contract and the rewriter, with docstrings."""
    files = ("__init__.py", "transformation.py", "rewrite.py", "rewriter.py")
    texts = [(PACKAGE / "rewriting" / file).read_text(encoding="utf-8") for file in files]
    assert sum(text.count("\n") for text in texts) <= 706


def test_what_is_exported_of_the_contract_is_short():
    """The same with refusals, compositions and the history, in lines of code."""
    files = ("transformation", "rewrite", "rewriter", "explanation", "composition", "history")
    assert sum(of(f"rewriting/{file}.py") for file in files) <= 706


def test_the_halves_of_passes_are_known():
    importers = defaultdict(set)
    for file in PACKAGE.rglob("*.py"):
        name = file.relative_to(PACKAGE).as_posix()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fxopt"):
                for module in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)):
                    path = "/".join(module.split(".")[1:]) + ".py"
                    if (PACKAGE / path).exists():
                        importers[path].add(name)
    alone = {
        half: HALVES.get(next(iter(users)), next(iter(users)))
        for half, users in importers.items()
        if half.count("/") == 0 or half.startswith(("attention/", "obstacles/"))
        if len({HALVES.get(user, user) for user in users}) == 1 and not half.startswith("passes/")
    }
    assert {half: owner for half, owner in alone.items() if owner.startswith("passes/")} == {
        half: owner for half, owner in HALVES.items() if not half.endswith("__init__.py")
    }
