"""Each reason for which a pass refuses a place is named by a test; a reason that none needs is reported here."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SOURCES = [
    *(file for room in ("passes", "obstacles", ".") for file in sorted((ROOT / "fxopt" / room).glob("*.py"))),
]
UNNAMED = {
    "which is kept in float32, uses it as well",  # tests see the dtype of the parameter, not the reason
}
"""Reasons that no test names yet."""


def reasons(path):
    """The texts that functions about obstacles return, and that refusals are made with, in their fixed parts."""
    for function in ast.walk(ast.parse(path.read_text())):
        if not isinstance(function, ast.FunctionDef):
            continue
        about_obstacles = ast.unparse(function.returns or ast.Constant(None)) in (
            "str | None",
            "nn.Module | str",
        )
        for node in ast.walk(function):
            values = []
            if isinstance(node, ast.Return) and about_obstacles and node.value is not None:
                values = [node.value]
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "Refusal":
                values = node.args[1:]
            for value in values:
                parts = [
                    c.value
                    for c in ast.walk(value)
                    if isinstance(c, ast.Constant) and isinstance(c.value, str)
                ]
                if parts and max(map(len, parts)) > 6:
                    yield max(parts, key=len).strip(" ,;:("), parts


def texts_of_tests():
    """The strings in the tests of passes and graphs that may name a reason."""
    files = [*(ROOT / "tests" / "passes").glob("*.py"), *(ROOT / "tests" / "hazards").glob("*.py")]
    for path in [*files, *(ROOT / "tests").glob("test_*.py")]:
        if path != pathlib.Path(__file__):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) > 5:
                    yield node.value


def named(part, text):
    """True where a test's text is in a part of a reason, or holds it, or 12 characters of it in a row."""
    whole = len(part.strip()) > 4 and part.strip() in text
    return whole or text in part or any(part[at : at + 12] in text for at in range(len(part) - 11))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_every_reason_is_named_by_a_test(path):
    texts = set(texts_of_tests())
    unnamed = {
        reason
        for reason, parts in reasons(path)
        if not any(named(part, text) for text in texts for part in parts)
    }
    assert not unnamed - UNNAMED, f"no test names these reasons: {sorted(unnamed - UNNAMED)}"


def test_reasons_are_found():
    assert sum(len(list(reasons(path))) for path in SOURCES) > 40
