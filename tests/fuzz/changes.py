"""Changes of a graph module besides passes: it is rewritten before them, and handled by a user between."""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.utils import parametrize


def _eliminate(graph_module: GraphModule) -> GraphModule:
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()
    return graph_module


def _delete_unused(graph_module: GraphModule) -> GraphModule:
    graph_module.delete_all_unused_submodules()
    return graph_module


def _pickled(graph_module: GraphModule) -> GraphModule:
    if any(parametrize.is_parametrized(module) for module in graph_module.modules()):
        return graph_module  # torch refuses to pickle it
    carried: GraphModule = pickle.loads(pickle.dumps(graph_module))
    return carried


BETWEEN: dict[str, Callable[[GraphModule], GraphModule]] = {
    "nothing": lambda gm: gm,
    "deepcopy": copy.deepcopy,
    "pickle": _pickled,
    "eliminate_dead_code": _eliminate,
    "delete_all_unused_submodules": _delete_unused,
}
LOSSY = ("pickle", "eliminate_dead_code", "delete_all_unused_submodules")


def _insert_identity(graph_module: GraphModule) -> None:
    for node in list(graph_module.graph.nodes):
        if node.op == "call_module" and node.users:
            with graph_module.graph.inserting_after(node):
                same = graph_module.graph.call_function(operator.mul, (node, 1))
            if "val" in node.meta:
                same.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(same, delete_user_cb=lambda user, same=same: user is not same)
    graph_module.recompile()


def _swap_operands(graph_module: GraphModule) -> None:
    for node in graph_module.graph.nodes:
        if node.target in (operator.add, operator.mul) and len(node.args) == 2:
            node.args = tuple(reversed(node.args))
    graph_module.recompile()


def _split_linear(graph_module: GraphModule) -> None:
    """A linear layer as two, each with a part of its rows."""
    modules = dict(graph_module.named_modules())
    for number, node in enumerate(list(graph_module.graph.nodes)):
        layer = modules.get(str(node.target)) if node.op == "call_module" else None
        if type(layer) is not nn.Linear or layer.out_features < 2 or vars(layer).get("_forward_hooks"):
            continue
        if (
            layer._forward_pre_hooks
            or "forward" in vars(layer)
            or set(layer._parameters) != {"weight", "bias"}
        ):
            continue
        parts = []
        for rows in (slice(0, 1), slice(1, None)):
            part = copy.deepcopy(layer)
            part.weight = nn.Parameter(layer.weight.detach()[rows].clone(), layer.weight.requires_grad)
            if layer.bias is not None:
                part.bias = nn.Parameter(layer.bias.detach()[rows].clone(), layer.bias.requires_grad)
            part.out_features = part.weight.shape[0]
            name = f"part{number}_{len(parts)}"
            graph_module.add_module(name, part)
            with graph_module.graph.inserting_before(node):
                parts.append(graph_module.graph.call_module(name, node.args, node.kwargs))
        value = node.meta.get("val")
        for part_node, size in zip(parts, (1, layer.out_features - 1), strict=True):
            if isinstance(value, Tensor):
                part_node.meta["val"] = value.new_empty((*value.shape[:-1], size))
        node.op, node.target, node.args, node.kwargs = "call_function", torch.cat, (parts, -1), {}
    graph_module.recompile()


VARIANTS: dict[str, Callable[[GraphModule], None]] = {
    "as it is": lambda gm: None,
    "identities": _insert_identity,
    "swapped operands": _swap_operands,
    "split layers": _split_linear,
}
