"""Values of a graph that are the same in every run, because they are made of no input."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fxopt import graph
from fxopt.graph_index import GraphIndex
from fxopt.operators import Fact, facts_of
from fxopt.submodules import attribute, split_path


def constants_of(index: GraphIndex) -> dict[Node, None]:
    """The nodes that give the same in every run of a graph, in order.

    They are made of numbers, and of buffers that are not in the `state_dict`, by functions of torch. The device of
    an input counts as known.
    """
    found: dict[Node, None] = {}
    for node in index.nodes:
        if _is_constant(index, node, found):
            found[node] = None
    return found


def computed_constant(graph_module: GraphModule, node: Node, known: dict[Node, Any]) -> Any:
    """Compute a constant; what is `known` is not computed again, and what is computed is known then."""
    if node in known:
        return known[node]
    described = node.all_input_nodes[:1] if Fact.DESCRIBES in facts_of(node) else []

    def value_of(value: Node) -> Any:
        return _empty(value) if value in described else computed_constant(graph_module, value, known)

    args, kwargs = map_arg(node.args, value_of), map_arg(node.kwargs, value_of)
    with torch.no_grad():
        if node.op == "get_attr":
            known[node] = attribute(graph_module, str(node.target)).clone()
        elif node.op == "call_method":
            known[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        elif callable(node.target):
            known[node] = node.target(*args, **kwargs)
    return known[node]


def _is_constant(index: GraphIndex, node: Node, constants: Collection[Node]) -> bool:
    """Tell whether a node gives the same in every run of the graph."""
    if node.op == "get_attr":
        path, name = split_path(str(node.target))
        owner = index.modules[path]
        return name in owner._non_persistent_buffers_set and index.memory.written(node) is None
    facts = facts_of(node)
    if node.op == "call_module" or Fact.MIXES in facts or not index.memory.is_pure(node):
        return False
    changing = [value for value in node.all_input_nodes if value not in constants]
    if Fact.DESCRIBES in facts and Fact.LAYOUT not in facts:
        return changing in ([], node.all_input_nodes[:1]) and _is_described(node)
    return not changing


def _is_described(node: Node) -> bool:
    """Tell whether the trace knows all that a node reads of its first input."""
    value = graph.value_of(node.all_input_nodes[0])
    if not isinstance(value, Tensor):
        return False
    free = not all(isinstance(size, int) for size in value.shape)
    return not free or (node.target is getattr and node.args[1] in ("device", "dtype", "ndim"))


def _empty(node: Node) -> Tensor:
    """A tensor of the shape, dtype and device of a value; a free size, which nobody reads, is 1."""
    value = graph.value_of(node)
    shape = [size if isinstance(size, int) else 1 for size in value.shape]
    return torch.empty((), dtype=value.dtype, device=value.device).expand(shape)
