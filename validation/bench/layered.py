"""Models of any number of layers with places for every pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import fxopt
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


def _attention(x: Tensor) -> Tensor:
    """Attention of one head to its own input, with a mask."""
    rows = x[None]
    weights = (rows @ rows.transpose(-2, -1) / 8 + rows[..., :1]).softmax(-1)
    return (weights @ rows)[0]


def _copies(x: Tensor) -> Tensor:
    """A copy into the default layout."""
    halves = (x + 1).view(2, 2, WIDTH // 2).transpose(0, 1).contiguous()
    return halves.transpose(0, 1).reshape(2, WIDTH) + 1


def _grouped(x: Tensor) -> Tensor:
    """Attention whose queries have twice as many heads as its keys and values."""
    query = x[None, None].expand(1, 2, 2, WIDTH)
    heads = x[None, None][:, :, None].expand(1, 1, 2, 2, WIDTH).reshape(1, 2, 2, WIDTH)
    return nn.functional.scaled_dot_product_attention(query, heads, heads)[0, 0]


def _wide(x: Tensor, layer: nn.Module) -> Tensor:
    """A layer with enough features for a kernel with weights in int8."""
    return layer(torch.cat([x] * (64 // WIDTH), dim=1))  # type: ignore[no-any-return]


def _linear(features: int = WIDTH) -> nn.Module:
    return nn.Linear(features, WIDTH)


OWN: dict[str, Callable[[], nn.Module]] = {
    "EliminateCommonSubexpressions": cluttered,
    "EliminateDeadCode": cluttered,
    "FoldConstants": lambda: Layer(lambda x: x + x.new_ones(WIDTH).cos()),
    "FoldNormWeights": lambda: nn.Sequential(nn.LayerNorm(WIDTH), _linear()),
    "FoldScaleAndShift": lambda: Layer(lambda x, layer: layer(x) * 3, layer=_linear()),
    "FuseAttention": lambda: Layer(_attention),
    "FuseEpilogues": lambda: nn.Sequential(packed_layer(_linear(), "onednn", (2, WIDTH)), nn.ReLU()),
    "MergeConvs": branches,
    "QuantizeLinears": lambda: Layer(_wide, layer=_linear(64)),
    "RemoveCopies": lambda: Layer(_copies),
    "RemoveIdentity": cluttered,
    "RemoveRepeatedHeads": lambda: Layer(_grouped),
}
"""The layers that have a place for one pass, by its name."""


def kind_for(name: str) -> Callable[[], nn.Module]:
    """The layer that has a place for the pass of this name."""
    return OWN.get(name, convolution if "Conv" in name else dense)


def traced(kind: Callable[[], nn.Module], layers: int) -> GraphModule:
    """A graph of so many layers."""
    model = nn.Sequential(*(kind() for _ in range(layers))).eval()
    shape = (2, WIDTH, 4, 4) if kind in (convolution, branches) else (2, WIDTH)
    return fxopt.trace(model, (torch.ones(shape),), verify=False)
