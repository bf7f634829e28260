"""Batch normalization in eval mode: a scale and a shift of each channel, which a layer beside it can do, too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fxopt.submodules import without_tensors


def scale_and_shift(norm: nn.Module) -> tuple[Tensor, Tensor]:
    """The vectors `a`, `b` with `norm(x) = a * x + b`, in float64 (float32 on devices that lack it)."""
    assert isinstance(norm, _BatchNorm)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    wide = torch.float32 if norm.running_mean.device.type == "mps" else torch.float64
    scale = torch.rsqrt(norm.running_var.to(wide) + norm.eps)
    if norm.weight is not None:
        scale = scale * norm.weight.detach().to(wide)
    shift = -norm.running_mean.to(wide) * scale
    return scale, shift if norm.bias is None else shift + norm.bias.detach().to(wide)


def folded(layer: nn.Module, norm: nn.Module, behind: bool) -> nn.Module:
    """A layer that computes `norm` behind `layer`, or before it, rounded once to the dtype of `layer`.

    `a (W x + c) + b = (a W) x + (a c + b)`, and `W (a x + b) + c = (W a) x + (W b + c)`.
    """
    weight, bias = layer._parameters["weight"], layer._parameters["bias"]
    assert weight is not None
    scale, shift = scale_and_shift(norm)
    values = weight.detach().to(scale.dtype)
    constant = values.new_zeros(len(values)) if bias is None else bias.detach().to(scale.dtype)
    constant = constant * scale + shift if behind else constant + torch.mv(values, shift)
    values = values * (scale.reshape(-1, *[1] * (values.ndim - 1)) if behind else scale)
    fused = without_tensors(layer)
    gradients = (weight if bias is None else bias).requires_grad
    fused._parameters["weight"] = nn.Parameter(values.to(weight.dtype), weight.requires_grad)
    fused._parameters["bias"] = nn.Parameter(constant.to(weight.dtype), gradients)
    return fused


def _is_too_large(layer: nn.Module, norm: nn.Module, behind: bool) -> bool:
    """Tell whether folded weights may be too large for their dtype, by the largest of each factor."""
    weight, bias = layer.get_parameter("weight"), layer._parameters["bias"]
    if weight.is_meta:
        return False
    scale, shift = (float(values.abs().max()) for values in scale_and_shift(norm))
    large, offset = (0.0 if t is None else float(t.detach().abs().max()) for t in (weight, bias))
    offset = offset * scale + shift if behind else offset + large * shift * weight.shape[1]
    return not max(large * scale, offset) <= torch.finfo(weight.dtype).max  # nan is not, either


def folding_obstacle(layer: nn.Module, norm: Any, behind: bool) -> str | None:
    """Why `norm` cannot become a part of `layer`, before it or behind it; `None` if it can."""
    kind, weight = type(norm).__name__, layer.get_parameter("weight")
    channels = weight.shape[0 if behind else 1]
    if norm.training:
        return f"the {kind} is in training mode: it normalises by batch statistics"
    if norm.running_mean is None or norm.running_var is None:
        return f"the {kind} has no running statistics: it normalises by batch statistics"
    if norm.num_features != channels:
        return f"the {kind} has {norm.num_features} features, the layer has {channels}"
    for tensor in (*norm.parameters(), norm.running_mean, norm.running_var):
        if tensor.dtype != weight.dtype or tensor.device != weight.device:
            facts = f"{tensor.dtype} on {tensor.device}, the layer {weight.dtype} on {weight.device}"
            return f"the {kind} is {facts}"
    if _is_too_large(layer, norm, behind):
        return f"the folded weights are perhaps not finite in {weight.dtype}"
    return None
