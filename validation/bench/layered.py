"""Models of any number of layers with places for every pass, and how long a pass takes on them.

It needs torch alone, so that it also runs in the environment of a peer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

WIDTH = 8
"""The number of features: small, so that the work on the graph is what is timed."""


class Dense(nn.Module):
    """Two layers to merge, a division, an activation, and a normalization to fold; a bias in each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.act, self.norm = nn.GELU(), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) * self.key(x) / 8
        output: Tensor = self.norm(self.out(self.act(scores)))
        return output


class Convolution(nn.Sequential):
    """A convolution with a normalization to fold."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(WIDTH, WIDTH, 1), nn.BatchNorm2d(WIDTH))


class Branches(nn.Module):
    """Two convolutions to merge."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(WIDTH, WIDTH, 1), nn.Conv2d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.left(x) + self.right(x)
        return output


class Cluttered(nn.Module):
    """A dropout that changes nothing, a value that is computed twice, and one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(x)
        torch.relu(y)
        return torch.sin(y) * torch.sin(y)


class Packed(nn.Sequential):
    """A packed layer with an activation behind it."""

    def __init__(self) -> None:
        from fxopt.kernels import packed_layer  # what peers are measured with does not have it

        layer = packed_layer(nn.Linear(WIDTH, WIDTH), "onednn", (2, WIDTH))
        super().__init__(layer, nn.ReLU())


class Wide(nn.Module):
    """A layer with enough features for a kernel with weights in int8."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(torch.cat([x] * (64 // WIDTH), dim=1))
        return output


class Normalised(nn.Sequential):
    """A normalization with a weight before a layer."""

    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))


class Scaled(nn.Module):
    """A layer whose output is scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x) * 3
        return output


class Constant(nn.Module):
    """A constant."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.new_ones(WIDTH).cos()


class Attention(nn.Module):
    """Attention of one head to its own input, with a mask."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x[None]
        weights = (rows @ rows.transpose(-2, -1) / 8 + rows[..., :1]).softmax(-1)
        return (weights @ rows)[0]


class Copies(nn.Module):
    """A copy into the default layout."""

    def forward(self, x: Tensor) -> Tensor:
        halves = (x + 1).view(2, 2, WIDTH // 2).transpose(0, 1).contiguous()
        return halves.transpose(0, 1).reshape(2, WIDTH) + 1


class Grouped(nn.Module):
    """Attention whose queries have twice as many heads as its keys and values."""

    def forward(self, x: Tensor) -> Tensor:
        query = x[None, None].expand(1, 2, 2, WIDTH)
        heads = x[None, None][:, :, None].expand(1, 1, 2, 2, WIDTH).reshape(1, 2, 2, WIDTH)
        return nn.functional.scaled_dot_product_attention(query, heads, heads)[0, 0]


class Checks(nn.Module):
    """Stands for the guard of a captured graph, which checks the sizes of its inputs."""

    checks_inputs = True

    def forward(self, x: Tensor) -> None:
        assert x.shape == (2, WIDTH)


def kind_for(name: str) -> Callable[[], nn.Module]:
    """The layer that has a place for the pass of this name."""
    own: dict[str, Callable[[], nn.Module]] = {
        "FoldConstants": Constant,
        "FoldNormWeights": Normalised,
        "FoldScaleAndShift": Scaled,
        "FuseAttention": Attention,
        "FuseEpilogues": Packed,
        "MergeConvs": Branches,
        "QuantizeLinears": Wide,
        "RemoveCopies": Copies,
        "RemoveRepeatedHeads": Grouped,
    }
    if name in own:
        return own[name]
    if "Conv" in name:
        return Convolution
    return Cluttered if name.startswith(("Eliminate", "RemoveIdentity")) else Dense


def traced(kind: Callable[[], nn.Module], layers: int) -> GraphModule:
    """A graph of so many layers, with the shapes and dtypes of its values."""
    graph_module = _symbolic_trace(nn.Sequential(*(kind() for _ in range(layers))).eval())
    shape = (2, WIDTH, 4, 4) if kind in (Convolution, Branches) else (2, WIDTH)
    FakeTensorProp(graph_module, FakeTensorMode(allow_non_fake_inputs=True)).propagate(torch.ones(shape))
    if kind in (Constant, Copies, Grouped):  # there are none where nobody checks sizes
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


Times = dict[str, dict[int, float]]
"""`"<pass> apply"` or `"<pass> undo"` -> number of layers -> seconds."""


def times(passes: Mapping[str, Any], layers: list[int], rounds: int) -> Times:
    """The least time of several rounds for each pass on each number of layers, and for its undo."""
    found: Times = {}
    for count in layers:
        for name, pass_ in passes.items():
            for _ in range(rounds + 1):  # the first one imports and warms up
                graph_module = traced(kind_for(name), count)
                runs: dict[str, dict[str, bool]] = {f"{name} apply": {}}
                if hasattr(pass_, "reverse"):
                    runs[f"{name} undo"] = {"reverse": True}
                for run, options in runs.items():
                    start = time.process_time()
                    graph_module = pass_(graph_module, **options)
                    seconds = time.process_time() - start
                    least = found.setdefault(run, {})
                    least[count] = min(seconds, least.get(count, seconds))
    return found
