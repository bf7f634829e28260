"""Folds batch normalizations into adjacent linear layers."""

from __future__ import annotations

from torch import nn

from fxopt.passes.fold_batch_norms import FoldBatchNorms


class FuseBatchNorm1dInLinear(FoldBatchNorms):
    """Fuses `torch.nn.BatchNorm1d` in eval mode into the `torch.nn.Linear` before it, otherwise after it.

    The first of the two must have the second as its only user. The input of the normalization must have two dimensions: with
    three, BatchNorm1d normalizes dimension 1, and Linear computes on the last. The pass reads the number of dimensions from
    the metadata of the trace, and refuses sites without metadata. The pass is `FoldBatchNorms` for these layers only; see
    there for the new layers and for undo.

    Args:
        reversible: `False` keeps no copies; then the pass cannot be undone.

    Example:
        >>> import fxopt, torch
        >>> layers = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)).eval()
        >>> fused = FuseBatchNorm1dInLinear()(fxopt.trace(layers, (torch.ones(3, 4),)))
        >>> [name for name, _ in fused.named_parameters()]
        ['1.weight', '1.bias']
    """

    layers = {nn.BatchNorm1d: (nn.Linear,)}  # noqa: RUF012
