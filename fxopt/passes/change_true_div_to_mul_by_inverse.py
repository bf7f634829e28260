"""Division by a constant becomes multiplication by its inverse."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from fxopt import graph
from fxopt.errors import UndoError
from fxopt.rewrite import Change, Refusal, ReversibleRewrite


@dataclasses.dataclass(frozen=True)
class Division:
    """A true division of a value by a constant."""

    node: Node
    denominator: int | float


@dataclasses.dataclass(frozen=True)
class ChangeTrueDivToMulByInverse(ReversibleRewrite[Division]):
    """Replaces `x / c` by `x * (1 / c)`, where `c` is a constant of the graph.

    Where `c` is a power of two, the result is the same bit for bit. Elsewhere it differs by at most one unit
    in the last place more than a division does. Such a division is rewritten only where `x` is known to be a
    floating tensor and where no rounding, comparison or cast to integers follows that would amplify the
    difference (49 / 49 is 1, 49 * (1 / 49) is less). Undoing brings back the very same `c` from the record.

    Example:
        >>> import operator, torch
        >>> class Scores(torch.nn.Module):
        ...     def forward(self, x):
        ...         return x / 8
        >>> change = ChangeTrueDivToMulByInverse()
        >>> print(change(torch.fx.symbolic_trace(Scores())).code.strip())
        def forward(self, x):
            truediv = x * 0.125;  x = None
            return truediv
    """

    preserves_computation = True

    def match(self, graph_module: GraphModule) -> Iterator[Division | Refusal]:
        """Yield the divisions by a constant."""
        index = graph.GraphIndex(graph_module)
        floating: dict[Node, bool] = {}
        for node in index.nodes:
            floating[node] = _is_floating(index, node, floating)
            if not _is_division(node):
                continue
            numerator, denominator = _operands(node)
            if not isinstance(numerator, Node):
                continue
            reason = _obstacle(numerator, denominator) or _rounding_obstacle(
                node, numerator, denominator, floating
            )
            yield Refusal(node, reason) if reason else Division(node, denominator)

    def apply(self, graph_module: GraphModule, site: Division) -> Change:
        """Make the node a multiplication."""
        node = site.node
        data: dict[str, Any] = {
            "op": node.op,
            "target": node.target,
            "args": len(node.args),
            "kwargs": tuple(node.kwargs),
        }
        numerator, _ = _operands(node)
        inverse = 1 / site.denominator
        node.op, node.target = "call_function", operator.mul
        node.args, node.kwargs = (numerator, inverse), {}
        data |= {"denominator": site.denominator, "inverse": inverse}
        return Change((node,), {"node": node}, data=data)

    def revert(self, graph_module: GraphModule, nodes: dict[str, Node], data: Any) -> None:
        """Make the node the division that it was."""
        node = nodes["node"]
        if node.target is not operator.mul or len(node.args) != 2 or node.args[1] != data["inverse"]:
            raise UndoError(f"{self!r} cannot be undone: {node.name} was changed since")
        values = [node.args[0], data["denominator"]]
        node.op, node.target = data["op"], data["target"]
        node.args = tuple(values[: data["args"]])
        node.kwargs = dict(zip(data["kwargs"], values[data["args"] :], strict=True))


def _is_division(node: Node) -> bool:
    if node.op == "call_method":
        named = node.target in ("div", "divide", "true_divide", "__truediv__")
    else:
        named = node.op == "call_function" and node.target in _DIVISIONS
    return named and len(node.args) + len(node.kwargs) == 2 and set(node.kwargs) <= {"other"}


_DIVISIONS = (operator.truediv, torch.div, torch.divide, torch.true_divide)


def _operands(node: Node) -> tuple[Any, Any]:
    numerator, denominator = [*node.args, *node.kwargs.values()]
    return numerator, denominator


def _obstacle(numerator: Node, denominator: object) -> str | None:
    if isinstance(denominator, Node):
        return "the denominator is computed in the graph"
    if type(denominator) not in (int, float):
        return f"the denominator is a {type(denominator).__name__}, not an int or a float"
    assert isinstance(denominator, int | float)
    if isinstance(denominator, int) and abs(denominator) >= 2**63:
        return "the denominator is not a 64-bit integer"
    if denominator == 0 or not math.isfinite(denominator):
        return f"the denominator is {denominator}"
    dtype = graph.dtype_of(numerator)
    if dtype is not None and dtype.is_complex:
        return "the numerator is complex"
    # Outside of these a constant, or its inverse, underflows or overflows in the dtype of the computation.
    info = torch.finfo(dtype if dtype is not None and dtype.is_floating_point else torch.float16)
    if not all(info.tiny <= abs(value) <= info.max for value in (denominator, 1 / denominator)):
        return f"{denominator} or its inverse is outside of the normal range of {info.dtype} numbers"
    return None


def _rounding_obstacle(
    node: Node, numerator: Node, denominator: int | float, floating: dict[Node, bool]
) -> str | None:
    """Why the inverse, which is not exact unless the denominator is a power of two, is not good enough."""
    if math.frexp(abs(denominator))[0] == 0.5:
        return None
    if not floating[numerator]:
        return (
            f"1 / {denominator} is not exact, and {numerator.name} is not known to be a floating tensor "
            "(a graph of fxopt.trace has dtypes)"
        )
    pending, seen = [node], {node}
    while pending:
        for user in pending.pop().users:
            if _is_step(user):
                return f"1 / {denominator} is not exact, and {user.name} ({_name(user)}) amplifies the error"
            if user not in seen and _name(user) in _PASSES_ERROR_ON:
                seen.add(user)
                pending.append(user)
    return None


def _is_step(node: Node) -> bool:
    """Whether a function jumps, so that the least error of its input may change its output by one."""
    dtype = graph.dtype_of(node)
    if dtype is not None and not (dtype.is_floating_point or dtype.is_complex):
        return True
    targets = (*node.args, *node.kwargs.values())
    casts = any(isinstance(t, torch.dtype) and not t.is_floating_point and not t.is_complex for t in targets)
    return casts or _name(node) in _STEPS


def _name(node: Node) -> str:
    name = getattr(node.target, "__name__", str(node.target)) if node.op.startswith("call_") else node.op
    return str(name).strip("_")


_STEPS = {
    *("floor", "ceil", "round", "trunc", "fix", "frac", "sign", "sgn", "heaviside", "floor_divide"),
    *("floordiv", "mod", "remainder", "fmod", "eq", "ne", "lt", "le", "gt", "ge", "equal", "isclose"),
    *("int", "long", "short", "byte", "char", "bool", "item", "tolist", "argmax", "argmin", "argsort"),
    *("bucketize", "searchsorted", "unique", "logical_not", "nonzero", "less", "greater", "not_equal"),
}

# Elementwise functions, and those that only move values: behind them the error is still there.
_PASSES_ERROR_ON = {
    *("add", "sub", "subtract", "mul", "multiply", "truediv", "div", "divide", "neg", "negative", "abs"),
    *("pow", "square", "sqrt", "clamp", "clip", "minimum", "maximum", "view", "reshape", "flatten"),
    *("transpose", "permute", "getitem", "squeeze", "unsqueeze", "expand", "contiguous", "clone", "to"),
    *(
        "float",
        "double",
        "half",
        "bfloat16",
        "type",
        "type_as",
        "masked_fill",
        "where",
        "cat",
        "stack",
        "chunk",
    ),
    *("split", "select", "detach", "iadd", "isub", "imul", "itruediv", "t", "repeat", "unbind", "narrow"),
}


def _is_floating(index: graph.GraphIndex, node: Node, floating: dict[Node, bool]) -> bool:
    """Whether the value of `node` is surely a floating tensor; by its metadata, else by what made it."""
    dtype = graph.dtype_of(node)
    if dtype is not None:
        return dtype.is_floating_point
    if "val" in node.meta:
        return False
    if node.op == "call_module":
        module = index.module(node)
        own = [p for p in module._parameters.values() if p is not None]
        return type(module) in _FLOATING_MODULES and all(p.is_floating_point() for p in own)
    if node.op in ("call_function", "call_method") and _name(node) in _KEEPS_FLOATING and not node.kwargs:
        tensors = [value for value in node.args if isinstance(value, Node)]
        return (
            bool(tensors) and floating[tensors[0]] and not any(isinstance(a, torch.dtype) for a in node.args)
        )
    return False


_FLOATING_MODULES: set[type[nn.Module]] = {
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding, nn.LayerNorm, nn.BatchNorm1d),
    *(nn.BatchNorm2d, nn.GroupNorm),
}
_KEEPS_FLOATING = {
    *("matmul", "bmm", "softmax", "relu", "gelu", "view", "reshape", "transpose", "permute", "contiguous"),
    *(
        "getitem",
        "flatten",
        "squeeze",
        "unsqueeze",
        "expand",
        "neg",
        "sqrt",
        "exp",
        "tanh",
        "sigmoid",
        "mean",
    ),
}
