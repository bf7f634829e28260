"""The bias of a linear layer becomes one more column of its weight."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule, Node

from fxopt import graph, submodules
from fxopt.graph_index import GraphIndex
from fxopt.rewrite import Change, Refusal, ReversibleRewrite, leave_trace


@dataclasses.dataclass(frozen=True)
class LinearCall:
    """A call of a linear layer, and its input."""

    node: Node
    value: Node


@dataclasses.dataclass(frozen=True)
class FuseBiasInLinear(ReversibleRewrite[LinearCall]):
    """Makes the bias of `torch.nn.Linear` the last column of its weight, and pads the input with ones.

    `W x + b = [W b] [x 1]`. The ones are made from the input, so they have its dtype and device. Undoing
    takes the current weight apart, so that training, `.half()` or `.to()` in between are kept.

    Example:
        >>> import torch
        >>> fuse = FuseBiasInLinear()
        >>> fused = fuse(torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 3))))
        >>> fused.get_submodule("0")
        Linear(in_features=3, out_features=3, bias=False)
        >>> fuse(fused, reverse=True).get_submodule("0")
        Linear(in_features=2, out_features=3, bias=True)
    """

    preserves_computation = True

    def match(self, graph_module: GraphModule) -> Iterator[LinearCall | Refusal]:
        """Yield the calls of linear layers with a bias."""
        index = GraphIndex(graph_module)
        for node in index.calls_like(nn.Linear):
            layer = index.module(node)
            assert isinstance(layer, nn.Linear)
            if layer._parameters.get("bias") is None and submodules.is_plain_linear(layer):
                continue
            value = graph.input_of(node, layer)
            reason = index.inexact(node, nn.Linear) or index.obstacle(node) or _obstacle(layer)
            if reason or value is None:
                yield Refusal(node, reason or "its arguments are not those of a Linear")
            else:
                yield LinearCall(node, value)

    def apply(self, graph_module: GraphModule, site: LinearCall) -> Change:
        """Put a layer without a bias in the place of the old one, and a pad before it."""
        node, path = site.node, str(site.node.target)
        layer = graph_module.get_submodule(path)
        assert isinstance(layer, nn.Linear)
        fused = nn.Linear(layer.in_features + 1, layer.out_features, bias=False, device="meta")
        weight = torch.cat([layer.weight.detach(), layer.bias.detach().unsqueeze(1)], dim=1)
        fused.weight = nn.Parameter(weight, layer.weight.requires_grad)
        leave_trace(fused.train(layer.training), self, [layer])
        submodules.set_module(graph_module, path, fused)

        with graph_module.graph.inserting_before(node):
            pad = graph_module.graph.call_function(F.pad, (site.value, (0, 1)), _ONES)
        graph.describe(pad, node, site.value, layer.in_features + 1)
        node.replace_input_with(site.value, pad)
        data = {"path": path, "shell": submodules.without_tensors(layer)}
        return Change((node,), {"linear": node, "pad": pad}, (path,), data)

    def revert(self, graph_module: GraphModule, nodes: dict[str, Node], data: Any) -> None:
        """Give the layer its bias and its input back."""
        node, pad = nodes["linear"], nodes["pad"]
        shell = data["shell"]
        fused = graph_module.get_submodule(data["path"])
        shape = (shell.out_features, shell.in_features + 1)
        as_left = (
            node.all_input_nodes == [pad]
            and set(pad.users) == {node}
            and pad.target is F.pad
            and (pad.args[1:], pad.kwargs) == (((0, 1),), _ONES)
            and type(fused) is nn.Linear
            and fused.weight.shape == shape
            and fused.bias is None
        )
        if not as_left:
            raise self.changed(node, "the fused layer or its pad")
        assert isinstance(fused, nn.Linear)
        layer = submodules.without_tensors(shell)
        weight, gradients = fused.weight.detach(), fused.weight.requires_grad
        # A plain clone of a single row keeps the strides of the larger weight.
        for name, part in (("weight", weight[:, :-1]), ("bias", weight[:, -1])):
            copied = part.clone(memory_format=torch.contiguous_format)
            layer._parameters[name] = nn.Parameter(copied, gradients)
        submodules.set_module(graph_module, data["path"], layer.train(fused.training))
        node.replace_input_with(pad, pad.all_input_nodes[0])
        graph_module.graph.erase_node(pad)


_ONES: dict[str, Any] = {"mode": "constant", "value": 1.0}


def _obstacle(layer: nn.Linear) -> str | None:
    if not submodules.is_plain_linear(layer):
        return "it does not have the weight and bias of a plain Linear"
    weight, bias = layer.weight, layer.bias
    if weight.dtype != bias.dtype or weight.device != bias.device:
        return "its weight and bias differ in dtype or device"
    if weight.requires_grad != bias.requires_grad:
        return "only one of its weight and bias requires gradients"
    return None
