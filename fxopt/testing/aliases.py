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
    if storage_of(one) != storage_of(other):
        return False
    if one is other or one.data_ptr() == other.data_ptr():
        return True
    places = torch.zeros(one.untyped_storage().nbytes(), dtype=torch.bool)
    _bytes(one, places).fill_(True)
    return bool(_bytes(other, places).any())


def _bytes(tensor: Tensor, places: Tensor) -> Tensor:
    """The places in memory that a tensor has, byte by byte."""
    size = tensor.element_size()
    # An expanded dimension has one place for all its entries, and cannot be written as several.
    dims = [
        (n if stride else 1, stride * size) for n, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ]
    shape, strides = [n for n, _ in dims], [step for _, step in dims]
    return places.as_strided([*shape, size], [*strides, 1], tensor.storage_offset() * size)
