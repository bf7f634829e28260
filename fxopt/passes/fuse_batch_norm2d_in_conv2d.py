"""A BatchNorm2d in eval mode becomes a part of the Conv2d before it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from torch import nn
from torch.fx import GraphModule, Node

from fxopt import batch_norm, graph
from fxopt.graph_index import GraphIndex
from fxopt.rewrite import Refusal


@dataclasses.dataclass(frozen=True)
class FuseBatchNorm2dInConv2d(batch_norm.FuseBatchNorm):
    """Fuses `torch.nn.BatchNorm2d` in eval mode into the `torch.nn.Conv2d` before it.

    The convolution must have the batch normalization as its only user. A new convolution takes the place of
    the old one, which stays as it is; it has a bias, also where the old one had none.
    It requires gradients where the old one did: fine-tuning a normalization behind a frozen layer ends here.

    Undoing gives the old weights back bit for bit: the record keeps copies of the layer and of the
    normalization, beside the graph and outside of `state_dict`, at the cost of their memory. After `.to()`,
    `.half()` and such it gives what these make of the old weights. Folded weights that were trained, loaded or
    rounded to a lower dtype and back cannot be taken apart, so undoing raises `UndoError` then.

    Args:
        reversible: `False` keeps no copies; then the pass cannot be undone.

    Source: Jacob et al., Quantization and Training of Neural Networks, 2017, arXiv:1712.05877, section 3.2.

    Example:
        >>> import torch
        >>> layers = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.BatchNorm2d(4)).eval()
        >>> fused = FuseBatchNorm2dInConv2d()(torch.fx.symbolic_trace(layers))
        >>> [node.target for node in fused.graph.nodes if node.op == "call_module"]
        ['0']
    """

    def match(self, graph_module: GraphModule) -> Iterator[batch_norm.Fold | Refusal]:
        """Yield the convolutions that are followed by a batch normalization."""
        index = GraphIndex(graph_module)
        convs = set(index.calls_like(nn.Conv2d))
        for node in index.calls_like(nn.BatchNorm2d):
            conv = graph.input_of(node, index.module(node))
            if conv not in convs:
                continue
            fused = _obstacle(index, conv, node) or _fuse(index.module(conv), index.module(node))
            if isinstance(fused, str):
                yield Refusal(node, fused)
            else:
                yield batch_norm.Fold(conv, node, fused, index.removable(node))


def _obstacle(index: GraphIndex, conv: Node, node: Node) -> str | None:
    layer = index.module(conv)
    assert isinstance(layer, nn.Conv2d)
    reason = (
        index.inexact(conv, nn.Conv2d)
        or index.inexact(node, nn.BatchNorm2d)
        or batch_norm.other_users(conv, node)
    )
    if reason:
        return reason
    if set(layer._parameters) != {"weight", "bias"} or layer._buffers:
        return "the convolution does not have the weight and bias of a plain Conv2d"
    return (
        index.obstacle(conv)
        or batch_norm.norm_obstacle(index, node, layer.weight, layer.out_channels)
        or index.memory.write_between(conv, node)
    )


def _fuse(conv: nn.Module, norm: nn.Module) -> nn.Module | str:
    assert isinstance(conv, nn.Conv2d)
    assert isinstance(norm, nn.BatchNorm2d)
    scale, shift = batch_norm.scale_and_shift(norm)
    weight = batch_norm.scaled(conv.weight, scale, 0)
    return batch_norm.layer_with(conv, weight, batch_norm.bias_of(conv, scale.dtype) * scale + shift)
