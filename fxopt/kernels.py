"""Layers with a weight that is also stored in a kernel's own layout: a packed weight.

A packed layer shares the parameters of the plain layer. It computes with the packed weight if the result is equivalent: on
the CPU, in the dtype of the weight, without gradients. Otherwise it computes as the plain layer does.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from fxopt.packed_operators import Kernel, Packed, apply_epilogue, available, is_pointwise, pads_zeros
from fxopt.submodules import with_parameters
from fxopt.torch_internals import is_transforming, parameters_of, version_of


class PackedLayer(nn.Module):
    """A layer with a packed weight; it may add a tensor, and apply an activation, in the same step.

    Its parameters are those of the plain layer. After a change of the weight, the layer packs the weight again. It detects
    changes by the version of the weight, and steps of fused optimizers. It does not detect writes through `weight.data` or
    numpy, or into weights that were made under `torch.inference_mode`, until it is called with gradients.

    Attributes:
        kernel: `onednn`, `mkl`, `matmul` for 1x1 convolutions, or a kernel that rounds the weight: `int8`, `int8_weight`.
        packed_for: the input shape that the weight is packed for; the layer accepts other shapes as well.
    """

    kernel: str
    packed_for: tuple[int, ...]

    def forward(self, input: Tensor, other: Tensor | None = None, activation: str | None = None) -> Tensor:
        """Compute `activation(layer(input) + other)`."""
        if torch.compiler.is_compiling():
            return apply_epilogue(super().forward(input), other, activation)
        if type(input) is Tensor and _can_run(self, input, other):
            kernel = _kernel_of(self)
            if kernel is not None and input.dtype in kernel.dtypes and not input.shape[-1] % kernel.multiple:
                run = _packed(self, kernel).run
                return run(parameters_of(self)["bias"], input, other, activation, False)
        # Drop the packed weight: writes before the next packed call may not change the version of the weight.
        self.__dict__.pop("_packed", None)
        return apply_epilogue(super().forward(input), other, activation)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_packed"}


class PackedLinear(PackedLayer, nn.Linear):
    """A `torch.nn.Linear` with a packed weight.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(8, 4).requires_grad_(False)
        >>> packed, x = packed_layer(layer, "onednn", (2, 8)), torch.randn(2, 8)
        >>> torch.allclose(packed(x, activation="relu"), layer(x).relu(), atol=1e-6)
        True
    """


class PackedConv1d(PackedLayer, nn.Conv1d):
    """A `torch.nn.Conv1d` with a packed weight, whose outputs are laid out as one-row images in channels_last.

    Example:
        >>> import torch
        >>> layer = torch.nn.Conv1d(3, 4, 3).requires_grad_(False)
        >>> packed, x = packed_layer(layer, "onednn", (2, 3, 8)), torch.randn(2, 3, 8)
        >>> torch.allclose(packed(x), layer(x), atol=1e-5)
        True
    """


class PackedConv2d(PackedLayer, nn.Conv2d):
    """A `torch.nn.Conv2d` with a packed weight, whose outputs are in channels_last.

    Example:
        >>> import torch
        >>> layer = torch.nn.Conv2d(3, 4, 3).requires_grad_(False)
        >>> packed, x = packed_layer(layer, "onednn", (2, 3, 8, 8)), torch.randn(2, 3, 8, 8)
        >>> torch.allclose(packed(x), layer(x), atol=1e-5)
        True
    """


PACKED: Mapping[type[nn.Module], type[nn.Module]] = {
    nn.Linear: PackedLinear,
    nn.Conv1d: PackedConv1d,
    nn.Conv2d: PackedConv2d,
}
"""The packed layer of each type of layer."""

_PLAIN = {packed: plain for plain, packed in PACKED.items()}

# The packed weights of all layers, by kernel and by address, shape, strides and dtype of the weight.
_shared = weakref.WeakValueDictionary[Any, Packed]()
_lock = threading.RLock()  # layers with one weight share its packed form across threads


def packed_layer(layer: nn.Module, kernel: str, shape: Sequence[int]) -> nn.Module:
    """Make a packed layer that shares the parameters of `layer`.

    Args:
        layer: a `torch.nn.Linear`, `torch.nn.Conv1d` or `torch.nn.Conv2d`.
        kernel: one of `kernels_for(layer)`.
        shape: the shape of the expected inputs.
    """
    packed = with_parameters(layer, parameters_of(layer))
    packed.__class__ = PACKED[type(layer)]
    vars(packed).update(kernel=kernel, packed_for=tuple(shape))
    return packed


def plain_layer(packed: Any) -> nn.Module:
    """Make the plain layer of a packed layer, with the current parameters of the packed layer."""
    plain: nn.Module = with_parameters(packed, parameters_of(packed))
    plain.__class__ = _PLAIN[type(packed)]
    return plain


def kernels_for(layer: nn.Module, *, rounding: bool = False, alone: bool = False) -> list[str]:
    """List the kernels on this machine that can compute a layer with a packed weight.

    Args:
        layer: a `torch.nn.Linear`, `torch.nn.Conv1d` or `torch.nn.Conv2d`.
        rounding: whether to include kernels that round the weight.
        alone: whether to leave out kernels that need the plain weight in addition to the packed one.
    """
    weight = parameters_of(layer).get("weight")
    if weight is None or weight.device.type != "cpu" or not weight.numel() or not pads_zeros(layer):
        return []
    return [
        name
        for name, kernel in available(type(layer)).items()
        if weight.dtype in kernel.dtypes
        and weight.shape[1] % kernel.multiple == 0
        and (not kernel.pointwise or is_pointwise(layer))
        and (rounding or not kernel.rounds)
        and (kernel.alone or not alone)
    ]


def fuses_epilogues(packed: nn.Module) -> bool:
    """Tell whether a packed layer adds a tensor and applies an activation in the same step."""
    kernel = _kernel_of(packed)
    return kernel is not None and not kernel.rounds


def unchecked_function(packed: Any, dtype: torch.dtype) -> Callable[..., Tensor] | None:
    """Return the function that a packed layer computes with, without the checks that the layer makes on each call.

    The caller must make sure that no gradients are recorded, nothing traces, autocast is off, all inputs are dense tensors
    on the CPU, and the parameters do not change.

    Args:
        packed: the layer.
        dtype: the dtype of its inputs.

    Returns:
        A function of the input, a tensor to add, the activation, and whether the sum may overwrite the added tensor; None
        if the layer would compute without its packed weight.
    """
    kernel, weight, bias = _kernel_of(packed), parameters_of(packed)["weight"], parameters_of(packed)["bias"]
    if kernel is None or dtype not in kernel.dtypes or not _are_read(weight, bias, dtype):
        return None
    return functools.partial(_packed(packed, kernel).run, bias)


def packed_weight(packed: Any) -> Packed | None:
    """The packed weight of a layer; `None` before the first call with a packed weight and before `unchecked_function`."""
    held = vars(packed).get("_packed")
    return None if held is None else held[2]


def _kernel_of(packed: Any) -> Kernel | None:
    plain = _PLAIN.get(type(packed))
    return None if plain is None else available(plain).get(packed.kernel)


def _can_run(layer: nn.Module, input: Tensor, other: Tensor | None) -> bool:
    """Tell whether the kernel, which has no derivatives and requires dense tensors, computes the same as the layer."""
    weight, bias = parameters_of(layer).get("weight"), parameters_of(layer).get("bias")
    if not _are_read(weight, bias, input.dtype):
        return False
    if torch.is_grad_enabled() and any(
        each is not None and each.requires_grad for each in (weight, bias, input, other)
    ):
        return False
    return (
        all(_is_dense(each, input.dtype) for each in (input, other) if each is not None)
        and (
            input.shape[-1:] == weight.shape[1:]
            if isinstance(layer, nn.Linear)
            else input.dim() == weight.dim()
        )
        and not torch.is_autocast_enabled("cpu")
        and not is_transforming()
    )


def _are_read(weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> bool:
    """Tell whether kernels read a weight and a bias correctly: kernels check neither the size nor the strides of a bias."""
    return (
        type(weight) is nn.Parameter
        and _is_dense(weight, dtype)
        and (
            bias is None
            or (_is_dense(bias, dtype) and bias.shape == weight.shape[:1] and bias.is_contiguous())
        )
    )


def _is_dense(tensor: Tensor, dtype: torch.dtype) -> bool:
    return (
        tensor.dtype is dtype
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.is_nested
    )


def _packed(layer: Any, kernel: Kernel) -> Packed:
    """Return the packed weight; pack again if the weight was replaced or written into."""
    weight: Tensor = layer.weight
    version = 0 if weight.is_inference() else version_of(weight)
    held = layer.__dict__.get("_packed")
    seen = (version, weight.data_ptr(), weight.shape, weight.stride(), weight.dtype, _fused_steps[0])
    if held is None or held[1] != seen:
        with _lock, torch.no_grad():
            key = layer.kernel, seen[1:-1]
            packed = _shared.get(key) if kernel.any_shape else None
            if packed is None or not _holds(packed, weight):
                packed = _shared[key] = kernel.pack(layer, layer.packed_for)
        # Keep the weight alive as well, so that no other weight can get its address.
        held = layer.__dict__["_packed"] = (weight.detach(), seen, packed)
    found: Packed = held[2]
    return found


_fused_steps = [0]
"""The number of steps of fused optimizers, which change weights without changing their versions."""


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    _fused_steps[0] += any(group.get("fused") for group in optimizer.param_groups)


register_optimizer_step_post_hook(_after_step)


def _holds(packed: Packed, weight: Tensor) -> bool:
    """Tell whether a weight still equals the one that was packed: an undetected write may have changed it."""
    unpacked = None if packed.unpack is None else packed.unpack()
    return unpacked is not None and unpacked.dtype is weight.dtype and torch.equal(unpacked, weight)


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()  # another thread of the parent may have held the old one


os.register_at_fork(after_in_child=_after_fork)
