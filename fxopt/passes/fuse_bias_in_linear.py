"""Turns the bias of a linear layer into one more column of its weight."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule, Node

from fxopt import graph, submodules
from fxopt.graph_index import GraphIndex
from fxopt.rewriting.explanation import Refusal
from fxopt.rewriting.rewrite import ReversibleRewrite
from fxopt.rewriting.rewriter import Rewriter
from fxopt.torch_internals import parameters_of


@dataclasses.dataclass(frozen=True)
class FuseBiasInLinear(ReversibleRewrite[Node]):
    """Makes the bias of `torch.nn.Linear` the last column of its weight, and pads the input with ones.

    `W x + b = [W b] [x 1]`. The ones are made from the input, so they have its dtype and device. Undo splits
    the current weight, so that training, `.half()` or `.to()` in between are kept.

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

    def match(self, graph_module: GraphModule) -> Iterator[Node | Refusal]:
        """Yield the calls of linear layers with a bias."""
        index = GraphIndex(graph_module)
        for node in index.calls_like(nn.Linear):
            layer = index.module(node)
            assert isinstance(layer, nn.Linear)
            if parameters_of(layer).get("bias") is None and submodules.is_plain(layer):
                continue
            reason = index.obstacle(node, nn.Linear) or _obstacle(layer)
            if reason is None and graph.input_of(node, layer) is None:
                reason = "its arguments are not those of a Linear"
            yield Refusal(node, reason) if reason else node

    def apply(self, rewriter: Rewriter, site: Node) -> Node:
        """Replace the layer by one without a bias, and insert a pad before it."""
        path, (value,) = str(site.target), site.all_input_nodes
        layer = submodules.module_at(rewriter.graph_module, path)
        assert isinstance(layer, nn.Linear)
        fused = submodules.without_tensors(layer)
        fused.in_features += 1
        weight = torch.cat([layer.weight.detach(), layer.bias.detach().unsqueeze(1)], dim=1)
        fused.weight = nn.Parameter(weight, layer.weight.requires_grad)
        shell, layout = submodules.without_tensors(layer), submodules.layout_of(layer)
        restore = functools.partial(_unfused, path, shell, layout)
        rewriter.replace_module(path, fused.train(layer.training), restore)
        ones = {"mode": "constant", "value": 1.0}
        pad = rewriter.create("call_function", F.pad, (value, (0, 1)), ones, before=site)
        rewriter.replace_input(site, value, pad)
        return site


def _unfused(
    path: str, shell: nn.Linear, layout: Mapping[str, Any], now: Mapping[str, Any], left: object
) -> dict[str, nn.Module]:
    """Restore the layer with its bias from the current weight."""
    layer, fused = submodules.without_tensors(shell), now[path].weight
    for name, part in (("weight", fused.detach()[:, :-1]), ("bias", fused.detach()[:, -1])):
        copied = submodules.laid_out(part, layout[name])
        parameters_of(layer)[name] = nn.Parameter(copied, fused.requires_grad)
    return {path: layer}


def _obstacle(layer: nn.Linear) -> str | None:
    weight, bias = layer.weight, layer.bias
    if weight.dtype != bias.dtype or weight.device != bias.device:
        return "its weight and bias differ in dtype or device"
    if weight.requires_grad != bias.requires_grad:
        return "only one of its weight and bias requires gradients"
    return None
