"""Division by a constant becomes multiplication by its inverse."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_all

from fxopt import graph, operators
from fxopt.graph_index import GraphIndex
from fxopt.operators import Fact
from fxopt.rewriting.explanation import Refusal
from fxopt.rewriting.rewrite import ReversibleRewrite
from fxopt.rewriting.rewriter import Rewriter


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
    floating tensor and where nothing but operators that keep a small error small follows, before a layer, a
    product, a softmax or a normalization mixes it with other values: no rounding, no comparison (49 / 49 is 1,
    49 * (1 / 49) is less), no pole. Undoing brings back the very same `c` from the record.
    Undo it before the graph is traced again: a product in a new trace tells nothing of what it was, so that
    undoing there leaves it as it is.

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
        index = GraphIndex(graph_module)
        floating: dict[Node, bool] = {}
        for node in index.nodes:
            floating[node] = _is_floating(index, node, floating)
        for node in filter(_is_division, index.nodes):
            numerator, denominator = _operands(node)
            if not isinstance(numerator, Node):
                continue
            reason = _obstacle(numerator, denominator) or _rounding_obstacle(
                index, node, numerator, denominator, floating
            )
            yield Refusal(node, reason) if reason else Division(node, denominator)

    def apply(self, rewriter: Rewriter, site: Division) -> Node:
        """Make the node a multiplication."""
        args = (_operands(site.node)[0], 1 / site.denominator)
        rewriter.set(site.node, op="call_function", target=operator.mul, args=args, kwargs={})
        return site.node


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
    index: GraphIndex,
    node: Node,
    numerator: Node,
    denominator: int | float,
    floating: dict[Node, bool],
) -> str | None:
    """Say why the inverse, which is not exact unless the denominator is a power of two, is not good enough."""
    if math.frexp(abs(denominator))[0] == 0.5:
        return None
    if not floating[numerator]:
        return (
            f"1 / {denominator} is not exact, and {numerator.name} is not known to be a floating tensor "
            "(a graph of fxopt.trace has dtypes)"
        )
    return _obstacle_behind(index, node, denominator, floating)


def _obstacle_behind(
    index: GraphIndex, node: Node, denominator: int | float, floating: dict[Node, bool]
) -> str | None:
    """The first use of `node`, or of what was made of it, that may make a large error of a small one."""
    pending, seen, written = [node], {node}, set[Node]()
    while pending:
        value = pending.pop()
        for user in value.users:
            facts = operators.facts_of(user, index.module(user) if user.op == "call_module" else None)
            # Behind what mixes, the inverse is as good as the division.
            if user.op == "output" or Fact.MIXES in facts:
                continue
            if Fact.DESCRIBES in facts and _is_first_alone(user, value):
                continue
            targets = index.memory.written_by(user) or ()
            small = _keeps_error_small(user, value, facts) and all(floating[target] for target in targets)
            if not small and not operators.is_container(user.target):
                name = graph.function_name(user) or type(index.module(user)).__name__
                return f"1 / {denominator} is not exact, and {user.name} ({name}) is not known to keep the error small"
            reached = [user]
            for target in targets:  # what reads a tensor that was written into has no edge from here
                if target not in written:
                    written.update(index.memory.aliases(target))
                    reached.extend(index.memory.aliases(target))
            pending.extend(n for n in dict.fromkeys(reached) if n not in seen)
            seen.update(reached)
    return None


def _keeps_error_small(user: Node, value: Node, facts: Fact) -> bool:
    """Tell whether `user` makes a small error of a small error in `value`, and floating numbers."""
    made, rest = graph.value_of(user), (*user.args[1:], *user.kwargs.values())
    if Fact.SMOOTH_IN_FIRST in facts:
        # A divisor or an exponent may be anything else; a mode of rounding is not among these keywords.
        alone = _is_first_alone(user, value) and set(user.kwargs) <= {"other", "exponent"}
        return alone and ("pow" not in graph.function_name(user) or _is_positive_integer(rest[0]))
    if made is None and Fact.KEEPS_DTYPE not in facts and any(map(_may_name_dtype, rest)):
        return False  # a cast, perhaps to integers
    if made is None and Fact.SEVERAL in facts and Fact.VIEW not in facts:
        return False  # perhaps with indices
    if Fact.LAYOUT in facts and any(isinstance(item, torch.dtype) for item in rest):
        return False  # the same bits, read as other numbers
    return Fact.SMOOTH in facts and tree_all(_is_inexact, (made, rest))


def _is_first_alone(user: Node, value: Node) -> bool:
    """Tell whether a call takes a value as its first argument and nowhere else."""
    others: list[Node] = []
    torch.fx.node.map_arg((user.args[1:], user.kwargs), others.append)
    return user.args[:1] == (value,) and value not in others


def _is_positive_integer(exponent: object) -> bool:
    return isinstance(exponent, int | float) and exponent > 0 and exponent == exponent // 1


def _may_name_dtype(item: object) -> bool:
    is_device = isinstance(item, Node) and item.args[1:] == ("device",)  # `other.device`
    return isinstance(item, Node | str | type) and not is_device


def _is_inexact(item: Any) -> bool:
    dtype = getattr(item, "dtype", item)
    return not isinstance(dtype, torch.dtype) or dtype.is_floating_point or dtype.is_complex


def _is_floating(index: GraphIndex, node: Node, floating: dict[Node, bool]) -> bool:
    """Tell whether the value of `node` is surely a floating tensor; by its metadata, else by what made it."""
    dtype = graph.dtype_of(node)
    if dtype is not None:
        return dtype.is_floating_point
    module = index.module(node) if node.op == "call_module" else None
    facts = operators.facts_of(node, module)
    if "val" in node.meta or Fact.KEEPS_DTYPE not in facts:
        return False
    own = [p for p in module._parameters.values() if p is not None] if module is not None else []
    if own:
        return all(parameter.is_floating_point() for parameter in own)
    tensors = node.all_input_nodes[:1] if Fact.VIEW in facts else node.all_input_nodes
    named = bool(node.kwargs) or any(isinstance(item, torch.dtype) for item in node.args)
    return bool(tensors) and not named and all(floating[tensor] for tensor in tensors)
