"""Linear layers on the same input become one larger linear layer."""

from __future__ import annotations

import dataclasses

from torch import nn

from fxopt.passes.merging import Merging


@dataclasses.dataclass(frozen=True)
class MergeLinears(Merging):
    """Merges `torch.nn.Linear` layers that take the same input into one, whose output is sliced.

    Layers are merged when they agree in dtype, device, training flag and what requires gradients; a layer
    without a bias gets zeros for its part of the merged one. Each of the old nodes becomes a slice of the merged
    output, under its old name. Where the graph returns it or a view of it, it is a copy of the slice, of which callers can
    make the same views as before. Undoing splits the current weights, so that training, `.half()` or `.to()` in between are
    kept; it is refused where training has given a bias to a layer that had none.

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
