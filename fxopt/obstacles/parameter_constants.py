"""Constants that a graph computes only from parameters, buffers and numbers, so that they change only with the weights."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.fx import Node

from fxopt import graph, submodules
from fxopt.graph_index import GraphIndex
from fxopt.operators import Fact, facts_of
from fxopt.torch_internals import backward_hooks_of


def _readers(index: GraphIndex, tensor: Tensor) -> list[Node]:
    """The nodes that use a tensor, under any of its names."""
    readers = list[Node]()
    for node in (n for n in index.nodes if n.op in ("call_module", "get_attr")):
        held = submodules.tensors_of({"": submodules.find(index.graph_module, str(node.target))})
        if any(each is tensor for _, each in held):
            readers += [node] if node.op == "call_module" else node.users
    return readers


def parts_of(constant: Node | float) -> list[Node]:
    """The nodes that a constant is computed from, and last the node of the constant itself; empty for a number."""
    start = [constant] if isinstance(constant, Node) else []
    return [*graph.reached(start, lambda node: node.all_input_nodes)][::-1]


def constant_obstacle(index: GraphIndex, parts: Sequence[Node], user: Node) -> str | None:
    """Return why a constant of these parts must not be folded for one user; None if it is the same in every run."""
    for node in parts:
        if node.op == "get_attr":
            tensor = submodules.find(index.graph_module, str(node.target))  # None for a plain attribute
            if type(tensor) not in (Tensor, nn.Parameter) or backward_hooks_of(tensor):
                return f"{node.target} is no plain parameter or buffer without hooks"
            if tensor.requires_grad and index.graph_module.training:
                others = [each.name for each in _readers(index, tensor) if each not in (*parts, user)]
                if others:
                    return f"{node.target} is trained, and {others[0]} reads it, too"
        elif Fact.MIXES in facts_of(node) or not index.memory.is_pure(node):
            return f"{node.name} is not known to give the same in every run"
        writer = index.memory.written(node)
        if writer:
            return f"{writer.name} may write into the constant"
    if len(parts) > 1 and any(map(graph.turns_autocast_on, index.nodes)):
        return "the constant is computed in a graph with autocast, which chooses its dtype"
    return None
