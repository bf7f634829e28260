"""Kernels of operators that torch decomposes on fakes in a way that makes a size static, or cannot run on fakes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxopt.capture.capture_internals import (
    BATCH_NORM,
    DISPATCH_KEYS,
    FLOOR_DIVISION,
    IS_CAUSAL,
    cdist,
    dispatch_cache_of,
    replaced_operator,
    run_for_key_of,
    take_along_dim,
)
from fxopt.capture.patches.replaced import Patches
from fxopt.torch_internals import FakeTensor

aten = torch.ops.aten

_RECURRENT = [replaced_operator(f"{name}.input") for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")]
_COMPOSITE, _AUTOGRAD = DISPATCH_KEYS


def patch_kernels(patch: Patches) -> None:
    """Replace these kernels in the calls of the forward."""
    for operator in filter(None, _RECURRENT):
        step_by_step = operator.py_kernels[_AUTOGRAD]
        _replace(patch, operator, functools.partial(_first_step, step_by_step), step_by_step)
    for operator, kernel in _REPLACED:
        if operator is not None:
            in_parts = functools.partial(run_for_key_of(operator), _COMPOSITE)
            _replace(patch, operator, kernel, in_parts)
    owner, name = IS_CAUSAL
    detect: Any = getattr(owner, name)

    def is_causal(mask: Any, given: bool | None = None, size: int | None = None) -> bool:
        """Tell whether a mask is causal; a layer tests this again when the graph runs, with the same output shape."""
        in_layer = type(mask) is FakeTensor and patch.in_forward() and not patch.active()
        return given is True if in_layer else detect(mask, given, size)

    patch.set(owner, name, is_causal)
    patch.set(*FLOOR_DIVISION, lambda x, y: x // y)  # torch 2.12 tests the sign of a remainder
    _cumulative_average(patch)


def _replace(patch: Patches, operator: Any, kernel: Any, original: Any) -> None:
    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (kernel if patch.in_forward() else original)(*args, **kwargs)

    patch.callback(dispatch_cache_of(operator).clear)  # torch caches the kernels that it has found
    patch.set(operator, "py_kernels", {**operator.py_kernels, **dict.fromkeys(DISPATCH_KEYS, chosen)})
    dispatch_cache_of(operator).clear()


def _cumulative_average(patch: Patches) -> None:
    """Let a batch normalization layer average by any number: its `num_batches_tracked` has no value in a fake."""
    owner, name = BATCH_NORM
    forward: Callable[..., torch.Tensor] = vars(owner)[name]

    def averaged(self: Any, input: torch.Tensor) -> torch.Tensor:
        if self.momentum is not None or patch.active() or not patch.in_forward():
            return forward(self, input)
        self.momentum = 0.0
        try:
            return forward(self, input)
        finally:
            self.momentum = None

    patch.set(owner, name, averaged)


def _first_step(
    step_by_step: Any, input: torch.Tensor, hx: Any, params: Any, *options: Any
) -> tuple[torch.Tensor, ...]:
    """Run only the first step of a recurrent layer: torch would unroll all steps, whose outputs have the same shape."""
    time = 1 if options[-1] else 0  # `batch_first`
    first, *state = step_by_step(input.select(time, 0).unsqueeze(time), hx, params, *options)
    first = first.transpose(0, time)
    steps = first.expand(input.shape[time], *first.shape[1:]).clone(memory_format=torch.contiguous_format)
    given = hx if isinstance(hx, (list, tuple)) else [hx]
    last = (
        made.reshape(each.shape) for made, each in zip(state, given, strict=True)
    )  # torch 2.12 adds a dimension
    return (steps.transpose(0, time), *last)


def _distances(x1: torch.Tensor, x2: torch.Tensor, p: float = 2.0, mode: int | None = None) -> torch.Tensor:
    """`cdist`, whose C++ code does not support dynamic sizes."""
    made: torch.Tensor = cdist(x1, x2, p, mode)
    return made


def _take_along_dim(tensor: torch.Tensor, indices: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    if dim is None:
        tensor, indices, dim = tensor.reshape(-1), indices.reshape(-1), 0
    made: torch.Tensor = take_along_dim(tensor, indices, dim)
    return made


def _kron(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    dims = max(one.dim(), other.dim())
    outer, inner = ((1,) * (dims - each.dim()) + tuple(each.shape) for each in (one, other))
    product = one.reshape([n for size in outer for n in (size, 1)]) * other.reshape(
        [n for size in inner for n in (1, size)]
    )
    return product.reshape([m * n for m, n in zip(outer, inner, strict=True)])


def _multi_dot(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Multiply in order: torch would choose the first product by the sizes."""
    return functools.reduce(torch.matmul, tensors)


def _fill_diagonal(tensor: torch.Tensor, value: Any, wrap: bool = False) -> torch.Tensor:
    return tensor.fill_(value)


def _combinations(tensor: torch.Tensor, r: int = 2, with_replacement: bool = False) -> torch.Tensor:
    """Make the right number of combinations: torch would select them by a mask, with an unknown number of true values."""
    if r == 0:
        return tensor.new_empty(0)
    many = tensor.shape[0] + (r - 1 if with_replacement else 0)
    count = math.prod(many - taken for taken in range(r)) // math.factorial(r)
    return tensor.sum(dtype=tensor.dtype).expand(count, r).clone()


def _tensor_split(tensor: torch.Tensor, sections: int, dim: int = 0) -> list[torch.Tensor]:
    """Split by arithmetic: torch would test which parts are longer by one."""
    parts, start = [], 0
    for number in range(sections):
        length = (tensor.shape[dim] + sections - 1 - number) // sections
        parts.append(tensor.narrow(dim, start, length))
        start = start + length
    return parts


def _max_pool1d(
    tensor: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> torch.Tensor:
    """Pool as torch does with gradients; without gradients, torch returns a contiguous tensor."""
    wide = [1, *stride] if stride else []
    pooled = aten.max_pool2d(
        tensor.unsqueeze(-2), [1, *kernel], wide, [0, *padding], [1, *dilation], ceil_mode
    )
    made: torch.Tensor = pooled.squeeze(-2)
    keeps_indices = (tensor.requires_grad and torch.is_grad_enabled()) or tensor.device.type != "cpu"
    return made if keeps_indices else made.contiguous()


def _ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> torch.Tensor:
    """Skip torch's table, which is as wide as the longest target (a value) and is not returned."""
    losses = log_probs.sum(0).sum(-1)
    return losses if reduction == 0 else losses.sum()


def _fake_quantize(tensor: torch.Tensor, *options: Any) -> torch.Tensor:
    return tensor.clone()


# Kernels of operators that torch has only in C++, which makes sizes static. Only the metadata of results matters.
_KERNELS: dict[str, Callable[..., Any]] = {
    "cdist.default": _distances,
    "take_along_dim.default": _take_along_dim,
    "kron.default": _kron,
    "linalg_multi_dot.default": _multi_dot,
    "fill_diagonal_.default": _fill_diagonal,
    "combinations.default": _combinations,
    "tensor_split.sections": _tensor_split,
    "max_pool1d.default": _max_pool1d,
    "fake_quantize_per_tensor_affine.default": _fake_quantize,
    "fake_quantize_per_tensor_affine.tensor_qparams": _fake_quantize,
    "fake_quantize_per_channel_affine.default": _fake_quantize,
    "ctc_loss.IntList": _ctc_loss,
    "ctc_loss.Tensor": _ctc_loss,
}
_REPLACED = [(replaced_operator(name), kernel) for name, kernel in _KERNELS.items()]
