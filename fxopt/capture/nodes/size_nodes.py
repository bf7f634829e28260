"""The nodes that compute sizes: the sympy expression of a SymInt in the arguments of a call is written as nodes.

The leaves are `size` calls on the node of a tensor with that dimension, or the node of the value that the size came from.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch.fx.proxy import GraphAppendingTracer, Proxy

from fxopt.capture.capture_internals import (
    DisableTorchFunction,
    PythonReferenceAnalysis,
    ShapeEnv,
    sympy_interp,
)
from fxopt.errors import TraceError

# The functions of `math` that torch supports as sympy functions, besides the square root, which torch computes itself.
FLOAT_FUNCTIONS = ("exp", "log", "log2", "sin", "cos", "tan", "sinh", "cosh", "tanh", "asin", "acos", "atan")
ROUNDING = (math.floor, math.ceil, math.trunc, round)


class SizeNodes:
    """The nodes of one graph that compute sizes; `bind` registers where a symbol comes from."""

    def __init__(self, graph: torch.fx.Graph, shape_env: ShapeEnv) -> None:
        self._tracer = GraphAppendingTracer(graph)
        self._graph = graph
        self._shape_env = shape_env
        self._origins: dict[sympy.Symbol, Callable[[], torch.fx.Node]] = {}
        self._nodes: dict[sympy.Expr, torch.fx.Node] = {}

    def bind(self, value: Any, origin: Callable[[], torch.fx.Node]) -> None:
        """Register `origin` as the source of `value` if `value` is a single symbol that has no source yet."""
        expression = value.node.expr
        if isinstance(expression, sympy.Symbol):
            self._origins.setdefault(expression, origin)
        elif isinstance(expression, sympy.Eq) and isinstance(expression.lhs, sympy.Symbol):
            # `.item()` of a boolean tensor is `Eq(symbol, 1)`.
            self._origins.setdefault(expression.lhs, lambda: self._graph.call_function(int, (origin(),)))

    def lacks_source(self, value: Any) -> bool:
        """Tell whether `value` depends on a symbol that has no source."""
        return not self._origins.keys() >= value.node.expr.free_symbols

    def has_source(self, symbol: sympy.Symbol) -> bool:
        """Tell whether a symbol has a source."""
        return symbol in self._origins

    def bind_shape(self, tensor: torch.Tensor, node: Callable[[], torch.fx.Node]) -> None:
        """Register the dimensions of `tensor`, made by `node()`, as sources of their symbols."""
        for dim, size in enumerate(tensor.shape):
            if isinstance(size, torch.SymInt):
                self.bind(size, lambda dim=dim: self._graph.call_method("size", (node(), dim)))
                if not size.node.has_hint():
                    self._bind_offset(tensor, node)

    def _bind_offset(self, tensor: torch.Tensor, node: Callable[[], torch.fx.Node]) -> None:
        """Register the storage offset of `tensor`, which may be a slice that begins at an unbacked number."""
        with DisableTorchFunction():
            offset = tensor.storage_offset() if tensor.layout == torch.strided else 0
        if isinstance(offset, torch.SymInt):
            self.bind(offset, lambda: self._graph.call_method("storage_offset", (node(),)))

    def node(self, value: Any) -> Any:
        """The node that computes `value`, or a Python number if the value is known."""
        result = self.node_of(self._shape_env.replace(value.node.expr), value.node.pytype)
        if isinstance(result, torch.fx.Node):
            result.meta["val"] = value
        return result

    def node_of(self, expression: Any, number: type = bool) -> Any:
        """The node that computes a sympy expression, or a Python number of this type."""
        if expression.is_number or expression in (sympy.true, sympy.false):
            return number(expression)
        if expression not in self._nodes:
            self._nodes[expression] = self._compute(expression)
        return self._nodes[expression]

    def _compute(self, expression: Any) -> torch.fx.Node:
        leaves = {symbol: Proxy(self._leaf(symbol), self._tracer) for symbol in expression.free_symbols}
        if isinstance(expression, sympy.Symbol):
            return leaves[expression].node
        result = sympy_interp(_Analysis, leaves, expression)
        node: torch.fx.Node = result.node
        return node

    def _leaf(self, symbol: sympy.Symbol) -> torch.fx.Node:
        if symbol not in self._nodes:
            if symbol not in self._origins:
                raise TraceError(
                    f"The size {symbol} comes from a tensor that was made out of sight of the capture "
                    "(in a custom C++ function, or by a transform of torch.func). Make the module that makes it a leaf."
                )
            self._nodes[symbol] = self._origins[symbol]()
        return self._nodes[symbol]


class _Analysis(PythonReferenceAnalysis):
    """Python's arithmetic on proxies; rounding, which Python does only on numbers, becomes a separate node."""

    @staticmethod
    def identity(x: Any) -> Any:
        return x

    @staticmethod
    def int_truediv(a: Any, b: Any) -> Any:
        return a / b

    @staticmethod
    def round_decimal(x: Any, digits: Any) -> Any:
        return _rounded(round, x, digits)


def _rounded(function: Callable[..., Any], *args: Any) -> Any:
    if not isinstance(args[0], Proxy):
        return function(*args)
    return args[0].tracer.create_proxy("call_function", function, args, {})


def _to_int(function: Callable[..., Any], x: Any, dtype: Any) -> Any:
    return _rounded(function, x)


for _name in FLOAT_FUNCTIONS:
    setattr(_Analysis, _name, staticmethod(functools.partial(_rounded, getattr(math, _name))))
for _function in ROUNDING:
    setattr(_Analysis, f"{_function.__name__}_to_int", staticmethod(functools.partial(_to_int, _function)))
