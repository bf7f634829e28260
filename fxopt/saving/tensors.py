"""Tensors as entries of a safetensors file: each once, with what ties them and how they lie in memory."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fxopt.saving.values import NotData
from fxopt.torch_internals import storage_identity

_STORED = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)


class NoSuchDevice(Exception):
    """A tensor goes to a device that this machine or this torch does not have."""


class TensorTable:
    """The tensors of a module, by key.

    Args:
        names: the name of each tensor that has one, by its id.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names, self._taken = names, {*names.values()}
        self._keys: dict[int, str] = {}
        self.tensors: dict[str, Tensor] = {}

    def key(self, tensor: Tensor) -> str:
        """The key of a tensor, the same whenever it is the same tensor; NotData where it cannot be stored."""
        if id(tensor) not in self._keys:
            _check(tensor)
            unnamed = (f"fxopt.{number}" for number in itertools.count(len(self.tensors)))
            free = (key for key in unnamed if key not in self.tensors and key not in self._taken)
            self._keys[id(tensor)] = key = self._names.get(id(tensor)) or next(free)
            self.tensors[key] = tensor
        return self._keys[id(tensor)]

    def forget(self, count: int) -> None:
        """Forget the tensors but for the first `count`."""
        for key in list(self.tensors)[count:]:
            del self._keys[id(self.tensors.pop(key))]

    def stored(self) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
        """The tensors that go into the file, and a description of each."""
        sharing: dict[Any, list[str]] = {}
        for key, tensor in self.tensors.items():
            storage = tensor.untyped_storage()
            # Two storages may have the same memory, as those of an array of numpy.
            place = (tensor.device, storage.data_ptr()) if storage.data_ptr() else storage_identity(storage)
            sharing.setdefault(place, []).append(key)
        entries: dict[str, Tensor] = {}
        described: dict[str, dict[str, Any]] = {}
        for keys in sharing.values():
            tensors = [self.tensors[key].detach() for key in keys]
            entry, first = _memory(tensors)
            entries[keys[0]] = torch.view_as_real(entry) if entry.is_complex() else entry
            for key, tensor in zip(keys, tensors, strict=True):
                described[key] = _described(self.tensors[key]) | {"entry": keys[0]}
                # The strides of dimensions of size 1 say nothing of the memory, and are kept all the same.
                if len(keys) > 1 or tensor.stride() != tensor.new_empty(tensor.shape, device="meta").stride():
                    offset = int(tensor.storage_offset()) - first
                    described[key] |= {"stride": list(tensor.stride()), "offset": offset}
        return {key: entries[key].cpu() for key in sorted(entries)}, described


def restored(
    entries: Mapping[str, Tensor], described: Mapping[str, Mapping[str, Any]], device: torch.device | None
) -> dict[str, Tensor]:
    """The tensors that were described, of what was in the file; ValueError where the two do not fit.

    Args:
        entries: the tensors of the file.
        described: what `TensorTable.stored` says of each tensor.
        device: where they go; None is where they were.
    """
    moved: dict[tuple[str, str], Tensor] = {}
    made: dict[str, Tensor] = {}
    for key, facts in described.items():
        place = str(device or facts["device"])
        entry = entries[facts["entry"]]
        if (facts["entry"], place) not in moved:
            # A copy, because how memory is aligned may show in the last bits of a product.
            copied = entry.clone()
            try:
                moved[facts["entry"], place] = copied.to(place)
            except (RuntimeError, AssertionError) as error:
                raise NoSuchDevice(f"{key} to {place!r}, which is not to be had here: {error}") from None
        tensor = moved[facts["entry"], place]
        if facts["dtype"].startswith("torch.complex"):
            tensor = torch.view_as_complex(tensor)
        if "stride" in facts:
            tensor = tensor.as_strided(facts["shape"], facts["stride"], facts["offset"])
        if list(tensor.shape) != facts["shape"] or str(tensor.dtype) != facts["dtype"]:
            raise ValueError(
                f"{key} is {tensor.dtype} {list(tensor.shape)}, not {facts['dtype']} {facts['shape']}"
            )
        if facts["parameter"]:
            made[key] = torch.nn.Parameter(tensor, facts["requires_grad"])
        else:
            # What shares an entry shares its memory, and is a tensor of its own all the same.
            made[key] = tensor.detach().requires_grad_(facts["requires_grad"])
    return made


def _check(tensor: Tensor) -> None:
    kind = type(tensor)
    if kind not in (Tensor, torch.nn.Parameter):
        raise NotData(f"a tensor of the class {kind.__module__}.{kind.__qualname__}")
    reason = (
        "has no data, because it is on the meta device"
        if tensor.is_meta
        else f"is laid out as {tensor.layout}"
        if tensor.layout is not torch.strided
        else f"is {tensor.dtype}, which safetensors does not know"
        if tensor.is_quantized or not (tensor.dtype in _STORED or tensor.is_complex())
        else "is a conjugate or negative view: call `.resolve_conj().resolve_neg()`"
        if tensor.is_conj() or tensor.is_neg()
        else ""
    )
    if reason:
        raise NotData(f"a tensor that {reason}")


def _memory(tensors: list[Tensor]) -> tuple[Tensor, int]:
    """The memory that tensors of one storage take, and where in the storage it begins."""
    if len(tensors) == 1 and tensors[0].is_contiguous():
        return tensors[0], int(tensors[0].storage_offset())
    if len({tensor.dtype for tensor in tensors}) > 1:
        raise NotData("tensors of several dtypes that share memory")
    first = min(int(tensor.storage_offset()) for tensor in tensors)
    last = max(int(tensor.storage_offset()) + _extent(tensor) for tensor in tensors)
    largest = max(tensors, key=lambda tensor: tensor.untyped_storage().nbytes())
    # A copy: the memory of others may follow.
    return largest.as_strided((last - first,), (1,), first).clone(), first


def _extent(tensor: Tensor) -> int:
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _described(tensor: Tensor) -> dict[str, Any]:
    return {
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype),
        "device": str(tensor.device),
        "parameter": isinstance(tensor, torch.nn.Parameter),
        "requires_grad": tensor.requires_grad and tensor.is_leaf,
    }
