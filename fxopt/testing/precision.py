"""The floating dtypes of modules and outputs: a copy in float64, units in the last place, rounded weights."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fxopt.errors import GuardError
from fxopt.float64 import Float64, wide_dtype
from fxopt.outputs import leaves, same_bits
from fxopt.torch_internals import converter_of

M = TypeVar("M", bound=nn.Module)


def in_float64(module: M) -> M:
    """Copy a module deeply, with floating parameters and buffers in float64, complex ones in complex128.

    Raises:
        GuardError: if `module` is a graph with dtype constants, which a copy in float64 cannot have.
        TypeError: if `module` is not a `torch.nn.Module`.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"a {type(module).__name__} is no torch.nn.Module: make a function the forward of one"
        )
    copied = copy.deepcopy(module)
    # A buffer of two layers is converted once, and stays one.
    try:
        converter_of(copied)(functools.cache(lambda t: t.to(wide_dtype(t, torch.float64))))
    except GuardError as error:
        raise GuardError(
            f"{type(module).__name__}: the graph contains dtype constants, so a float64 copy is not possible. Capture "
            "`model.double()` as well and pass `float64=(before, after)`."
        ) from error
    forward = copied.forward

    @functools.wraps(forward)
    def in_mode(*args: Any, **kwargs: Any) -> Any:
        with Float64():  # a forward may make tensors, or name a dtype
            return forward(*args, **kwargs)

    copied.forward = in_mode
    return copied


def epsilon(output: object) -> float:
    tensors = (value for _, value in leaves(output) if isinstance(value, Tensor))
    return max((torch.finfo(each.dtype).eps for each in tensors if _rounds(each)), default=0.0)


def floating(module: nn.Module) -> Iterator[Tensor]:
    named = itertools.chain(module.parameters(), module.buffers())
    return filter(_rounds, named)


def _rounds(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def narrowest(tensors: Sequence[Tensor]) -> str:
    widest_step = max(tensors, key=lambda t: torch.finfo(t.dtype).eps, default=torch.zeros(()))
    return str(widest_step.dtype).removeprefix("torch.")


def has_new_weights(known: Sequence[Tensor], candidate: nn.Module) -> bool:
    """True where a candidate has a tensor, of less than float64, with a value that no tensor of the reference has."""
    by_shape: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}
    for tensor in known:
        by_shape.setdefault((tensor.shape, tensor.dtype), []).append(tensor)
    return any(
        tensor.dtype not in (torch.float64, torch.complex128)
        and not any(
            tensor is each or same_bits(tensor, each)
            for each in by_shape.get((tensor.shape, tensor.dtype), ())
        )
        for tensor in floating(candidate)
    )
