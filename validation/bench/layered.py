"""Models of any number of layers with places for every pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from fxopt.kernels import packed_layer

WIDTH = 8
"""The number of features: small, so that the work on the graph is what is timed."""


class Layer(nn.Module):
    """A function of a value and of the modules that it calls by name."""

    def __init__(self, function: Callable[..., Tensor], **modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, **dict(self.named_children()))


def dense() -> nn.Module:
    """Two layers to merge, a division, an activation, and a normalization to fold; a bias in each layer."""
    return Layer(
        lambda x, query, key, out, act, norm: norm(out(act(query(x) * key(x) / 8))),
        **{name: nn.Linear(WIDTH, WIDTH) for name in ("query", "key", "out")},
        act=nn.GELU(),
        norm=nn.BatchNorm1d(WIDTH),
    )


def convolution() -> nn.Module:
    """A convolution with a normalization to fold."""
    return nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 1), nn.BatchNorm2d(WIDTH))


def branches() -> nn.Module:
    """Two convolutions to merge."""
    convolutions = {name: nn.Conv2d(WIDTH, WIDTH, 1) for name in ("left", "right")}
    return Layer(lambda x, left, right: left(x) + right(x), **convolutions)


def cluttered() -> nn.Module:
    """A dropout that changes nothing, a value that is computed twice, and one that nothing uses."""

    def function(x: Tensor, dropout: nn.Module) -> Tensor:
        y = dropout(x)
        torch.relu(y)
        return torch.sin(y) * torch.sin(y)

    return Layer(function, dropout=nn.Dropout())


def packed() -> nn.Module:
    """A packed layer with an activation behind it."""
    return nn.Sequential(packed_layer(nn.Linear(WIDTH, WIDTH), "onednn", (2, WIDTH)), nn.ReLU())


def wide() -> nn.Module:
    """A layer with enough features for a kernel with weights in int8."""
    return Layer(lambda x, layer: layer(torch.cat([x] * (64 // WIDTH), dim=1)), layer=nn.Linear(64, WIDTH))


def normalised() -> nn.Module:
    """A normalization with a weight before a layer."""
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))


def scaled() -> nn.Module:
    """A layer whose output is scaled."""
    return Layer(lambda x, layer: layer(x) * 3, layer=nn.Linear(WIDTH, WIDTH))


def constant() -> nn.Module:
    """A constant."""
    return Layer(lambda x: x + x.new_ones(WIDTH).cos())


def attention() -> nn.Module:
    """Attention of one head to its own input, with a mask."""

    def function(x: Tensor) -> Tensor:
        rows = x[None]
        weights = (rows @ rows.transpose(-2, -1) / 8 + rows[..., :1]).softmax(-1)
        return (weights @ rows)[0]

    return Layer(function)


def copies() -> nn.Module:
    """A copy into the default layout."""

    def function(x: Tensor) -> Tensor:
        halves = (x + 1).view(2, 2, WIDTH // 2).transpose(0, 1).contiguous()
        return halves.transpose(0, 1).reshape(2, WIDTH) + 1

    return Layer(function)


def grouped() -> nn.Module:
    """Attention whose queries have twice as many heads as its keys and values."""

    def function(x: Tensor) -> Tensor:
        query = x[None, None].expand(1, 2, 2, WIDTH)
        heads = x[None, None][:, :, None].expand(1, 1, 2, 2, WIDTH).reshape(1, 2, 2, WIDTH)
        return nn.functional.scaled_dot_product_attention(query, heads, heads)[0, 0]

    return Layer(function)


OWN: dict[str, Callable[[], nn.Module]] = {
    "FoldConstants": constant,
    "FoldNormWeights": normalised,
    "FoldScaleAndShift": scaled,
    "FuseAttention": attention,
    "FuseEpilogues": packed,
    "MergeConvs": branches,
    "QuantizeLinears": wide,
    "RemoveCopies": copies,
    "RemoveRepeatedHeads": grouped,
}
"""The layers that have a place for one pass, by its name."""


def kind_for(name: str) -> Callable[[], nn.Module]:
    """The layer that has a place for the pass of this name."""
    if name in OWN:
        return OWN[name]
    if "Conv" in name:
        return convolution
    return cluttered if name.startswith(("Eliminate", "RemoveIdentity")) else dense


def traced(kind: Callable[[], nn.Module], layers: int) -> GraphModule:
    """A graph of so many layers, with the shapes and dtypes of its values."""
    graph_module = _symbolic_trace(nn.Sequential(*(kind() for _ in range(layers))).eval())
    shape = (2, WIDTH, 4, 4) if kind in (convolution, branches) else (2, WIDTH)
    FakeTensorProp(graph_module, FakeTensorMode(allow_non_fake_inputs=True)).propagate(torch.ones(shape))
    if kind in (constant, copies, grouped):  # there are none where nobody checks sizes
        graph_module.add_submodule("checks", Checks())
        (x,) = graph_module.graph.find_nodes(op="placeholder")
        with graph_module.graph.inserting_after(x):
            graph_module.graph.call_module("checks", (x,))
        graph_module.recompile()
    return graph_module


def _symbolic_trace(model: nn.Module) -> GraphModule:
    """Trace a model with packed layers as leaves, too."""

    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return isinstance(m, nn.Linear) or super().is_leaf_module(m, module_qualified_name)

    return GraphModule(model, Tracer().trace(model))


class Checks(nn.Module):
    """Stands for the guard of a captured graph, which checks the sizes of its inputs."""

    checks_inputs = True

    def forward(self, x: Tensor) -> None:
        assert x.shape == (2, WIDTH)
