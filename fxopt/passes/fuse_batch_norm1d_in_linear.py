"""A batch normalization beside a linear layer: the layer can scale and shift its features, too."""

from __future__ import annotations

from torch import nn

from fxopt.passes.fold_batch_norms import FoldBatchNorms


class FuseBatchNorm1dInLinear(FoldBatchNorms):
    """Fuses `torch.nn.BatchNorm1d` in eval mode into the `torch.nn.Linear` before it, or else after it.

    The first of the two must have the second as its only user, and what the normalization takes two dimensions:
    with three, BatchNorm1d normalises dimension 1 and Linear works on the last. The number of dimensions is
    read from the metadata of the trace; where there is none, the place is refused. It is `FoldBatchNorms` for these
    layers alone: what that says of the new layers and of undoing holds here, too.

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
