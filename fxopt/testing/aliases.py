"""The memory that the result of a call shares with other tensors, where a write into the result is visible, too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxopt.memory import storage_of
from fxopt.objects import tensors_in
from fxopt.outputs import leaves

MODULE = "what the module keeps"
"""The name for parameters, buffers and earlier results: all tensors that exist before the call."""


def aliases(result: object, inputs: object, keeps: list[Any]) -> frozenset[tuple[str, str]]:
    """Find the tensors of a result that share memory.

    Args:
        result: the result of a call.
        inputs: the inputs of the call.
        keeps: the tensors that the module keeps, in nested containers.

    Returns:
        Pairs of a tensor of the result, and an input, an earlier tensor of the result, or `MODULE` that shares its memory; all
        by path. "itself" stands for a tensor whose own entries overlap. Slices without a common entry are not a pair.
    """
    kept = {storage_of(tensor) for each in keeps for tensor in tensors_in(each) if in_memory(tensor)}
    known = _tensors(inputs, "input")
    found = set[tuple[str, str]]()
    for place, tensor in _tensors(result, "output"):
        if storage_of(tensor) in kept:
            found.add((place, MODULE))
        if any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            found.add((place, "itself"))
        found.update((place, other) for other, each in known if _overlap(tensor, each))
        known.append((place, tensor))
    return frozenset(found)


def _tensors(value: object, path: str) -> list[tuple[str, Tensor]]:
    """The tensors in nested containers, without empty ones and those that are not strided in memory."""
    return [
        (place, tensor)
        for place, tensor in leaves(value, path)
        if isinstance(tensor, Tensor) and in_memory(tensor) and tensor.numel()
    ]


def in_memory(tensor: Tensor) -> bool:
    """Tell whether a tensor has strided memory."""
    return tensor.layout == torch.strided and not (tensor.is_nested or tensor.is_meta)


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors have a common entry, or share memory with different element sizes."""
    size = one.element_size()
    if storage_of(one) != storage_of(other):
        return False
    if size != other.element_size() or one.data_ptr() == other.data_ptr():
        return True
    entries = torch.arange(one.untyped_storage().nbytes() // size)
    places = [entries.as_strided(each.shape, each.stride(), each.storage_offset()) for each in (one, other)]
    taken = torch.zeros(len(entries), dtype=torch.bool)
    taken[places[0].flatten()] = True
    return bool(taken[places[1]].any())
