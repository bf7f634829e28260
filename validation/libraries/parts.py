"""Parts of the models of other libraries that no library has by itself."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

import torch
from torch import nn


class GraphNetwork(nn.Module):
    """Two convolutions on a graph, as the tutorial of PyTorch Geometric writes it."""

    def __init__(self, kind: str, *args: Any) -> None:
        super().__init__()
        convolution = resolve_name(f"torch_geometric.nn.{kind}")
        self.first, self.second = convolution(8, 8, *args), convolution(8, 8, *args)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)  # type: ignore[no-any-return]


def adapted(kind: str, **options: Any) -> nn.Module:
    """A network with an adapter of PEFT in two of its layers, without the wrapper around it."""
    network = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    config = resolve_name(f"peft.{kind}Config")(target_modules=["0", "2"], **options)
    made: nn.Module = resolve_name("peft.get_peft_model")(network, config).base_model.model
    return made
