"""Places in the model's code: the frames of the stack that are neither torch's nor the capture's."""

from __future__ import annotations

import dis
import functools
import itertools
import linecache
import os
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, TypeVar

import sympy
import torch

from fxopt.graph import source_line

_TORCH = os.path.dirname(torch.__file__) + os.sep
_CAPTURE = sys.modules["fxopt.capture"].__path__[0] + os.sep
_FXOPT = sys.modules["fxopt"].__path__[0] + os.sep
# The function that runs the model's forward: frames outside of it belong to the caller.
RUN_FORWARD = "_run_forward"
CAPTURE = "capture_graph"  # the function that calls RUN_FORWARD

F = TypeVar("F", bound=Callable[..., Any])
_MAKES_CALLS: set[CodeType] = set()


def describe_location(frame: FrameType | None, module: tuple[str, str] | None) -> str:
    """Describe a place in the model's code: module path, file, line, source text."""
    inside = f"In module {module[0] or 'the root'!r} ({module[1]})" if module else "In the forward"
    if frame is None:
        return f"{inside}."
    file, line = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(file, line).strip()
    return f"{inside}, at {file}:{line}: `{text}`." if text else f"{inside}, at {file}:{line}."


def describe_origin(node: torch.fx.Node) -> str:
    """Say what made the value of a node: an input, or a call at a line of the model."""
    if node.op == "placeholder":
        return f"the input {str(node.target).lstrip('*')!r}"
    if node.op == "get_attr":
        return f"the tensor {node.target!r} of the model"
    if "stack_trace" not in node.meta:  # it computes with a size, or follows a path into a result
        sources = [describe_origin(source).removeprefix("computed from ") for source in node.all_input_nodes]
        return f"computed from {' and '.join(dict.fromkeys(sources))}"
    module = list(node.meta["nn_module_stack"])[-1:]
    place = source_line(node) or "an unknown place"
    return f"the result {node.name!r}, made in module {''.join(module) or 'the root'!r}, at {place}"


_SYMPY = os.path.dirname(sympy.__file__) + os.sep
# pytest refers to all tests and their results, which takes seconds to look through.
_NOT_A_MODEL = {*sys.stdlib_module_names, "torch", "numpy", "fxopt", "sympy", "pytest", "_pytest", "pluggy"}


def is_model_code(filename: str) -> bool:
    """Tell whether a file belongs to the model rather than to torch or to the capture."""
    return not filename.startswith((_TORCH, _FXOPT, _SYMPY))


def is_model_package(module: Any) -> bool:
    """Tell whether a module, by its name, belongs to the model rather than to Python, torch or numpy."""
    return isinstance(module, str) and module.partition(".")[0] not in _NOT_A_MODEL


def model_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the model's code; None if only code of torch and of the capture runs."""
    while frame is not None and not is_model_code(frame.f_code.co_filename):
        frame = None if frame.f_code.co_name == CAPTURE else frame.f_back  # outer frames are the caller's
    return frame


def makes_calls(function: F) -> F:
    """Mark a function of the capture that makes the model's calls: an error of a C function of torch appears to come from it."""
    _MAKES_CALLS.add(function.__code__)
    return function


def is_own_code(code: CodeType) -> bool:
    """Tell whether an error raised by this code of the capture is a bug of the capture."""
    return code.co_filename.startswith(_CAPTURE) and code not in _MAKES_CALLS


class RunningCode:
    """The functions of a model that called torch, directly or through others, with their globals."""

    def __init__(self) -> None:
        self.functions: dict[CodeType, dict[str, Any]] = {}
        self.runs = 0
        self.left_fakes = False  # the forward left fakes outside of the model


@functools.lru_cache(maxsize=4096)
def compares_identity(code: CodeType) -> bool:
    """Tell whether code has an `a is b` of two variables or items, not with a constant or a class."""
    names = [instruction.opname for instruction in dis.get_instructions(code)]
    return any(
        after == "IS_OP" and before.startswith(("LOAD_FAST", "LOAD_DEREF", "BINARY_SUBSCR", "BINARY_OP"))
        for before, after in itertools.pairwise(names)
    )


@functools.lru_cache(maxsize=4096)
def compares_with_flag(code: CodeType) -> bool:
    """Tell whether code has an `a is True`, or `a is False`."""
    pairs = itertools.pairwise(dis.get_instructions(code))
    return any(after.opname == "IS_OP" and isinstance(before.argval, bool) for before, after in pairs)


def stack_trace(frame: FrameType | None, running: RunningCode) -> str:
    """The model's part of the stack in Python's format, empty after the forward; `running` gets the functions in it."""
    lines: list[str] = []
    functions: dict[CodeType, dict[str, Any]] = {}
    while frame is not None and frame.f_code.co_name != RUN_FORWARD:
        code = frame.f_code
        if is_model_code(code.co_filename):
            functions[code] = frame.f_globals
            lines.append(_frame_text(code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    if frame is None:
        return ""
    running.functions |= functions
    return sys.intern("".join(reversed(lines)))  # layers share their lines


@functools.lru_cache(maxsize=4096)
def _frame_text(filename: str, line: int, function: str) -> str:
    return (
        f'  File "{filename}", line {line}, in {function}\n    {linecache.getline(filename, line).strip()}\n'
    )
