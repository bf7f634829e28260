"""Conditions on sizes in a saved graph: arithmetic, and nothing more, because a guard makes them a function of Python."""

from __future__ import annotations

import ast

# What torch writes of sizes: arithmetic, comparisons, and calls of the functions below.
_PARTS = (
    *(ast.Expression, ast.Constant, ast.Name, ast.Load, ast.IfExp, ast.BoolOp, ast.boolop),
    *(ast.UnaryOp, ast.unaryop, ast.BinOp, ast.operator, ast.Compare, ast.cmpop, ast.Call, ast.Attribute),
)
_FUNCTIONS = ("abs", "bool", "float", "int", "max", "min", "round")


def is_arithmetic(text: object) -> bool:
    """Tell whether a text is an expression in sizes that computes and does nothing else.

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
    if isinstance(part, ast.Constant):
        return isinstance(part.value, bool | int | float)
    if isinstance(part, ast.Name):
        return not part.id.startswith("_")
    if isinstance(part, ast.Call):
        function = part.func
        known = isinstance(function, ast.Attribute) or getattr(function, "id", None) in _FUNCTIONS
        return known and not part.keywords
    if isinstance(part, ast.Attribute):
        module = getattr(part.value, "id", None)
        return (module == "math" and part.attr[0] != "_") or (module == "torch" and part.attr[:4] == "sym_")
    return isinstance(part, _PARTS)
