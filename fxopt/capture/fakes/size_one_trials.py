"""Calls of torch made once more with a size set to 1, to compare their results with those of the general run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import sympy
import torch

from fxopt.objects import mapped

# Returns the expression of a size after the tested symbol is set to 1.
AtOne = Callable[[Any], Any]


def agrees_at_one(
    shape_env: Any, symbol: sympy.Symbol, call: Callable[..., Any], args: Any, kwargs: Any, result: Any
) -> bool:
    """Tell whether `call(*args, **kwargs)` with `symbol` set to 1 gives what the general `result` predicts."""

    def at_one(size: Any) -> Any:
        expression = size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
        return shape_env.replace(expression).xreplace({symbol: sympy.Integer(1)})

    decide, failure = shape_env.decide, shape_env.failure
    shape_env.decide = lambda expression: None  # conditions on unbacked sizes here are not the forward's
    try:
        with torch.no_grad():
            tried = call(*_substituted(args, shape_env, at_one), **_substituted(kwargs, shape_env, at_one))
        return bool(_described(result, at_one) == _described(tried, at_one))
    except Exception:
        return False  # not settled: the guard stays, or a capture of the whole forward decides
    finally:
        shape_env.decide, shape_env.failure = decide, failure


def _substituted(value: Any, shape_env: Any, at_one: AtOne) -> Any:
    """`value` with the symbol replaced by 1 in every tensor and size."""

    def substituted(part: Any) -> Any:
        if isinstance(part, torch.SymInt):
            expression = at_one(part)
            return int(expression) if expression.is_number else shape_env.symbolic(expression, int)
        if type(part) is torch.Size:
            return tuple(map(substituted, part))
        if not isinstance(part, torch.Tensor):
            return part
        if not any(isinstance(size, torch.SymInt) for size in (*part.shape, *part.stride())):
            return part
        shape, stride = (tuple(map(substituted, sizes)) for sizes in (part.shape, part.stride()))
        return torch.empty_strided(shape, stride, dtype=part.dtype, device=part.device)

    return mapped(value, substituted)


def _described(value: Any, at_one: AtOne) -> Any:
    """The visible properties of a result: shapes and strides at size 1, types, and other values unchanged."""
    if isinstance(value, torch.Tensor):
        shape = list(map(at_one, value.shape))
        # The stride of a dimension of size 1 says nothing about where elements lie.
        strides = zip(shape, value.stride(), strict=True)
        return shape, [at_one(stride) if size != 1 else None for size, stride in strides], value.dtype
    if isinstance(value, (tuple, list)):
        return [_described(item, at_one) for item in value]
    if isinstance(value, torch.SymInt):
        return at_one(value)
    if dataclasses.is_dataclass(value) or isinstance(value, dict):
        return object()  # equal to nothing
    return value
