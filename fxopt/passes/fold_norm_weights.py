"""Folds the weight and bias of a layer or RMS normalization into the linear layers behind it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fxopt import graph, submodules
from fxopt.graph_index import GraphIndex
from fxopt.obstacles.foldable import folding_obstacle, layer_obstacle, layers_behind, use_obstacle
from fxopt.obstacles.scaling import wide_dtype
from fxopt.passes.folding import Fold, Folding
from fxopt.rewriting.explanation import Refusal
from fxopt.torch_internals import parameters_of

NORMS = (nn.LayerNorm, nn.RMSNorm)


class FoldNormWeights(Folding):
    """Folds the weight and bias of `torch.nn.LayerNorm` and `torch.nn.RMSNorm` into the linear layers behind.

    The normalization stays, without a weight. All that use its output must be `torch.nn.Linear` layers; new ones take
    the place of the old ones, which stay as they are, and have a bias where the normalization has one. Where a model
    writes its normalization itself, `FoldScaleAndShift` does the same. Undoing, its memory and what it refuses are as
    those of `FoldBatchNorms`.

    Args:
        reversible: `False` keeps no copies; then the pass cannot be undone.

    Source: Ashkboos et al., SliceGPT, 2024, arXiv:2401.15024, section 3.1.

    Example:
        >>> import torch
        >>> layers = torch.nn.Sequential(torch.nn.RMSNorm(4), torch.nn.Linear(4, 2))
        >>> FoldNormWeights()(torch.fx.symbolic_trace(layers)).get_submodule("0")
        RMSNorm((4,), eps=None, elementwise_affine=False)
    """

    def match(self, graph_module: GraphModule) -> Iterator[Fold | Refusal]:
        """Yield the normalizations before linear layers."""
        index = GraphIndex(graph_module)
        for kind in NORMS:
            for node in index.calls_like(kind):
                layers = layers_behind(index, node, (nn.Linear,))
                norm: Any = index.module(node)
                if layers and getattr(norm, "weight", None) is not None:
                    reason = _obstacle(index, node, kind, layers)
                    yield Refusal(node, reason) if reason else _fold(node, norm, layers)


def _fold(node: Node, norm: nn.Module, layers: list[Node]) -> Fold:
    """The layers take over, and the normalization stays without its weight."""
    bare: Any = submodules.without_tensors(norm)
    bare.elementwise_affine = False
    sources = {str(node.target): bare}
    return Fold((*layers,), node, False, *_weight_and_bias(norm), operand=None, sources=sources)


def _weight_and_bias(norm: nn.Module) -> tuple[Tensor, Tensor | None]:
    weight, bias = norm.get_parameter("weight"), parameters_of(norm).get("bias")
    wide = wide_dtype(weight)
    return weight.detach().to(wide), None if bias is None else bias.detach().to(wide)


def _obstacle(index: GraphIndex, node: Node, kind: type[nn.Module], layers: list[Node]) -> str | None:
    """Why the layers behind a normalization cannot take its weight over; None if they can."""
    norm: Any = index.module(node)
    value = graph.input_of(node, norm)
    reason = use_obstacle(node, layers) or index.replacing_obstacle(node, kind)
    if reason or value is None:
        return reason or "it does not take one value alone"
    if len(norm.normalized_shape) != 1:
        return f"it normalises the last {len(norm.normalized_shape)} dimensions together"
    for layer in layers:
        reason = layer_obstacle(index, layer)
        weight = index.module(layer).get_parameter("weight") if reason is None else None
        if weight is not None and weight.shape[1:] != norm.weight.shape:
            reason = f"{layer.name} takes {weight.shape[1]} features, and the normalization gives {len(norm.weight)}"
        elif weight is not None and (weight.dtype, weight.device) != (norm.weight.dtype, norm.weight.device):
            reason = f"its weight is {norm.weight.dtype} on {norm.weight.device}, that of {layer.name} {weight.dtype} on {weight.device}"
        reason = reason or folding_obstacle(index, layer, [node, layer], *_weight_and_bias(norm))
        if reason:
            return reason
    return None
