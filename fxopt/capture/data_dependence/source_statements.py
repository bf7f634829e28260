"""Statements of the model that ask for a value: for a message to a reader, in an assertion, or to decide."""

from __future__ import annotations

import ast
import dis
import functools
import linecache
from types import FrameType

from fxopt.capture.nodes.source_location import model_frame

# Their frames make texts for readers.
_TELLING = {"logging", "warnings", "traceback"}
# Between a text and the call that takes it, these decide.
_DECIDING = (ast.Compare, ast.IfExp, ast.BoolOp, ast.Lambda, ast.Subscript)
# What tells by its name, as `logger.warning` does, and what checks, as `torch._check`; others may keep the text, or decide on it.
_TELLERS = {"print", "warn", "warning", "debug", "info", "error", "critical", "exception"}
_CHECKS = {"check", "assert"}
# In the test of a `while`, these may count its rounds.
_COUNTING = (ast.BoolOp, ast.IfExp)


def is_diagnostic(frame: FrameType | None) -> bool:
    """Tell whether the text that is made in a frame is only raised, printed or logged, or the message of a check."""
    if frame is None:
        return False
    if frame.f_globals.get("__name__", "").partition(".")[0] in _TELLING:
        return True
    around = _around(frame)
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


def asserted_error(frame: FrameType | None) -> str:
    """The error that an `assert` raises if what is asked in its frame is false; empty where no `assert` asks, or others catch it."""
    around = _around(frame)
    statement = next((node for node in reversed(around) if isinstance(node, ast.stmt)), None)
    if (
        frame is None
        or not isinstance(statement, ast.Assert)
        or around[-1] not in (statement, statement.test)
    ):
        return ""
    test, operation = statement.test, dis.opname[frame.f_code.co_code[frame.f_lasti]]
    compared = test.ops if isinstance(test, ast.Compare) else []
    is_one = len(compared) == 1 or not isinstance(test, (ast.BoolOp, ast.IfExp, ast.UnaryOp, ast.Compare))
    is_asked = operation.startswith(("POP_JUMP", "TO_BOOL"))
    # The sizes in two lists are compared in turn.
    is_equality = operation == "COMPARE_OP" and list(map(type, compared)) == [ast.Eq]
    if not (is_one and (is_asked or is_equality)):
        return ""
    while frame is not None:
        if any(map(_may_catch, _around(frame))):
            return ""
        frame = model_frame(frame.f_back)
    message = statement.msg
    return f"AssertionError: {message.value!s}" if isinstance(message, ast.Constant) else "AssertionError"


def is_endless(frame: FrameType | None) -> bool:
    """Tell whether a `while` asks in a frame that hardly anything ends but that answer."""
    around = _around(frame)
    loop = next((node for node in reversed(around) if isinstance(node, ast.stmt)), None)
    if not isinstance(loop, ast.While) or any(isinstance(each, _COUNTING) for each in ast.walk(loop.test)):
        return False
    return not any(isinstance(node, (ast.Break, ast.Return, ast.Raise)) for node in ast.walk(loop))


def _may_catch(node: ast.AST) -> bool:
    """Tell whether a statement may catch what is raised in it: `with` does, but for contexts of torch."""
    if isinstance(node, (ast.With, ast.AsyncWith)):
        return any(not ast.unparse(item.context_expr).startswith("torch.") for item in node.items)
    return isinstance(node, (ast.Try, ast.TryStar))


def _around(frame: FrameType | None) -> list[ast.stmt | ast.expr]:
    """The statements and expressions around what a frame computes, the innermost last; none where its source is unknown."""
    if frame is None:
        return []
    start, end, column, end_column = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    if start is None or end is None or column is None or end_column is None:
        return []
    return [
        node
        for node in _nodes(frame.f_code.co_filename)
        if (node.lineno, node.col_offset) <= (start, column)
        and (end, end_column) <= (node.end_lineno, node.end_col_offset)
    ]


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
