"""The purpose of a statement of the model that reads a value: a message, an assertion, or a decision."""

from __future__ import annotations

import ast
import dis
import functools
import linecache
from types import FrameType

from fxopt.capture.nodes.source_location import model_frame

# Packages whose frames format messages.
_TELLING = {"logging", "warnings", "traceback"}
# Expressions that decide on a text if they are between the text and the call that uses it.
_DECIDING = (ast.Compare, ast.IfExp, ast.BoolOp, ast.Lambda, ast.Subscript)
# Names of functions that print, as `logger.warning`, or check, as `torch._check`; others may store a text or decide on it.
_TELLERS = {"print", "warn", "warning", "debug", "info", "error", "critical", "exception"}
_CHECKS = {"check", "assert"}
# Expressions that may limit the rounds of a `while` if they are in its test.
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
    """Return the error of the `assert` that reads a value in this frame; empty if there is none, or its error may be caught."""
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
    # A comparison of two lists compares their sizes one after the other.
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
    """Tell whether the test of a `while` reads the value in this frame, and hardly anything else ends the loop."""
    around = _around(frame)
    loop = next((node for node in reversed(around) if isinstance(node, ast.stmt)), None)
    if not isinstance(loop, ast.While) or any(isinstance(each, _COUNTING) for each in ast.walk(loop.test)):
        return False
    return not any(isinstance(node, (ast.Break, ast.Return, ast.Raise)) for node in ast.walk(loop))


def _may_catch(node: ast.AST) -> bool:
    """Tell whether a statement may catch errors raised in it: `try`, and `with` unless it enters contexts of torch."""
    if isinstance(node, (ast.With, ast.AsyncWith)):
        return any(not ast.unparse(item.context_expr).startswith("torch.") for item in node.items)
    return isinstance(node, (ast.Try, ast.TryStar))


def _around(frame: FrameType | None) -> list[ast.stmt | ast.expr]:
    """Return the statements and expressions around the current operation of a frame, innermost last; empty without source."""
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
    """Return the statements and expressions of a file, outer ones before inner ones."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:
        return []
    return [node for node in _inside(tree) if isinstance(node, (ast.stmt, ast.expr))]


def _inside(node: ast.AST) -> list[ast.AST]:
    return [node, *(part for child in ast.iter_child_nodes(node) for part in _inside(child))]
