"""Merges convolutions with the same input into one convolution with more channels."""

from __future__ import annotations

import dataclasses

from torch import nn

from fxopt.passes.merging import Merging


@dataclasses.dataclass(frozen=True)
class MergeConvs(Merging):
    """Merges convolutions with the same input into one, whose output channels are sliced.

    The layers are `torch.nn.Conv1d`, `2d` or `3d` with one group, and with the same kernel size, stride, padding and
    dilation. For other conditions, slices and undo see `MergeLinears`.

    Example:
        >>> import torch
        >>> class Branches(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.left, self.right = torch.nn.Conv2d(4, 3, 1), torch.nn.Conv2d(4, 2, 1)
        ...     def forward(self, x):
        ...         return self.left(x), self.right(x)
        >>> merged = MergeConvs()(torch.fx.symbolic_trace(Branches()))
        >>> merged.fxopt_merged_left_right
        Conv2d(4, 5, kernel_size=(1, 1), stride=(1, 1))
    """

    layers = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
