"""Folds a scale and a shift of each input or output channel into linear layers and convolutions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fxopt.submodules import weight_of, without_tensors
from fxopt.torch_internals import parameters_of

LAYERS: tuple[type[nn.Module], ...] = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
"""The layers into which a scale and a shift can be folded."""


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which weights are computed before they are rounded once: float64, or float32 on devices without it."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64


def channel_dimension(layer: nn.Module) -> int:
    """The dimension of the channels in inputs and outputs of a layer, counted from the last dimension.

    Example:
        >>> channel_dimension(nn.Linear(2, 2)), channel_dimension(nn.Conv2d(2, 2, 1))
        (-1, -3)
    """
    return 1 - weight_of(layer).ndim


def channels(layer: nn.Module, behind: bool) -> int:
    """The number of output channels of a layer if `behind`, otherwise of its input channels.

    Example:
        >>> layer = nn.ConvTranspose1d(4, 6, 3, groups=2)
        >>> channels(layer, behind=True), channels(layer, behind=False)
        (6, 4)
    """
    rows, columns = weight_of(layer).shape[:2]
    return rows if _of_rows(layer, behind) else columns * _groups(layer)


def folded(layer: nn.Module, scale: Tensor, shift: Tensor | None, behind: bool) -> nn.Module:
    """Make a layer that also multiplies by `scale` and adds `shift`, with weights rounded once to its dtype.

    `a (W x + c) + b = (a W) x + (a c + b)`, and `W (a x + b) + c = (W a) x + (W b + c)`.

    Args:
        layer: one of `LAYERS`.
        scale: a factor for each channel, or one for all, in a wide dtype.
        shift: a summand for each channel, or one for all; None for none.
        behind: whether to scale and shift the output channels, and not the input channels.
    """
    weight, bias = weight_of(layer), parameters_of(layer)["bias"]
    scale, shift = _spread(layer, scale, behind), None if shift is None else _spread(layer, shift, behind)
    values = weight.detach().to(scale.dtype)
    constant = None if bias is None else bias.detach().to(scale.dtype)
    if behind and constant is not None:
        constant = constant * scale
    if shift is not None:
        added = shift if behind else (values * _factor(layer, shift, behind)).flatten(1).sum(1)
        constant = added if constant is None else constant + added
    fused = without_tensors(layer)
    values = values * _factor(layer, scale, behind)
    parameters_of(fused)["weight"] = nn.Parameter(values.to(weight.dtype), weight.requires_grad)
    if constant is not None:
        gradients = (weight if bias is None else bias).requires_grad
        parameters_of(fused)["bias"] = nn.Parameter(constant.to(weight.dtype, copy=True), gradients)
    return fused


def scaling_obstacle(layer: nn.Module, scale: Tensor, shift: Tensor | None, behind: bool) -> str | None:
    """Return why the layer that `folded` would make is not equivalent; None if it is."""
    weight, bias = weight_of(layer), parameters_of(layer)["bias"]
    if not weight.is_floating_point():
        return f"the weight of the layer is {weight.dtype}"
    if shift is not None and not behind and _takes_zeros(layer):
        return "the layer takes zeros beside its input, which would not be shifted"
    if weight.is_meta or not weight.numel():
        return None
    scale, shift = _spread(layer, scale, behind), None if shift is None else _spread(layer, shift, behind)
    limits, largest = torch.finfo(weight.dtype), _largest_of_channels(layer, behind).to(scale.dtype)
    factors = scale.abs()
    sizes = largest * factors
    added = shifted = 0.0 if shift is None else shift.abs().max().item()
    if bias is not None:
        added += bias.detach().abs().max().item() * (factors.max().item() if behind else 1)
    if not behind:
        added += largest.max().item() * shifted * weight[0].numel()
    if not (sizes.max().item() <= limits.max and added <= limits.max):  # also if one is NaN
        return f"the folded weights are perhaps not finite in {weight.dtype}"
    if ((sizes > 0) & (sizes < limits.tiny)).any():
        return f"the folded weights are too small for {weight.dtype}"
    return None


def mismatch(what: str, tensor: Tensor, layer: nn.Module) -> str | None:
    """Return a reason that begins with `what` if a tensor differs from the weight of a layer in dtype or device."""
    weight = weight_of(layer)
    if (tensor.dtype, tensor.device) == (weight.dtype, weight.device):
        return None
    return f"{what} is {tensor.dtype} on {tensor.device}, the layer {weight.dtype} on {weight.device}"


def _spread(layer: nn.Module, values: Tensor, behind: bool) -> Tensor:
    """Expand values to one for each channel, in the dtype and on the device in which weights are computed."""
    weight = weight_of(layer)
    return values.to(weight.device, wide_dtype(weight)).expand(channels(layer, behind))


def _factor(layer: nn.Module, values: Tensor, behind: bool) -> Tensor:
    """Reshape `values`, one for each channel, so that they can be multiplied with the weight of a layer."""
    weight = weight_of(layer)
    if _of_rows(layer, behind):
        factor = values.unsqueeze(1)
    else:
        groups = _groups(layer)
        factor = values.reshape(groups, -1).repeat_interleave(len(weight) // groups, dim=0)
    return factor.reshape(*factor.shape, *[1] * (weight.ndim - 2))


def _largest_of_channels(layer: nn.Module, behind: bool) -> Tensor:
    """The largest absolute weight of each channel."""
    weight: Tensor = weight_of(layer).detach()
    sizes = weight.abs().reshape(*weight.shape[:2], -1)
    if _of_rows(layer, behind):
        return sizes.amax((1, 2))
    return sizes.reshape(_groups(layer), -1, *sizes.shape[1:]).amax((1, 3)).flatten()


def _of_rows(layer: nn.Module, behind: bool) -> bool:
    """Tell whether the channels are the first dimension of the weight: output channels, or input channels if transposed."""
    return behind != getattr(layer, "transposed", False)


def _groups(layer: nn.Module) -> int:
    return int(getattr(layer, "groups", 1))


def _takes_zeros(layer: nn.Module) -> bool:
    """Tell whether a layer computes some outputs from zeros around its input."""
    padding = getattr(layer, "padding", "valid")
    pads = padding != "valid" if isinstance(padding, str) else any(padding)
    return getattr(layer, "transposed", False) or (pads and getattr(layer, "padding_mode", "") == "zeros")
