"""Layers that hold their weight packed as a kernel wants it: torch's private operators stand in this file alone.

A packed layer is the layer itself, with the same parameters, and computes with the packed weight where that gives the
same: on the CPU, in the dtype of its weight, where no gradient is asked for. Elsewhere it is the plain layer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode

from fxopt.activations import ACTIVATIONS
from fxopt.submodules import without_tensors

EPILOGUES: Mapping[str, tuple[str, str]] = {
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "hardswish": ("hardswish", ""),
    "sigmoid": ("sigmoid", ""),
    "silu": ("swish", ""),
    "tanh": ("tanh", ""),
}
"""The activations, by their names in `ACTIVATIONS`, that oneDNN computes before it writes a product to memory.

Its ReLU and hard sigmoid make 0 of NaN, which would hide a fault: ReLU is computed in place instead.
"""


ACTIVATED = (*EPILOGUES, "relu")
"""The activations that a packed layer applies without new memory."""


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """How a kernel packs a weight, and computes with it.

    Attributes:
        dtypes: those that it takes.
        pack: makes the packed weight of a layer and the shape of its input.
        run: computes the layer, given its input, the packed weight, something to add, and an activation.
        fuses: whether it adds and activates itself.
        rounds: whether it rounds the weight to int8.
        multiple: what the number of features in a row has to be a multiple of.
    """

    dtypes: tuple[torch.dtype, ...]
    pack: Callable[[Any, Sequence[int]], Any]
    run: Callable[[Any, Any, Tensor, Tensor | None, str | None], Tensor]
    fuses: bool
    rounds: bool = False
    multiple: int = 1


class PackedLinear(nn.Linear):
    """A `torch.nn.Linear` with a packed weight; it may add a tensor, and apply an activation, in the same step.

    Its parameters are those of the layer that it was made of. After a change of the weight it packs again. Unnoticed is
    what does not raise the version of the weight: writes through `weight.data` or numpy, into weights that were made
    under `torch.inference_mode`, and steps of fused optimizers, unless the layer was called with gradients since.

    Attributes:
        kernel: `onednn`, `mkl`, or `int8`, which rounds.
        packed_for: the shape of the inputs that it is packed for; it takes others as well.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(8, 4).requires_grad_(False)
        >>> packed, x = packed_layer(layer, "onednn", (2, 8)), torch.randn(2, 8)
        >>> torch.allclose(packed(x, activation="relu"), layer(x).relu(), atol=1e-6)
        True
    """

    kernel: str
    packed_for: tuple[int, ...]

    def forward(self, input: Tensor, other: Tensor | None = None, activation: str | None = None) -> Tensor:
        """Compute `activation(linear(input) + other)`."""
        return _forward(self, super().forward, input, other, activation)

    def __getstate__(self) -> dict[str, Any]:
        return _without_packed(self)


class PackedConv2d(nn.Conv2d):
    """A `torch.nn.Conv2d` with a packed weight, whose outputs are in channels_last; for the rest as `PackedLinear`.

    Example:
        >>> import torch
        >>> layer = torch.nn.Conv2d(3, 4, 3).requires_grad_(False)
        >>> packed, x = packed_layer(layer, "onednn", (2, 3, 8, 8)), torch.randn(2, 3, 8, 8)
        >>> torch.allclose(packed(x), layer(x), atol=1e-5)
        True
    """

    kernel: str
    packed_for: tuple[int, ...]

    def forward(self, input: Tensor, other: Tensor | None = None, activation: str | None = None) -> Tensor:
        """Compute `activation(conv2d(input) + other)`."""
        return _forward(self, super().forward, input, other, activation)

    def __getstate__(self) -> dict[str, Any]:
        return _without_packed(self)


PACKED: Mapping[type[nn.Module], type[nn.Module]] = {nn.Linear: PackedLinear, nn.Conv2d: PackedConv2d}
"""The packed layer of each type of layer."""


def packed_layer(layer: nn.Module, kernel: str, shape: Sequence[int]) -> nn.Module:
    """Make a packed layer that shares the parameters of `layer`.

    Args:
        layer: a `torch.nn.Linear` or `torch.nn.Conv2d`.
        kernel: one of `kernels_for(layer)`.
        shape: of the inputs to expect.
    """
    packed = without_tensors(layer)
    packed.__class__ = PACKED[type(layer)]
    packed.__dict__ |= {"_parameters": dict(layer._parameters), "kernel": kernel, "packed_for": tuple(shape)}
    return packed


def kernels_for(layer: nn.Module, *, rounding: bool = False) -> list[str]:
    """The kernels of this machine that can compute a layer, besides the plain one; none where there is no such.

    Args:
        layer: a `torch.nn.Linear` or `torch.nn.Conv2d`.
        rounding: name those, too, that round the weight.
    """
    weight = layer._parameters.get("weight")
    if weight is None or weight.device.type != "cpu" or not weight.numel() or not _has_padding(layer):
        return []
    kernels = _available()[PACKED[type(layer)]]
    fitting = {
        name: kernel
        for name, kernel in kernels.items()
        if weight.dtype in kernel.dtypes and weight.shape[1] % kernel.multiple == 0
    }
    return [name for name, kernel in fitting.items() if rounding or not kernel.rounds]


def fuses_epilogues(packed: nn.Module) -> bool:
    """Tell whether a packed layer adds and activates in the same step."""
    kernel = _available()[type(packed)].get(str(packed.kernel))
    return kernel is not None and kernel.fuses


def _forward(
    layer: Any,
    plain: Callable[[Tensor], Tensor],
    input: Tensor,
    other: Tensor | None,
    activation: str | None,
) -> Tensor:
    if torch.compiler.is_compiling():
        return _finished(plain(input), other, activation)
    if type(input) is Tensor and _can_run(layer, input, other):
        kernel = _available()[type(layer)].get(layer.kernel)
        if kernel is not None and input.dtype in kernel.dtypes and not input.shape[-1] % kernel.multiple:
            return kernel.run(layer, _packed_weight(layer, kernel), input, other, activation)
    # What happens meanwhile, such as a step of a fused optimizer, may leave no trace in the version of the weight.
    layer.__dict__.pop("_packed", None)
    return _finished(plain(input), other, activation)


def _finished(value: Tensor, other: Tensor | None, activation: str | None) -> Tensor:
    """The value with the epilogue that a kernel has not done."""
    if other is not None:
        value = value + other
    if activation == "relu" and not torch.is_grad_enabled():
        return value.relu_()
    if activation is not None:
        chosen = ACTIVATIONS[activation]
        assert chosen.function is not None
        value = chosen.function(value, **chosen.options)
    return value


def _can_run(layer: nn.Module, input: Tensor, other: Tensor | None) -> bool:
    """Tell whether an operator without derivatives, and which only knows dense tensors, does what the layer does."""
    weight, bias = layer._parameters.get("weight"), layer._parameters.get("bias")
    if type(weight) is not nn.Parameter or type(layer) not in _available():
        return False
    inputs = [each for each in (input, other, bias) if each is not None]
    if torch.is_grad_enabled() and any(each.requires_grad for each in (weight, *inputs)):
        return False
    return (
        weight.device.type == "cpu"
        and weight.layout is torch.strided
        and all(
            each.dtype is weight.dtype
            and each.device.type == "cpu"
            and each.layout is torch.strided
            and not each.is_nested
            for each in inputs
        )
        and (bias is None or bias.shape == weight.shape[:1])
        and (not isinstance(layer, nn.Linear) or input.shape[-1:] == weight.shape[1:])
        and not torch.is_autocast_enabled("cpu")
        and torch._C._get_tracing_state() is None
        and forward_ad._current_level < 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and _get_current_dispatch_mode() is None
    )


def _packed_weight(layer: Any, kernel: _Kernel) -> Any:
    """The packed weight, made anew where the weight is another one, or was written into."""
    weight: Tensor = layer.weight
    version = 0 if weight.is_inference() else weight._version
    held = layer.__dict__.get("_packed")
    seen = (version, weight.data_ptr(), weight.shape, weight.stride(), weight.dtype)
    if held is None or held[1] != seen:
        with torch.no_grad():
            # The old weight is held, too, so that no other one can have its address.
            held = (weight.detach(), seen, kernel.pack(layer, layer.packed_for))
        layer.__dict__["_packed"] = held
    return held[2]


def _without_packed(layer: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(layer).items() if name != "_packed"}


def _has_padding(layer: nn.Module) -> bool:
    """Tell whether the padding of a convolution is one that kernels do themselves."""
    if not isinstance(layer, nn.Conv2d):
        return True
    return layer.padding_mode == "zeros" and (layer.padding != "same" or _padding(layer) is not None)


def _padding(layer: nn.Conv2d) -> list[int] | None:
    """Zeros on both sides of each dimension; None where the sides differ."""
    if layer.padding == "valid":
        return [0, 0]
    if layer.padding == "same":
        total = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        return None if any(each % 2 for each in total) else [each // 2 for each in total]
    return [int(each) for each in layer.padding]


def _pack_onednn_linear(layer: nn.Linear, shape: Sequence[int]) -> Tensor:
    rows = int(torch.Size(shape[:-1]).numel())
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach().contiguous(), rows)
    return packed


def _run_onednn_linear(
    layer: nn.Linear, packed: Tensor, input: Tensor, other: Tensor | None, activation: str | None
) -> Tensor:
    run, bias = torch.ops.mkldnn._linear_pointwise, layer.bias
    if other is None:
        attribute, algorithm = EPILOGUES.get(activation or "", ("none", ""))
        value: Tensor = run(input, packed, bias, attribute, [], algorithm)
        return value if attribute != "none" else _finished(value, None, activation)
    if other.dtype is input.dtype and other.shape == (*input.shape[:-1], layer.out_features):
        return _finished(run.binary(input, other, packed, bias, "add"), None, activation)
    return _finished(run(input, packed, bias, "none", [], ""), other, activation)


def _pack_mkl_linear(layer: nn.Linear, shape: Sequence[int]) -> Tensor:
    rows = int(torch.Size(shape[:-1]).numel())
    packed: Tensor = torch.ops.mkl._mkl_reorder_linear_weight(layer.weight.detach().contiguous(), rows)
    return packed


def _run_mkl_linear(
    layer: nn.Linear, packed: Tensor, input: Tensor, other: Tensor | None, activation: str | None
) -> Tensor:
    shape: Any = layer.packed_for
    rows = int(torch.Size(shape[:-1]).numel())
    value: Tensor = torch.ops.mkl._mkl_linear(input, packed, layer.weight, layer.bias, rows)
    return _finished(value, other, activation)


def _pack_int8_linear(layer: nn.Linear, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The weight in int8, and what to multiply each of its rows with: the largest number becomes 127."""
    weight = layer.weight.detach().float()
    scale = weight.abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny) / 127
    return (weight / scale.unsqueeze(1)).round().to(torch.int8), scale.to(torch.bfloat16)


def _run_int8_linear(
    layer: nn.Linear,
    packed: tuple[Tensor, Tensor],
    input: Tensor,
    other: Tensor | None,
    activation: str | None,
) -> Tensor:
    weight, scale = packed
    rows = input.reshape(-1, layer.in_features).to(torch.bfloat16).contiguous()  # in float32 it is slow
    value = torch._weight_int8pack_mm(rows, weight, scale).to(input.dtype)
    if layer.bias is not None:
        value = value + layer.bias
    return _finished(value.reshape(*input.shape[:-1], layer.out_features), other, activation)


def _pack_onednn_conv(layer: nn.Conv2d, shape: Sequence[int]) -> Tensor:
    weight = layer.weight.detach().contiguous()
    options = (_padding(layer), layer.stride, layer.dilation, layer.groups)
    packed: Tensor = torch.ops.mkldnn._reorder_convolution_weight(weight, *options, list(shape))
    return packed


def _run_onednn_conv(
    layer: nn.Conv2d, packed: Tensor, input: Tensor, other: Tensor | None, activation: str | None
) -> Tensor:
    run, options = (
        torch.ops.mkldnn._convolution_pointwise,
        (_padding(layer), layer.stride, layer.dilation, layer.groups),
    )
    attribute, algorithm = EPILOGUES.get(activation or "", ("none", ""))
    if input.dim() != 4:
        return _finished(nn.Conv2d.forward(layer, input), other, activation)
    if other is None:
        value: Tensor = run(input, packed, layer.bias, *options, attribute, [], algorithm)
        return value if attribute != "none" else _finished(value, None, activation)
    if other.dtype is input.dtype and other.dim() == 4 and other.shape == _output_shape(layer, input):
        value = run.binary(input, other, packed, layer.bias, *options, "add", 1.0, None, [], None)
        return _finished(value, None, activation)
    return _finished(run(input, packed, layer.bias, *options, "none", [], ""), other, activation)


def _output_shape(layer: nn.Conv2d, input: Tensor) -> tuple[int, ...]:
    padding = _padding(layer) or [0, 0]
    facts = zip(input.shape[2:], padding, layer.dilation, layer.kernel_size, layer.stride, strict=True)
    return (
        input.shape[0],
        layer.out_channels,
        *((size + 2 * p - d * (k - 1) - 1) // s + 1 for size, p, d, k, s in facts),
    )


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_KERNELS: Mapping[type[nn.Module], Mapping[str, _Kernel]] = {
    PackedLinear: {
        "onednn": _Kernel(_DTYPES, _pack_onednn_linear, _run_onednn_linear, True),
        "mkl": _Kernel((torch.float32,), _pack_mkl_linear, _run_mkl_linear, False),
        # With a number of features that is no multiple of 32, torch's kernel reads beyond the end.
        "int8": _Kernel(_DTYPES[:2], _pack_int8_linear, _run_int8_linear, False, rounds=True, multiple=64),
    },
    PackedConv2d: {"onednn": _Kernel(_DTYPES, _pack_onednn_conv, _run_onednn_conv, True)},
}


@functools.cache
def _available() -> Mapping[type[nn.Module], Mapping[str, _Kernel]]:
    """The kernels that work in this build of torch on this machine, by the type of the layer, each with its dtypes."""
    samples: dict[type[nn.Module], tuple[nn.Module, tuple[int, ...]]] = {
        nn.Linear: (nn.Linear(64, 16), (4, 64)),
        nn.Conv2d: (nn.Conv2d(4, 4, 3, padding=1), (1, 4, 6, 6)),
    }
    found: dict[type[nn.Module], dict[str, _Kernel]] = {kind: {} for kind in _KERNELS}
    for kind, (layer, shape) in samples.items():
        for name, kernel in _KERNELS[PACKED[kind]].items():
            dtypes = tuple(dtype for dtype in kernel.dtypes if _works(layer, name, kernel, shape, dtype))
            if dtypes:
                found[PACKED[kind]][name] = dataclasses.replace(kernel, dtypes=dtypes)
    return found


def _works(layer: nn.Module, name: str, kernel: _Kernel, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Tell whether a kernel computes what the plain layer does, as far as the dtype tells."""
    value = torch.linspace(-1, 1, torch.Size(shape).numel(), dtype=dtype).reshape(shape)
    with torch.no_grad():
        plain = without_tensors(layer)
        plain._parameters = {
            n: nn.Parameter(torch.linspace(-1, 1, p.numel(), dtype=dtype).reshape(p.shape), False)
            for n, p in layer._parameters.items()
            if p is not None
        }
        packed = packed_layer(plain, name, shape)
        try:
            found = kernel.run(packed, kernel.pack(packed, shape), value, None, "relu")
        except (RuntimeError, AttributeError, NotImplementedError):
            return False  # the operator does not exist, or not for this processor
        wanted = plain(value).relu()
        unit = 2.0**-7 if kernel.rounds else torch.finfo(dtype).eps
        return torch.allclose(found, wanted, rtol=16 * unit, atol=64 * unit)
