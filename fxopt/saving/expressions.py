"""Checks that conditions on sizes in a saved graph are only arithmetic, because guards compile them to Python functions."""

from __future__ import annotations

import ast
import re

# The syntax of torch's expressions of sizes: arithmetic, comparisons, and calls of the functions below.
_PARTS = (
    *(ast.Expression, ast.Constant, ast.Name, ast.Load, ast.IfExp, ast.BoolOp, ast.boolop),
    *(ast.UnaryOp, ast.unaryop, ast.BinOp, ast.operator, ast.Compare, ast.cmpop, ast.Call, ast.Attribute),
)
_FUNCTIONS = re.compile(r"abs|bool|float|int|max|min|round|math\.[a-zA-Z]\w*|torch\.sym_\w+")


def is_arithmetic(text: object) -> bool:
    """Tell whether a text is an expression of sizes that has no effect but to compute a value.

    Example:
        >>> is_arithmetic("max(s0, 2) % 8 == 0 and math.floor(s0 / 3) < 5"), is_arithmetic("open('x').write(s0)")
        (True, False)
    """
    if not isinstance(text, str):
        return False
    try:
        return all(map(_is_harmless, ast.walk(ast.parse(text, mode="eval"))))
    except (SyntaxError, ValueError, RecursionError):
        return False


def _is_harmless(part: ast.AST) -> bool:
    match part:
        case ast.Constant():
            return isinstance(part.value, int | float)
        case ast.Name():
            return not part.id.startswith("_")
        case ast.Call():
            return _FUNCTIONS.fullmatch(ast.unparse(part.func)) is not None and not part.keywords
        case ast.Attribute():
            return _FUNCTIONS.fullmatch(ast.unparse(part)) is not None
    return isinstance(part, _PARTS)
