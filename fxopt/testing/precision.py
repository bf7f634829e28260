"""The floating dtypes of modules and outputs: a copy in float64, units in the last place, rounded weights."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from fxopt.testing.differences import leaves, same_bits

M = TypeVar("M", bound=nn.Module)


def in_float64(module: M) -> M:
    """A deep copy of `module` with floating parameters and buffers in float64."""
    return copy.deepcopy(module).double()


def epsilon(output: object) -> float:
    dtypes = [v.dtype for _, v in leaves(output) if isinstance(v, Tensor) and v.is_floating_point()]
    return max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)


def floating(module: nn.Module) -> Iterator[Tensor]:
    named = itertools.chain(module.parameters(), module.buffers())
    return (tensor for tensor in named if tensor.is_floating_point())


def narrowest(tensors: Sequence[Tensor]) -> str:
    widest_step = max(tensors, key=lambda t: torch.finfo(t.dtype).eps, default=torch.zeros(()))
    return str(widest_step.dtype).removeprefix("torch.")


def has_new_weights(known: Sequence[Tensor], candidate: nn.Module) -> bool:
    """True where a candidate has a tensor, of less than float64, with a value that no tensor of the reference has."""
    by_shape: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}
    for tensor in known:
        by_shape.setdefault((tensor.shape, tensor.dtype), []).append(tensor)
    return any(
        tensor.dtype != torch.float64
        and not any(
            tensor is each or same_bits(tensor, each)
            for each in by_shape.get((tensor.shape, tensor.dtype), ())
        )
        for tensor in floating(candidate)
    )
