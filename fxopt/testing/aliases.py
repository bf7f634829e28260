"""The memory that a result shares: who writes into the result, writes there as well."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxopt.memory import storage_of
from fxopt.objects import tensors_in
from fxopt.outputs import leaves

MODULE = "what the module keeps"
"""The name of parameters, buffers and earlier results: whatever is there when the next call begins."""


def aliases(result: object, inputs: object, keeps: list[Any]) -> frozenset[tuple[str, str]]:
    """The tensors of a result, each with what it shares memory with.

    Args:
        result: the result of a call.
        inputs: what the call was given.
        keeps: what the module keeps, in nested containers.

    Returns:
        Pairs of paths: a tensor of the result, and an input, a tensor before it, or itself, where entries that differ are one
        place in memory; or `MODULE`. Those that are slices of one tensor, but have no entry in common, are no pair.
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
    """The tensors with values in nested containers, but for those that lie in no memory, or otherwise than by strides."""
    return [
        (place, tensor)
        for place, tensor in leaves(value, path)
        if isinstance(tensor, Tensor) and in_memory(tensor) and tensor.numel()
    ]


def in_memory(tensor: Tensor) -> bool:
    """Tell whether the values of a tensor lie in memory, by strides."""
    return tensor.layout == torch.strided and not (tensor.is_nested or tensor.is_meta)


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors have an entry in common, or lie in one memory as entries of other sizes."""
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
