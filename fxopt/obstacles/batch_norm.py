"""Batch normalization in eval mode: a scale and a shift of each channel, which a layer beside it can do, too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fxopt.obstacles.scaling import channels, wide_dtype
from fxopt.submodules import weight_of
from fxopt.torch_internals import buffers_of, parameters_of


def scale_and_shift(norm: Any) -> tuple[Tensor, Tensor]:
    """The vectors `a`, `b` with `norm(x) = a * x + b`, in a wide dtype."""
    weight, bias = parameters_of(norm)["weight"], parameters_of(norm)["bias"]
    mean, variance = buffers_of(norm)["running_mean"], buffers_of(norm)["running_var"]
    assert mean is not None
    assert variance is not None
    wide = wide_dtype(mean)
    scale = torch.rsqrt(variance.to(wide) + norm.eps)
    if weight is not None:
        scale = scale * weight.detach().to(wide)
    shift = -mean.to(wide) * scale
    return scale, shift if bias is None else shift + bias.detach().to(wide)


def statistics_obstacle(layer: nn.Module, norm: Any, behind: bool) -> str | None:
    """Why `norm` is no scale and shift of the channels that `layer` gives, or takes; None if it is."""
    kind, weight = type(norm).__name__, weight_of(layer)
    if norm.training:
        return f"the {kind} is in training mode: it normalises by batch statistics"
    mean, variance = buffers_of(norm).get("running_mean"), buffers_of(norm).get("running_var")
    if mean is None or variance is None:
        return f"the {kind} has no running statistics: it normalises by batch statistics"
    if norm.num_features != channels(layer, behind):
        return f"the {kind} has {norm.num_features} features, the layer has {channels(layer, behind)}"
    for tensor in (*parameters_of(norm).values(), mean, variance):
        if tensor is not None and (tensor.dtype != weight.dtype or tensor.device != weight.device):
            facts = f"{tensor.dtype} on {tensor.device}, the layer {weight.dtype} on {weight.device}"
            return f"the {kind} is {facts}"
    return None


def weights_obstacle(norm: Any) -> str | None:
    """Why the weights of `norm` cannot be read; None if they can."""
    if {"weight", "bias"} <= parameters_of(norm).keys():
        return None
    return f"the {type(norm).__name__} holds its weights otherwise than as parameters"
