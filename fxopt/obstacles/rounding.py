"""Where a result may differ in its last bits: what is made of such a small error further on."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from fxopt import graph, operators
from fxopt.graph_index import GraphIndex
from fxopt.operators import Fact
from fxopt.torch_internals import pytree


def obstacle_behind(index: GraphIndex, node: Node) -> str | None:
    """Name a use of `node`, or of what is made of it, that may make a large error of a small one.

    None is behind a layer, a product, a softmax or a normalization: these round by themselves.
    What is not known to be floating, or to keep an error small, counts as if it did not.

    Args:
        index: the graph.
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
            for target in targets:  # what reads a written tensor has no edge from here
                if target not in written:
                    written.update(memory.aliases(target))
                    reached.extend(memory.aliases(target))
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
    if made is None and (Fact.KEEPS_DTYPE not in facts or Fact.SEVERAL in facts):
        return False  # perhaps integers
    if operators.reads_bits(user):
        return False
    return Fact.SMOOTH in facts and pytree.tree_all(_is_inexact, (made, rest))


def _is_first_alone(user: Node, value: Node) -> bool:
    """Tell whether a call takes a value as its first argument and nowhere else."""
    return user.args[:1] == (value,) and value not in graph.nodes_in((user.args[1:], user.kwargs))


def _is_positive_integer(exponent: object) -> bool:
    return isinstance(exponent, int | float) and exponent > 0 and exponent == exponent // 1


def _is_inexact(item: Any) -> bool:
    dtype = getattr(item, "dtype", item)
    return not isinstance(dtype, torch.dtype) or dtype.is_floating_point or dtype.is_complex
