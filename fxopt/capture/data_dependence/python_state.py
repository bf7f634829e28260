"""Snapshots of Python variables at a branch, to tell whether its body changes them."""

from __future__ import annotations

import operator
import types
from types import FrameType
from typing import Any

import torch

from fxopt.capture.nodes.source_location import RUN_FORWARD, is_model_code
from fxopt.objects import attributes

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_OPAQUE = (
    *(torch.Tensor, torch.nn.Module, torch.SymInt, torch.SymFloat, torch.SymBool),
    *(types.ModuleType, types.FunctionType, type),
)
# Values that are nested deeper than this are not compared.
_DEPTH = 6

FrameSnapshot = list[dict[str, Any]]


def python_state(frame: FrameType | None) -> FrameSnapshot:
    """Return for each frame of the model on the stack the contents of its variables and named globals, except tensors."""
    states: FrameSnapshot = []
    while frame is not None and frame.f_code.co_name != RUN_FORWARD:
        if is_model_code(frame.f_code.co_filename):
            named = {name: frame.f_globals[name] for name in frame.f_code.co_names if name in frame.f_globals}
            states.append({name: _held(value, _DEPTH) for name, value in (named | frame.f_locals).items()})
        frame = frame.f_back
    return states


def same_state(one: FrameSnapshot, other: FrameSnapshot) -> bool:
    """Tell whether the variables that have a value in both snapshots are equal."""
    return len(one) == len(other) and all(
        mine[name] == its[name]
        for mine, its in zip(one, other, strict=True)
        for name in mine.keys() & its.keys()
    )


def _held(value: Any, depth: int) -> Any:
    if isinstance(value, _PLAIN):
        return type(value).__name__, value
    if not depth or isinstance(value, _OPAQUE):
        return None
    if isinstance(value, dict):
        keys = (repr(key) if isinstance(key, _PLAIN) else None for key in value)
        return [(key, _held(item, depth - 1)) for key, item in zip(keys, value.values(), strict=True)]
    if isinstance(value, (list, tuple)):
        return [_held(item, depth - 1) for item in value]
    if isinstance(value, (set, frozenset)):
        return len(value), {item for item in value if isinstance(item, _PLAIN)}
    if hasattr(type(value), "__length_hint__"):
        return operator.length_hint(value)
    return _held(attributes(value), depth - 1)
