"""Where a result may differ in its last bits: what is made of such a small error further on."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.fx import Node

from fxopt import graph, operators
from fxopt.graph_index import GraphIndex
from fxopt.operators import Fact
from fxopt.torch_internals import parameters_of, pytree


class Rounding:
    """Knows the floating values of a graph, and the nodes that make a large error of a small one.

    Answers are conservative: what is not known to be floating, or to keep an error small, counts as if it did not.

    Args:
        index: the graph.

    Example:
        >>> class Rounds(torch.nn.Module):
        ...     def forward(self, x):
        ...         return (x / 49).floor()
        >>> index = GraphIndex(torch.fx.symbolic_trace(Rounds()))
        >>> Rounding(index).obstacle_behind(index.nodes[1])
        'floor (floor) is not known to keep the error small'
    """

    def __init__(self, index: GraphIndex) -> None:
        self._index = index

    def is_floating(self, node: Node) -> bool:
        """Tell whether the value of `node` is surely a floating tensor."""
        return self._floating[node]

    def obstacle_behind(self, node: Node) -> str | None:
        """Name a use of `node`, or of what is made of it, that may make a large error of a small one.

        None is behind a layer, a product, a softmax or a normalization: these round by themselves.
        """
        memory = self._index.memory
        pending, seen, written = [node], {node}, set[Node]()
        while pending:
            value = pending.pop()
            for user in value.users:
                facts = self._facts(user)
                if user.op == "output" or Fact.MIXES in facts:
                    continue
                if Fact.DESCRIBES in facts and _is_first_alone(user, value):
                    continue
                targets = memory.written_by(user) or ()
                small = _keeps_error_small(user, value, facts) and all(map(self.is_floating, targets))
                if not small and not operators.is_container(user.target):
                    name = graph.function_name(user) or type(self._index.module(user)).__name__
                    return f"{user.name} ({name}) is not known to keep the error small"
                reached = [user]
                for target in targets:  # what reads a tensor that was written into has no edge from here
                    if target not in written:
                        written.update(memory.aliases(target))
                        reached.extend(memory.aliases(target))
                pending.extend(n for n in dict.fromkeys(reached) if n not in seen)
                seen.update(reached)
        return None

    def _facts(self, node: Node) -> Fact:
        return operators.facts_of(node, self._index.called(node))

    @functools.cached_property
    def _floating(self) -> dict[Node, bool]:
        """For each node whether its value is surely a floating tensor, by its metadata, else by what made it."""
        found: dict[Node, bool] = {}
        for node in self._index.nodes:
            dtype = graph.dtype_of(node)
            found[node] = dtype.is_floating_point if dtype is not None else self._makes_floating(node, found)
        return found

    def _makes_floating(self, node: Node, known: dict[Node, bool]) -> bool:
        facts = self._facts(node)
        if "val" in node.meta or Fact.KEEPS_DTYPE not in facts:
            return False
        own = parameters_of(self._index.module(node)).values() if node.op == "call_module" else ()
        parameters = [parameter for parameter in own if parameter is not None]
        if parameters:
            return all(parameter.is_floating_point() for parameter in parameters)
        tensors = node.all_input_nodes[:1] if Fact.VIEW in facts else node.all_input_nodes
        named = bool(node.kwargs) or any(isinstance(item, torch.dtype) for item in node.args)
        return bool(tensors) and not named and all(known[tensor] for tensor in tensors)


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
    if operators.reads_bits(user):
        return False
    return Fact.SMOOTH in facts and pytree.tree_all(_is_inexact, (made, rest))


def _is_first_alone(user: Node, value: Node) -> bool:
    """Tell whether a call takes a value as its first argument and nowhere else."""
    return user.args[:1] == (value,) and value not in graph.nodes_in((user.args[1:], user.kwargs))


def _is_positive_integer(exponent: object) -> bool:
    return isinstance(exponent, int | float) and exponent > 0 and exponent == exponent // 1


def _may_name_dtype(item: object) -> bool:
    is_device = isinstance(item, Node) and item.args[1:] == ("device",)  # `other.device`
    return isinstance(item, Node | str | type) and not is_device


def _is_inexact(item: Any) -> bool:
    dtype = getattr(item, "dtype", item)
    return not isinstance(dtype, torch.dtype) or dtype.is_floating_point or dtype.is_complex
