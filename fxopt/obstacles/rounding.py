"""Finds out whether a small error of a value, in its last bits, stays small in the nodes that follow."""

from __future__ import annotations

from torch.fx import Node

from fxopt import graph, operators
from fxopt.graph_index import GraphIndex
from fxopt.operators import Fact


def obstacle_behind(index: GraphIndex, node: Node) -> str | None:
    """Name a node that may turn a small error of `node` into a large one; `None` if there is none.

    The search ends at layers, products, softmax and normalizations, because these have rounding errors of their own.
    Values that are not known to be one floating tensor, operators that are not known to keep an error small, and writes are
    reported.

    Args:
        index: index of the graph.
        node: the node with the error.

    Example:
        >>> import torch
        >>> from fxopt import trace
        >>> class Rounds(torch.nn.Module):
        ...     def forward(self, x):
        ...         return (x / 49).floor()
        >>> index = GraphIndex(trace(Rounds(), (torch.ones(2),)))
        >>> obstacle_behind(index, index.nodes[2])
        'floor (floor) is not known to keep the error small'
    """
    for value in graph.reached([node], lambda value: _carrying(index, value)):
        for user in _carrying(index, value):
            if not _keeps_error_small(index, user, value):
                name = graph.function_name(user) or type(index.module(user)).__name__
                return f"{user.name} ({name}) is not known to keep the error small"
    return None


def _carrying(index: GraphIndex, value: Node) -> list[Node]:
    """The users of a value whose results have its error; not those that mix many values, or read only its shape."""

    def carries(user: Node) -> bool:
        facts = operators.facts_of(user, index.called(user))
        describes = Fact.DESCRIBES in facts and _is_first_alone(user, value)
        return user.op != "output" and Fact.MIXES not in facts and not describes

    return [user for user in value.users if carries(user)]


def _keeps_error_small(index: GraphIndex, user: Node, value: Node) -> bool:
    """Tell whether the result of `user` is floating and has a small error if the error of `value` is small."""
    if operators.is_container(user.target):
        return True
    facts, name = operators.facts_of(user, index.called(user)), graph.function_name(user)
    # The divisor must not depend on `value`, and a `rounding_mode` may round.
    divides = Fact.SMOOTH_IN_FIRST in facts and "pow" not in name and user.kwargs.keys() <= {"other"}
    smooth = Fact.SMOOTH in facts or (divides and _is_first_alone(user, value))
    return (
        smooth
        and graph.is_floating(user)
        and not index.memory.writes(user)
        and not operators.reads_bits(user)
    )


def _is_first_alone(user: Node, value: Node) -> bool:
    """Tell whether a value is the first argument of a call, and no other argument."""
    return user.args[:1] == (value,) and value not in graph.nodes_in((user.args[1:], user.kwargs))
