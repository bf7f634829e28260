"""Batch normalization in eval mode: a scale and a shift of each channel, which a layer beside it can do, too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fxopt.obstacles.scaling import channels, wide_dtype


def scale_and_shift(norm: nn.Module) -> tuple[Tensor, Tensor]:
    """The vectors `a`, `b` with `norm(x) = a * x + b`, in a wide dtype."""
    assert isinstance(norm, _BatchNorm)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    wide = wide_dtype(norm.running_mean)
    scale = torch.rsqrt(norm.running_var.to(wide) + norm.eps)
    if norm.weight is not None:
        scale = scale * norm.weight.detach().to(wide)
    shift = -norm.running_mean.to(wide) * scale
    return scale, shift if norm.bias is None else shift + norm.bias.detach().to(wide)


def statistics_obstacle(layer: nn.Module, norm: Any, behind: bool) -> str | None:
    """Why `norm` is no scale and shift of the channels that `layer` gives, or takes; None if it is."""
    kind, weight = type(norm).__name__, layer.get_parameter("weight")
    if norm.training:
        return f"the {kind} is in training mode: it normalises by batch statistics"
    if norm.running_mean is None or norm.running_var is None:
        return f"the {kind} has no running statistics: it normalises by batch statistics"
    if norm.num_features != channels(layer, behind):
        return f"the {kind} has {norm.num_features} features, the layer has {channels(layer, behind)}"
    for tensor in (*norm.parameters(), norm.running_mean, norm.running_var):
        if tensor.dtype != weight.dtype or tensor.device != weight.device:
            facts = f"{tensor.dtype} on {tensor.device}, the layer {weight.dtype} on {weight.device}"
            return f"the {kind} is {facts}"
    return None
