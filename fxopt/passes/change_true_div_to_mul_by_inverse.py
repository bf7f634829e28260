"""Replaces division by a constant by multiplication by its inverse."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxopt import graph
from fxopt.graph_index import GraphIndex
from fxopt.obstacles.rounding import obstacle_behind
from fxopt.operators import name_of
from fxopt.rewriting.explanation import Refusal
from fxopt.rewriting.rewrite import ReversibleRewrite
from fxopt.rewriting.rewriter import Rewriter


@dataclasses.dataclass(frozen=True)
class ChangeTrueDivToMulByInverse(ReversibleRewrite[Node]):
    """Replaces `x / c` by `x * (1 / c)`, where `c` is a constant of the graph.

    If `c` is a power of two, the result is equal bit for bit. Otherwise its error is larger by at most one unit in the last
    place. Such a division is rewritten only if two conditions hold. The metadata of the trace shows that `x` is a floating
    tensor. And until a layer, a product, a softmax or a normalization mixes the result with other values, only operators
    follow that keep a small error small: no rounding, no comparison (49 / 49 is 1, 49 * (1 / 49) is less), no pole.
    Undo restores the same `c` from the record. Undo before you trace the graph again: a new trace contains a plain product,
    which undo does not change.

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

    def match(self, graph_module: GraphModule) -> Iterator[Node | Refusal]:
        """Yield the divisions by a constant."""
        index = GraphIndex(graph_module)
        for node in [each for each in index.nodes if _is_division(index, each)]:
            numerator, denominator = _operands(node)
            if isinstance(numerator, Node):
                reason = _obstacle(numerator, denominator) or _inexact(index, node, numerator, denominator)
                yield Refusal(node, reason) if reason else node

    def apply(self, rewriter: Rewriter, site: Node) -> Node:
        """Turn the node into a multiplication."""
        numerator, denominator = _operands(site)
        args = (numerator, 1 / denominator)
        rewriter.set(site, op="call_function", target=operator.mul, args=args, kwargs={})
        return site


def _is_division(index: GraphIndex, node: Node) -> bool:
    named = name_of(node) in _DIVISIONS and not index.memory.writes(node)
    return named and len(node.args) + len(node.kwargs) == 2 and set(node.kwargs) <= {"other"}


_DIVISIONS = ("div", "divide", "truediv", "true_divide")


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
    # Outside of this range, the constant or its inverse underflows or overflows in the dtype of the computation.
    info = torch.finfo(dtype if dtype is not None and dtype.is_floating_point else torch.float16)
    if not all(info.tiny <= abs(value) <= info.max for value in (denominator, 1 / denominator)):
        return f"{denominator} or its inverse is outside of the normal range of {info.dtype} numbers"
    return None


def _inexact(index: GraphIndex, node: Node, numerator: Node, denominator: int | float) -> str | None:
    """Return why an inverse with rounding errors is not accurate enough; None if it is, or if it is exact."""
    if math.frexp(abs(denominator))[0] == 0.5:
        return None
    if graph.is_floating(numerator):
        reason = obstacle_behind(index, node)
    else:
        reason = f"{numerator.name} is not known to be a floating tensor (a graph of fxopt.trace has dtypes)"
    return f"1 / {denominator} is not exact, and {reason}" if reason else None
