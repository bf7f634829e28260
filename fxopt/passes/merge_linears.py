"""Merges linear layers with the same input into one larger linear layer."""

from __future__ import annotations

import dataclasses

from torch import nn

from fxopt.passes.merging import Merging


@dataclasses.dataclass(frozen=True)
class MergeLinears(Merging):
    """Merges `torch.nn.Linear` layers with the same input into one, whose output is sliced.

    Layers are merged if they agree in dtype, device, training flag and the parameters that require gradients. A layer
    without a bias gets zeros for its part of the merged bias. Each old node becomes a slice of the merged output, under its
    old name. If the graph returns the node or a view of it, the slice is copied, so that callers can make the same views as
    before. Undo splits the current weights, so that training, `.half()` or `.to()` in between are kept. Undo raises
    `UndoError` if training gave a bias to a layer that had none.

    Example:
        >>> import torch
        >>> class Heads(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.key, self.value = torch.nn.Linear(4, 3), torch.nn.Linear(4, 2)
        ...     def forward(self, x):
        ...         return self.key(x), self.value(x)
        >>> merge = MergeLinears()
        >>> merged = merge(torch.fx.symbolic_trace(Heads()))
        >>> merge.get_transformed_nodes(merged)
        [fxopt_merged_key_value]
        >>> merge(merged, reverse=True)
        Heads(
          (key): Linear(in_features=4, out_features=3, bias=True)
          (value): Linear(in_features=4, out_features=2, bias=True)
        )
    """

    layers = (nn.Linear,)
