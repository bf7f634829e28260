"""Texts that hold values: whether one is a message to a reader, or something that the forward may decide upon."""

from __future__ import annotations

import ast
import functools
import linecache
from types import FrameType

# Their frames make texts for readers.
_TELLING = {"logging", "warnings", "traceback"}
# Between a text and the call that takes it, these decide.
_DECIDING = (ast.Compare, ast.IfExp, ast.BoolOp, ast.Lambda, ast.Subscript)
# What tells by its name, as `logger.warning` does, and what checks, as `torch._check`; others may keep the text, or decide on it.
_TELLERS = {"print", "warn", "warning", "debug", "info", "error", "critical", "exception"}
_CHECKS = {"check", "assert"}


def is_diagnostic(frame: FrameType | None) -> bool:
    """Tell whether the text that is made in a frame is only raised, printed or logged, or the message of a check."""
    if frame is None:
        return False
    if frame.f_globals.get("__name__", "").partition(".")[0] in _TELLING:
        return True
    start, end, column, end_column = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    if start is None or end is None or column is None or end_column is None:
        return False
    around = [
        node
        for node in _nodes(frame.f_code.co_filename)
        if (node.lineno, node.col_offset) <= (start, column)
        and (end, end_column) <= (node.end_lineno, node.end_col_offset)
    ]
    statements = [node for node in around if isinstance(node, ast.stmt)]
    if not statements:
        return False
    inside = around[around.index(statements[-1]) + 1 :]
    if any(isinstance(node, _DECIDING) for node in inside):
        return False
    statement = statements[-1]
    if isinstance(statement, ast.Assert):
        return statement.msg in inside
    return isinstance(statement, ast.Raise) or (isinstance(statement, ast.Expr) and _tells(statement.value))


def _tells(call: ast.expr) -> bool:
    if not isinstance(call, ast.Call) or not isinstance(call.func, (ast.Name, ast.Attribute)):
        return False
    name = call.func.id if isinstance(call.func, ast.Name) else call.func.attr
    return name.removesuffix("_once") in _TELLERS or not _CHECKS.isdisjoint(name.split("_"))


@functools.lru_cache(maxsize=64)
def _nodes(filename: str) -> list[ast.stmt | ast.expr]:
    """The statements and expressions of a file, each before what is in it."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:
        return []
    return [node for node in _inside(tree) if isinstance(node, (ast.stmt, ast.expr))]


def _inside(node: ast.AST) -> list[ast.AST]:
    return [node, *(part for child in ast.iter_child_nodes(node) for part in _inside(child))]
