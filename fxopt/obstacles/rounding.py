"""Finds out whether a small error of a value, in its last bits, stays small in the nodes that follow."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from fxopt import graph, operators
from fxopt.graph_index import GraphIndex
from fxopt.operators import Fact
from fxopt.torch_internals import pytree


def obstacle_behind(index: GraphIndex, node: Node) -> str | None:
    """Name a node that may turn a small error of `node` into a large one; `None` if there is none.

    The search ends at layers, products, softmax and normalizations, because these have rounding errors of their own.
    Values that are not known to be floating, and operators that are not known to keep an error small, are reported.

    Args:
        index: index of the graph.
        node: the node with the error.

    Example:
        >>> from fxopt import trace
        >>> class Rounds(torch.nn.Module):
        ...     def forward(self, x):
        ...         return (x / 49).floor()
        >>> index = GraphIndex(trace(Rounds(), (torch.ones(2),)))
        >>> obstacle_behind(index, index.nodes[2])
        'floor (floor) is not known to keep the error small'
    """
    memory = index.memory
    pending, seen, written = [node], {node}, set[Node]()
    while pending:
        value = pending.pop()
        for user in value.users:
            facts = operators.facts_of(user, index.called(user))
            if user.op == "output" or Fact.MIXES in facts:
                continue
            if Fact.DESCRIBES in facts and _is_first_alone(user, value):
                continue
            targets = memory.written_by(user) or ()
            small = _keeps_error_small(user, value, facts) and all(map(graph.is_floating, targets))
            if not small and not operators.is_container(user.target):
                name = graph.function_name(user) or type(index.module(user)).__name__
                return f"{user.name} ({name}) is not known to keep the error small"
            reached = [user]
            for target in targets:  # no edge leads from a write to the readers of the written tensor
                if target not in written:
                    written.update(memory.aliases(target))
                    reached.extend(memory.aliases(target))
            pending.extend(n for n in dict.fromkeys(reached) if n not in seen)
            seen.update(reached)
    return None


def _keeps_error_small(user: Node, value: Node, facts: Fact) -> bool:
    """Tell whether the result of `user` is floating and has a small error if the error of `value` is small."""
    made, rest = graph.value_of(user), (*user.args[1:], *user.kwargs.values())
    if Fact.SMOOTH_IN_FIRST in facts:
        # The divisor or exponent must not depend on `value`. A `rounding_mode` is not among these keywords.
        alone = _is_first_alone(user, value) and set(user.kwargs) <= {"other", "exponent"}
        return alone and ("pow" not in graph.function_name(user) or _is_positive_integer(rest[0]))
    if made is None and (Fact.KEEPS_DTYPE not in facts or Fact.SEVERAL in facts):
        return False  # perhaps integers
    if operators.reads_bits(user):
        return False
    return Fact.SMOOTH in facts and pytree.tree_all(_is_inexact, (made, rest))


def _is_first_alone(user: Node, value: Node) -> bool:
    """Tell whether a value is the first argument of a call, and no other argument."""
    return user.args[:1] == (value,) and value not in graph.nodes_in((user.args[1:], user.kwargs))


def _is_positive_integer(exponent: object) -> bool:
    return isinstance(exponent, int | float) and exponent > 0 and exponent == exponent // 1


def _is_inexact(item: Any) -> bool:
    dtype = getattr(item, "dtype", item)
    return not isinstance(dtype, torch.dtype) or dtype.is_floating_point or dtype.is_complex
