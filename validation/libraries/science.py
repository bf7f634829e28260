"""Models of graphs, fields, molecules and tables: PyTorch Geometric, neuraloperator, e3nn, TabNet."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .models import LibraryModel, image, imported, model, noise

_NODES, _EDGES = 6, 10


def _graph(*, weights: bool = False, edge_attr: int = 0) -> Any:
    """So many graphs as one: nodes with eight features, and edges."""

    def inputs(batch: int) -> tuple[torch.Tensor, ...]:
        made = [torch.randn(_NODES * batch, 8), torch.randint(0, _NODES * batch, (2, _EDGES * batch))]
        made += [torch.rand(_EDGES * batch)] if weights else []
        made += [torch.randn(_EDGES * batch, edge_attr)] if edge_attr else []
        return tuple(made)

    return inputs


class GraphNetwork(nn.Module):
    """Two convolutions on a graph, as the tutorial of PyTorch Geometric writes it."""

    def __init__(self, kind: str, *args: Any, **options: Any) -> None:
        super().__init__()
        convolution = imported(f"torch_geometric.nn.{kind}")
        self.first = convolution(8, 8, *args, **options)
        self.second = convolution(8, 8, *args, **options)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)  # type: ignore[no-any-return]


def _convolution(kind: str, *args: Any, **options: Any) -> LibraryModel:
    return LibraryModel(f"torch_geometric.{kind}", lambda: GraphNetwork(kind, *args, **options), _graph())


_BASIC: dict[str, Any] = {"in_channels": 8, "hidden_channels": 8, "num_layers": 2, "out_channels": 4}

GEOMETRIC = [
    *(
        model(f"torch_geometric.nn.models.{name}", _graph(), **_BASIC)
        for name in ("GCN", "GraphSAGE", "GIN", "GAT", "EdgeCNN")
    ),
    model(
        "torch_geometric.nn.models.PNA",
        _graph(),
        **_BASIC,
        aggregators=["mean", "max"],
        scalers=["identity"],
        deg=lambda: torch.tensor([1, 2, 3]),
    ),
    *(
        _convolution(kind)
        for kind in (
            "GCNConv",
            "SAGEConv",
            "GraphConv",
            "GATConv",
            "GATv2Conv",
            "TransformerConv",
            "TAGConv",
            "ARMAConv",
            "SGConv",
            "ClusterGCNConv",
            "LEConv",
            "GENConv",
            "FiLMConv",
            "ResGatedGraphConv",
            "MFConv",
        )
    ),
    _convolution("ChebConv", 2),
    LibraryModel(
        "torch_geometric.MLP",
        lambda: model("torch_geometric.nn.models.MLP", noise(8), [8, 8, 4]).make(),
        noise(8),
    ),
    model(
        "torch_geometric.nn.models.LINKX",
        lambda batch: (torch.randn(8, 4 * 1), torch.randint(0, 8, (2, _EDGES * batch))),
        num_nodes=8,
        in_channels=4,
        hidden_channels=8,
        out_channels=2,
        num_layers=1,
    ),
    model(
        "torch_geometric.nn.models.AttentiveFP",
        lambda batch: (*_graph(edge_attr=3)(batch), torch.arange(batch).repeat_interleave(_NODES)),
        in_channels=8,
        hidden_channels=8,
        out_channels=2,
        edge_dim=3,
        num_layers=1,
        num_timesteps=1,
    ),
    model("torch_geometric.nn.models.GraphUNet", _graph(), 8, 8, 4, depth=1),
]

_FNO: dict[str, Any] = {"in_channels": 1, "out_channels": 1, "hidden_channels": 8, "n_layers": 2}

NEURALOP = [
    model("neuralop.models.FNO", image(16, 1), n_modes=(4, 4), **_FNO),
    model("neuralop.models.FNO", noise(1, 16), n_modes=(4,), **_FNO, name="FNO1d"),
    model("neuralop.models.TFNO", image(16, 1), n_modes=(4, 4), **_FNO),
]

_IRREPS = "4x0e+2x1o"

E3NN = [
    model("e3nn.o3.Linear", noise(10), _IRREPS, "3x0e+1x1o"),
    model(
        "e3nn.o3.FullyConnectedTensorProduct",
        lambda batch: (torch.randn(batch, 10), torch.randn(batch, 10)),
        _IRREPS,
        _IRREPS,
        _IRREPS,
    ),
    model(
        "e3nn.o3.FullTensorProduct",
        lambda batch: (torch.randn(batch, 10), torch.randn(batch, 10)),
        _IRREPS,
        _IRREPS,
    ),
    model("e3nn.o3.SphericalHarmonics", noise(3), "1x0e+1x1o+1x2e", normalize=True),
    model("e3nn.o3.Norm", noise(10), _IRREPS),
    model("e3nn.nn.BatchNorm", noise(10), _IRREPS),
    model("e3nn.nn.FullyConnectedNet", noise(4), [4, 8, 2], lambda: torch.relu),
    model("e3nn.nn.NormActivation", noise(10), _IRREPS, lambda: torch.sigmoid),
]

TABNET = [
    model(
        "pytorch_tabnet.tab_network.TabNet",
        noise(6),
        6,
        3,
        n_d=4,
        n_a=4,
        group_attention_matrix=lambda: torch.eye(6),
    ),
    model(
        "pytorch_tabnet.tab_network.TabNetEncoder",
        noise(6),
        6,
        3,
        n_d=4,
        n_a=4,
        group_attention_matrix=lambda: torch.eye(6),
    ),
    model(
        "pytorch_tabnet.tab_network.TabNetNoEmbeddings",
        noise(6),
        6,
        3,
        n_d=4,
        n_a=4,
        group_attention_matrix=lambda: torch.eye(6),
    ),
]

MODELS: list[LibraryModel] = [*GEOMETRIC, *NEURALOP, *E3NN, *TABNET]
