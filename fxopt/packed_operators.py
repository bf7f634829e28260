"""Torch's private operators that compute with packed weights, probed on this machine; only this file uses them."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fxopt import torch_internals as internals
from fxopt.activations import ACTIVATIONS
from fxopt.memory_formats import with_strides_of_channels_last
from fxopt.submodules import with_parameters

EPILOGUES: Mapping[str, tuple[str, str]] = {
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "hardswish": ("hardswish", ""),
    "sigmoid": ("sigmoid", ""),
    "silu": ("swish", ""),
    "tanh": ("tanh", ""),
}
"""The activations, by their names in `ACTIVATIONS`, that oneDNN computes before it writes a product to memory.

oneDNN's ReLU and hard sigmoid turn NaN into 0, which would hide a fault: ReLU is computed in place instead.
"""


IN_PLACE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu": Tensor.relu_,
    "relu6": functools.partial(functional.hardtanh_, min_val=0.0, max_val=6.0),
}
"""The activations that are computed in place, in the memory of a product or sum."""

ACTIVATED = (*EPILOGUES, *IN_PLACE)
"""The activations that a packed layer applies without allocating memory."""


Run = Callable[[Tensor | None, Tensor, Tensor | None, str | None, bool], Tensor]
"""Computes a layer from its bias, its input, a tensor to add, the name of an activation, and whether the sum may overwrite
the added tensor."""


@dataclasses.dataclass(frozen=True)
class Packed:
    """A packed weight.

    Attributes:
        run: function that computes a layer with the packed weight.
        nbytes: the size of the packed weight in bytes.
        unpack: function that returns the original weight, bit for bit; None if it cannot be recovered.
    """

    run: Run
    nbytes: int
    unpack: Callable[[], Tensor] | None = None


@dataclasses.dataclass(frozen=True)
class Kernel:
    """How a kernel packs a weight, and computes with it.

    Attributes:
        dtypes: the supported dtypes.
        pack: function that packs the weight of a layer for an input shape.
        rounds: whether it rounds the weight to int8; kernels that do not round also add and activate.
        multiple: a number by which the number of features in a row must be divisible.
        alone: whether the packed weight suffices, without the plain weight, and is not larger.
        any_shape: whether a weight packed for one shape serves all shapes, so that graphs for prefill and decoding share it.
        pointwise: whether it supports only convolutions that compute each pixel from one input pixel.
    """

    dtypes: tuple[torch.dtype, ...]
    pack: Callable[[Any, Sequence[int]], Packed]
    rounds: bool = False
    multiple: int = 1
    alone: bool = True
    any_shape: bool = False
    pointwise: bool = False


def available(kind: type[nn.Module]) -> Mapping[str, Kernel]:
    """The kernels for a type of layer that work in this build of torch on this machine, each with its dtypes."""
    return _available().get(kind, {})


def apply_epilogue(value: Tensor, other: Tensor | None, activation: str | None) -> Tensor:
    """Add `other` to a layer's output and apply the activation, if the kernel has not done so; None skips a step."""
    if other is not None:
        value = value + other
    if activation is not None and activation in IN_PLACE and not torch.is_grad_enabled():
        return IN_PLACE[activation](value)
    if activation is not None:
        value = ACTIVATIONS[activation](value)
    return value


def padding_of(layer: nn.Conv1d | nn.Conv2d) -> list[int] | None:
    """The number of zeros on each side, for each dimension; None if the sides differ."""
    if layer.padding == "valid":
        return [0] * len(layer.kernel_size)
    if layer.padding == "same":
        total = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        return None if any(each % 2 for each in total) else [each // 2 for each in total]
    return [int(each) for each in layer.padding]


def pads_zeros(layer: nn.Module) -> bool:
    """Tell whether a layer pads with zeros, and opposite sides alike; True if it does not pad."""
    if not isinstance(layer, nn.Conv1d | nn.Conv2d):
        return True
    return layer.padding_mode == "zeros" and padding_of(layer) is not None


def _alone(product: Callable[[Tensor | None, Tensor], Tensor]) -> Run:
    """Make the function of a kernel that only multiplies: it adds and activates in the memory of its new product."""

    def run(
        bias: Tensor | None, input: Tensor, other: Tensor | None, activation: str | None, overwrites: bool
    ) -> Tensor:
        value = product(bias, input)
        if other is not None and (other.dtype, other.shape) == (value.dtype, value.shape):
            value, other = value.add_(other), None
        return apply_epilogue(value, other, activation)

    return run


def _fusing(
    product: Callable[..., Tensor],
    total: Callable[..., Tensor],
    output_shape: Callable[[Tensor], tuple[int, ...]],
) -> Run:
    """Make the function of a kernel of oneDNN, which adds or activates before it writes a product to memory.

    Args:
        product: function of the bias, the input, and the two names of an activation in `EPILOGUES`.
        total: function of the bias, the input, a tensor to add, and whether the sum may overwrite that tensor.
        output_shape: function of the input, for the shape that the added tensor must have.
    """

    def run(
        bias: Tensor | None, input: Tensor, other: Tensor | None, activation: str | None, overwrites: bool
    ) -> Tensor:
        fused = EPILOGUES.get(activation or "")
        if other is None and fused:
            return product(bias, input, *fused)
        if other is not None and other.dtype is input.dtype and other.shape == output_shape(input):
            return apply_epilogue(total(bias, input, other, overwrites), None, activation)
        return apply_epilogue(product(bias, input, "none", ""), other, activation)

    return run


def _onednn_linear(layer: nn.Linear, shape: Sequence[int]) -> Packed:
    # For a single row, oneDNN chooses another layout, which is slower for any number of rows, even for one.
    rows = max(16, int(torch.Size(shape[:-1]).numel()))
    multiply, multiply_and_add = internals.linear_pointwise, internals.linear_add
    packed = internals.reorder_linear_weight(layer.weight.detach().contiguous(), rows)
    features = layer.out_features

    def product(bias: Tensor | None, input: Tensor, attribute: str, algorithm: str) -> Tensor:
        value: Tensor = multiply(input, packed, bias, attribute, [], algorithm)
        return value

    def total(bias: Tensor | None, input: Tensor, other: Tensor, overwrites: bool) -> Tensor:
        value: Tensor = multiply_and_add(input, other, packed, bias, "add")
        return value

    run = _fusing(product, total, lambda input: (*input.shape[:-1], features))
    return Packed(run, internals.packed_nbytes(packed), packed.to_dense)


def _mkl_linear(layer: nn.Linear, shape: Sequence[int]) -> Packed:
    rows = int(torch.Size(shape[:-1]).numel())
    multiply, weight = internals.mkl_linear, layer.weight.detach()
    packed = internals.mkl_reorder_linear_weight(weight.contiguous(), rows)

    def product(bias: Tensor | None, input: Tensor) -> Tensor:
        value: Tensor = multiply(input, packed, weight, None, rows)
        return value if bias is None else value.add_(bias)  # MKL would copy the bias into each row first

    # Torch reports the memory that MKL reserves; MKL fills about as much as the size of the weight.
    return Packed(_alone(product), weight.nbytes)


def _rounded(layer: nn.Linear) -> tuple[Tensor, Tensor]:
    """The weight in int8, and the scale of each row: the largest number of a row becomes 127."""
    weight = layer.weight.detach().float()
    scale = weight.abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny) / 127
    return (weight / scale.unsqueeze(1)).round().to(torch.int8), scale


def _int8_linear(layer: nn.Linear, shape: Sequence[int]) -> Packed:
    """Products of int8: each call rounds the rows of its input, too."""
    weight, scale = _rounded(layer)
    features, (outputs, inputs) = layer.out_features, weight.shape
    rows = int(torch.Size(shape[:-1]).numel())
    packed = internals.quantized_linear_weight(weight, [rows, inputs])
    one, zero = torch.ones((), device="cpu"), torch.zeros((), dtype=torch.int32, device="cpu")
    zeros = torch.zeros(outputs, dtype=torch.int32, device="cpu")
    for_one_row = _packed_for_one_row(weight, scale) if rows == 1 else None

    def product(bias: Tensor | None, input: Tensor) -> Tensor:
        fits = input.dim() > 1 and input.numel() == inputs and input.dtype is torch.float32
        # The operator for one row turns NaN into numbers.
        if for_one_row is not None and fits and math.isfinite(input.sum()):
            row: Tensor = internals.dynamic_linear(input, for_one_row, False)
            return row if bias is None else row.add_(bias)
        values = input.reshape(-1, inputs).float()
        # A row of zeros becomes NaN here, then some integer, and 0 again after the multiplication by its scale.
        sizes = values.abs().amax(1, keepdim=True).mul_(1 / 127)
        small = values.div(sizes).round_().to(torch.int8)
        value: Tensor = internals.quantized_linear(
            *(small, one, zero, packed, scale, zeros, None, 1.0, 0, torch.float32, "none", [], "")
        )
        value = value.mul_(sizes) if bias is None else torch.addcmul(bias.float(), value, sizes, out=value)
        return value.to(input.dtype).reshape(*input.shape[:-1], features)

    nbytes = internals.packed_nbytes(packed) + scale.nbytes + weight.nbytes * (for_one_row is not None)
    return Packed(_alone(product), nbytes)


def _packed_for_one_row(weight: Tensor, scale: Tensor) -> Any:
    """Pack the weight for the operator that is faster for one row; that operator has one scale for all rows of an input."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated by torch; without them, the other operator is used
        zeros = torch.zeros(len(weight), dtype=torch.long, device="cpu")
        try:
            quantized = internals.quantized_by_rows(weight, scale.double(), zeros, 0)
            return internals.dynamic_linear_weight(quantized, None)
        except (RuntimeError, NotImplementedError):
            return None


def _int8_weight_linear(layer: nn.Linear, shape: Sequence[int]) -> Packed:
    """Pack the weight in int8 for bfloat16 inputs, for processors without instructions for products of int8."""
    packed, scale = _rounded(layer)
    scale, features = scale.to(torch.bfloat16), packed.shape

    def product(bias: Tensor | None, input: Tensor) -> Tensor:
        rows = input.reshape(-1, features[1]).to(torch.bfloat16).contiguous()  # in float32 it is slow
        value: Tensor = internals.int8_linear(rows, packed, scale).to(input.dtype)
        value = value.reshape(*input.shape[:-1], features[0])
        return value if bias is None else value.add_(bias)

    return Packed(_alone(product), packed.nbytes + scale.nbytes)


def _onednn_conv(layer: nn.Conv2d, shape: Sequence[int]) -> Packed:
    multiply = internals.convolution_pointwise
    multiply_and_add, multiply_and_add_into = internals.convolution_add, internals.convolution_add_into
    padding = padding_of(layer) or [0, 0]
    options = (padding, layer.stride, layer.dilation, layer.groups)
    weight = layer.weight.detach().contiguous()
    packed = internals.reorder_convolution_weight(weight, *options, list(shape))
    features = layer.out_channels
    steps = list(zip(padding, layer.dilation, layer.kernel_size, layer.stride, strict=True))

    def product(bias: Tensor | None, input: Tensor, attribute: str, algorithm: str) -> Tensor:
        image = with_strides_of_channels_last(input)
        value: Tensor = multiply(image, packed, bias, *options, attribute, [], algorithm)
        return value

    def total(bias: Tensor | None, input: Tensor, other: Tensor, overwrites: bool) -> Tensor:
        image = with_strides_of_channels_last(input)
        inputs = (other, image) if overwrites else (image, other)
        add = multiply_and_add_into if overwrites else multiply_and_add
        value: Tensor = add(*inputs, packed, bias, *options, "add", 1.0, None, [], None)
        return value

    def output_shape(input: Tensor) -> tuple[int, ...]:
        sizes = zip(input.shape[2:], steps, strict=True)
        return len(input), features, *((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, (p, d, k, s) in sizes)

    run = _fusing(product, total, output_shape)
    return Packed(run, internals.packed_nbytes(packed), packed.to_dense)


def is_pointwise(layer: nn.Module) -> bool:
    """Tell whether a convolution computes each pixel from the input pixel at the same place."""
    return (
        isinstance(layer, nn.Conv1d | nn.Conv2d)
        and {*layer.kernel_size, *layer.stride, layer.groups} == {1}
        and not any(padding_of(layer) or [1])
    )


def _matmul_conv(layer: nn.Conv2d, shape: Sequence[int]) -> Packed:
    """Compute a 1 x 1 convolution as a matrix product of all pixels, whose call has less overhead."""
    weight, shape_of_weight = layer.weight.detach().flatten(1).t().contiguous(), layer.weight.shape
    features = weight.shape[1]

    def product(bias: Tensor | None, input: Tensor) -> Tensor:
        batch, channels, height, width = input.shape
        pixels = torch.mm(input.permute(0, 2, 3, 1).reshape(-1, channels), weight)
        if bias is not None:
            pixels.add_(bias)
        return pixels.view(batch, height, width, features).permute(0, 3, 1, 2)

    def unpack() -> Tensor:
        return weight.t().clone(memory_format=torch.contiguous_format).view(shape_of_weight)

    return Packed(_alone(product), weight.nbytes, unpack)


_OF_ONE_ROW = {"kernel_size": 1, "stride": 1, "dilation": 1}


def _of_one_row(pack: Callable[[Any, Sequence[int]], Packed]) -> Callable[[nn.Conv1d, Sequence[int]], Packed]:
    """Make a function that packs a convolution of sequences as one of images with one row."""

    def of_sequences(layer: nn.Conv1d, shape: Sequence[int]) -> Packed:
        options = {name: (one, *getattr(layer, name)) for name, one in _OF_ONE_ROW.items()}
        image = nn.utils.skip_init(
            nn.Conv2d, layer.in_channels, layer.out_channels, groups=layer.groups, **options
        )
        padding = padding_of(layer)
        assert padding is not None
        image.padding, image.weight = (0, *padding), nn.Parameter(layer.weight.unsqueeze(2), False)
        batch, channels, length = shape
        made = pack(image, (batch, channels, 1, length))

        def compute(
            bias: Tensor | None, input: Tensor, other: Tensor | None, activation: str | None, overwrites: bool
        ) -> Tensor:
            if other is not None and other.dim():
                other = other.unsqueeze(-2)
            return made.run(bias, input.unsqueeze(2), other, activation, overwrites).squeeze(-2)

        unpack = made.unpack
        return dataclasses.replace(made, run=compute, unpack=unpack and (lambda: unpack().squeeze(2)))

    return of_sequences


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_KERNELS: Mapping[type[nn.Module], Mapping[str, Kernel]] = {
    nn.Linear: {
        "onednn": Kernel(_DTYPES, _onednn_linear, any_shape=True),
        # It needs the plain weight, too, for inputs of other sizes.
        "mkl": Kernel((torch.float32,), _mkl_linear, alone=False),
        "int8": Kernel(_DTYPES[:2], _int8_linear, rounds=True),
        # If the number of features is not a multiple of 32, torch's kernel reads beyond the end.
        "int8_weight": Kernel(_DTYPES[:2], _int8_weight_linear, rounds=True, multiple=64),
    },
    nn.Conv2d: {
        "onednn": Kernel(_DTYPES, _onednn_conv),
        "matmul": Kernel(_DTYPES[:1], _matmul_conv, pointwise=True),
    },
    nn.Conv1d: {
        "onednn": Kernel(_DTYPES, _of_one_row(_onednn_conv)),
        "matmul": Kernel(_DTYPES[:1], _of_one_row(_matmul_conv), pointwise=True),
    },
}


_REFERENCE = 30
"""A kernel that takes this many times as long as torch's own is a reference implementation."""


@functools.cache
def _available() -> Mapping[type[nn.Module], Mapping[str, Kernel]]:
    found: dict[type[nn.Module], dict[str, Kernel]] = {}
    for kind, kernels in _KERNELS.items():
        probed = {name: _probed(kind, kernel) for name, kernel in kernels.items()}
        found[kind] = {name: kernel for name, kernel in probed.items() if kernel.dtypes}
        if kind is not nn.Linear and "onednn" not in found[kind]:
            found[kind].clear()  # other kernels compute in the layout of oneDNN
    linear = found[nn.Linear]
    if "int8" in linear:  # faster than `int8_weight` for all sizes, unless it is a reference implementation
        linear.pop("int8" if _is_reference(linear["int8"]) else "int8_weight", None)
    return found


def _probed(kind: type[nn.Module], kernel: Kernel) -> Kernel:
    """Leave out the dtypes in which a kernel does not work on this machine."""
    options = (64, 16) if kind is nn.Linear else (4, 4, 1 if kernel.pointwise else 3)
    layer: nn.Module = nn.utils.skip_init(kind, *options)  # initialization would draw random numbers
    shape = {nn.Linear: (4, 64), nn.Conv1d: (1, 4, 6), nn.Conv2d: (1, 4, 6, 6)}[kind]
    dtypes = tuple(dtype for dtype in kernel.dtypes if _works(layer, kernel, shape, dtype))
    return dataclasses.replace(kernel, dtypes=dtypes)


def _is_reference(kernel: Kernel) -> bool:
    """Tell whether oneDNN has only its reference code for this processor, which takes a thousand times as long."""
    layer, value = nn.utils.skip_init(nn.Linear, 256, 256), torch.zeros(64, 256, dtype=kernel.dtypes[0])
    layer.to(kernel.dtypes[0])
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    run, seconds = kernel.pack(layer, value.shape).run, list[float]()
    with torch.no_grad():
        for call in (layer, lambda value: run(layer.bias, value, None, None, False)):
            for _ in range(3):
                start = time.perf_counter()
                call(value)
                seconds.append(time.perf_counter() - start)
    return min(seconds[3:]) > _REFERENCE * min(seconds[:3])


def _works(layer: nn.Module, kernel: Kernel, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Tell whether a kernel computes the same as the plain layer, within the precision of the dtype."""
    value = torch.linspace(-1, 1, torch.Size(shape).numel(), dtype=dtype).reshape(shape)
    with torch.no_grad():
        parameters = {
            n: nn.Parameter(torch.linspace(-1, 1, p.numel(), dtype=dtype).reshape(p.shape), False)
            for n, p in layer.named_parameters()
        }
        plain = with_parameters(layer, parameters)
        try:
            run, bias = kernel.pack(plain, shape).run, plain.get_parameter("bias")
            found = run(bias, value, None, "relu", False)
            for overwrites in (False, True):
                run(bias, value, found.clone(), None, overwrites)
        except (RuntimeError, AttributeError, NotImplementedError):
            return False  # the operator does not exist, or not for this processor
        wanted = plain(value).relu()
        unit = 2.0**-7 if kernel.rounds else torch.finfo(dtype).eps
        return torch.allclose(found, wanted, rtol=16 * unit, atol=64 * unit)
