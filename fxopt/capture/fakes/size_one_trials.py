"""Calls of torch made once more with a size set to 1, to compare their results with those of the general run."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import sympy
import torch

from fxopt.objects import mapped


class SizeOneTrials:
    """The trials of one ShapeEnv, each made once: layers repeat each other."""

    def __init__(self, shape_env: Any) -> None:
        # It has this object, and is freed with its last size.
        self._shape_env: Any = weakref.proxy(shape_env)
        self._verdicts: dict[str, bool] = {}

    def agree(
        self, symbol: sympy.Symbol, call: Callable[..., Any], args: Any, kwargs: Any, result: Any
    ) -> bool:
        """Tell whether `call(*args, **kwargs)` gives at size 1 what its `result` predicts."""
        one = {symbol: sympy.Integer(1)}
        # Layers of a model make the same calls on tensors of the same sizes, again and again.
        function = getattr(call, "__qualname__", ""), id(getattr(call, "__self__", call))
        key = repr((symbol, function, self._described(args, {}), self._described(list(kwargs.items()), {})))
        if key not in self._verdicts:
            # A condition on unbacked sizes here is not the forward's.
            env = self._shape_env
            decide, env.decide = env.decide, lambda expression: None
            failure = env.failure
            try:
                with torch.no_grad():
                    at_one = call(*self._substituted(args, one), **self._substituted(kwargs, one))
                self._verdicts[key] = self._described(result, one) == self._described(at_one, one)
            except Exception:
                # Not settled: the guard stays, or a capture of the whole forward decides.
                self._verdicts[key] = False
            finally:
                env.decide, env.failure = decide, failure
        return self._verdicts[key]

    def _substituted(self, value: Any, one: dict[Any, Any]) -> Any:
        """`value` with the symbol replaced by 1 in every tensor and size."""

        def at_one(part: Any) -> Any:
            if isinstance(part, torch.SymInt):
                expression = self._at_one(part, one)
                number = expression.is_number
                return int(expression) if number else self._shape_env.create_symintnode(expression, hint=None)
            if type(part) is torch.Size:
                return tuple(map(at_one, part))
            if not isinstance(part, torch.Tensor):
                return part
            if not any(isinstance(size, torch.SymInt) for size in (*part.shape, *part.stride())):
                return part
            shape, stride = (tuple(map(at_one, sizes)) for sizes in (part.shape, part.stride()))
            return torch.empty_strided(shape, stride, dtype=part.dtype, device=part.device)

        return mapped(value, at_one)

    def _described(self, value: Any, one: dict[Any, Any]) -> Any:
        """All that can be seen of a result: shapes and strides at size 1, types, and other values as they are."""
        if isinstance(value, torch.Tensor):
            shape = [self._at_one(size, one) for size in value.shape]
            # The stride of a dimension of size 1 says nothing about where elements lie.
            strides = zip(shape, value.stride(), strict=True)
            return shape, [self._at_one(s, one) if n != 1 else None for n, s in strides], value.dtype
        if isinstance(value, (tuple, list)):
            return [self._described(item, one) for item in value]
        if isinstance(value, torch.SymInt):
            return self._at_one(value, one)
        if dataclasses.is_dataclass(value) or isinstance(value, dict):
            return object()  # equal to nothing
        return value

    def _at_one(self, size: Any, one: dict[Any, Any]) -> Any:
        expression = size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
        return self._shape_env.replace(expression).xreplace(one)
