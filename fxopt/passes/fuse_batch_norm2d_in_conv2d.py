"""Folds batch normalizations into the convolutions before them."""

from __future__ import annotations

from torch import nn

from fxopt.passes.fold_batch_norms import FoldBatchNorms


class FuseBatchNorm2dInConv2d(FoldBatchNorms):
    """Fuses `torch.nn.BatchNorm2d` in eval mode into the `torch.nn.Conv2d` before it.

    The convolution must have the batch normalization as its only user. The pass is `FoldBatchNorms` for these layers only;
    see there for the new layers and for undo.

    Args:
        reversible: `False` keeps no copies; then the pass cannot be undone.

    Example:
        >>> import torch
        >>> layers = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.BatchNorm2d(4)).eval()
        >>> fused = FuseBatchNorm2dInConv2d()(torch.fx.symbolic_trace(layers))
        >>> [node.target for node in fused.graph.nodes if node.op == "call_module"]
        ['0']
    """

    layers = {nn.BatchNorm2d: (nn.Conv2d,)}  # noqa: RUF012
    into_following = False
