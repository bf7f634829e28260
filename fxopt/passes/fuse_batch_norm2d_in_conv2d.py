"""A batch normalization behind a convolution: the convolution can scale and shift its channels, too."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.fx import GraphModule

from fxopt import graph
from fxopt.graph_index import GraphIndex
from fxopt.passes.batch_norm_folding import Fold, FoldBatchNorm, fold
from fxopt.rewriting.explanation import Refusal


class FuseBatchNorm2dInConv2d(FoldBatchNorm):
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

    def match(self, graph_module: GraphModule) -> Iterator[Fold | Refusal]:
        """Yield the convolutions that are followed by a batch normalization."""
        index = GraphIndex(graph_module)
        convs = set(index.calls_like(nn.Conv2d))
        for norm in index.calls_like(nn.BatchNorm2d):
            conv = graph.input_of(norm, index.module(norm))
            if conv in convs:
                yield fold(index, conv, norm, nn.Conv2d, nn.BatchNorm2d)
