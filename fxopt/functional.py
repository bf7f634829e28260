"""The layers of torch.nn that are equivalent to functions of torch with weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import nn


class Function(NamedTuple):
    """A function with weights.

    Attributes:
        value: the argument that is the input of the layer.
        tensors: for each argument that is a weight, the attribute of the layer.
        make: function that makes the layer from the shapes of its tensors, the rank of its input, and the other arguments.
            It raises a TypeError for arguments that the layer does not have, and a ValueError with a reason to refuse.
        turned: whether the weight of the layer is the transposed weight of the function.
    """

    value: str
    tensors: Mapping[str, str]
    make: Callable[..., nn.Module]
    turned: bool = False


Shapes = Mapping[str, tuple[int, ...]]
COUNT = "num_batches_tracked"
"""The buffer of batch normalization layers that is not an argument of any function."""


def _linear(shapes: Shapes, rank: int | None) -> nn.Module:
    if len(shapes["weight"]) != 2:
        raise ValueError("its weight is no matrix")
    outputs, inputs = shapes["weight"]
    return nn.Linear(inputs, outputs, "bias" in shapes)


def _conv(kind: Callable[..., nn.Module], rank: int, transposed: bool = False) -> Callable[..., nn.Module]:
    def make(shapes: Shapes, _: int | None, groups: int = 1, **options: Any) -> nn.Module:
        rows, columns, *size = shapes["weight"]
        if len(size) != rank:
            raise ValueError("its weight has other dimensions")
        widths = (rows, columns * groups) if transposed else (columns * groups, rows)
        return kind(*widths, tuple(size), groups=groups, bias="bias" in shapes, **options)

    return make


def _batch_norm(
    shapes: Shapes,
    rank: int | None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> nn.Module:
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}.get(rank or 0)
    if training:
        raise ValueError("it normalises by the statistics of the batch")
    if kind is None or len(shapes) != 4:
        raise ValueError("the rank of its input is unknown, or it lacks weights or statistics")
    return kind(shapes["weight"][0], eps, momentum)


def _layer_norm(
    shapes: Shapes, rank: int | None, normalized_shape: Any, eps: float = 1e-5, cudnn_enable: bool = True
) -> nn.Module:
    return nn.LayerNorm(normalized_shape, eps, bias="bias" in shapes)


def _group_norm(
    shapes: Shapes, rank: int | None, num_groups: int, eps: float = 1e-5, cudnn_enabled: bool = True
) -> nn.Module:
    return nn.GroupNorm(num_groups, shapes["weight"][0], eps)


def _rms_norm(shapes: Shapes, rank: int | None, normalized_shape: Any, eps: float | None = None) -> nn.Module:
    return nn.RMSNorm(normalized_shape, eps)


def _embedding(
    shapes: Shapes,
    rank: int | None,
    padding_idx: int | None = None,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> nn.Module:
    rows, columns = shapes["weight"]
    return nn.Embedding(rows, columns, padding_idx, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)


_BOTH = {"weight": "weight", "bias": "bias"}
STATISTICS = {"running_mean": "running_mean", "running_var": "running_var"}
"""The arguments and attributes that are buffers of a layer; all others are parameters."""

FUNCTIONS: Mapping[str, Function] = {
    "linear": Function("self", _BOTH, _linear),
    "addmm": Function("mat1", {"mat2": "weight", "self": "bias"}, _linear, turned=True),
    "matmul": Function("self", {"other": "weight"}, _linear, turned=True),
    "mm": Function("self", {"mat2": "weight"}, _linear, turned=True),
    **{f"conv{n}d": Function("self", _BOTH, _conv(getattr(nn, f"Conv{n}d"), n)) for n in (1, 2, 3)},
    **{
        f"conv_transpose{n}d": Function("self", _BOTH, _conv(getattr(nn, f"ConvTranspose{n}d"), n, True))
        for n in (1, 2, 3)
    },
    "batch_norm": Function("self", {**_BOTH, **STATISTICS}, _batch_norm),
    "layer_norm": Function("self", _BOTH, _layer_norm),
    "group_norm": Function("self", _BOTH, _group_norm),
    "rms_norm": Function("self", {"weight": "weight"}, _rms_norm),
    "embedding": Function("self", {"weight": "weight"}, _embedding),
}
"""The functions by operator name."""
