"""Stores tensors as entries of a safetensors file: shared memory once, and the layout of each tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fxopt.objects import qualified_name
from fxopt.saving.allowed import Refused
from fxopt.torch_internals import storage_identity

# The dtypes that safetensors supports, and complex numbers, which are stored as pairs.
_STORED = {
    *(
        "bool",
        "uint8",
        "int8",
        "uint16",
        "int16",
        "uint32",
        "int32",
        "uint64",
        "int64",
        "float16",
        "bfloat16",
    ),
    *("float32", "float64", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128"),
}


class TensorTable:
    """The tensors of a module, by key.

    Args:
        module: the module; the keys of its parameters and buffers are their qualified names.
    """

    def __init__(self, module: nn.Module) -> None:
        named = [*module.named_parameters(), *module.named_buffers()]
        self._names = {id(tensor): name for name, tensor in reversed(named)}
        self._keys: dict[int, str] = {}
        self.tensors: dict[str, Tensor] = {}

    def key(self, tensor: Tensor) -> str:
        """Return the key of a tensor, which is always the same for one tensor; raise Refused if it cannot be stored."""
        if id(tensor) not in self._keys:
            _check(tensor)
            # Names with a colon are free, because modules with such names cannot be saved.
            self._keys[id(tensor)] = key = self._names.get(id(tensor), f"unnamed:{len(self.tensors)}")
            self.tensors[key] = tensor
        return self._keys[id(tensor)]

    def stored(self) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
        """Return the entries of the file, and a description of each tensor."""
        sharing: dict[Any, list[str]] = {}
        for key, tensor in self.tensors.items():
            storage = tensor.untyped_storage()
            # Two storages may share memory, such as those of one numpy array.
            place = tensor.device, storage.data_ptr() or storage_identity(storage)
            sharing.setdefault(place, []).append(key)
        entries: dict[str, Tensor] = {}
        described: dict[str, dict[str, Any]] = {}
        for keys in sharing.values():
            tensors = [self.tensors[key] for key in keys]
            entry, first = _memory([tensor.detach() for tensor in tensors])
            entries[keys[0]] = (torch.view_as_real(entry) if entry.is_complex() else entry).cpu()
            for key, tensor in zip(keys, tensors, strict=True):
                described[key] = {
                    "entry": keys[0],
                    "dtype": str(tensor.dtype),
                    "shape": list(tensor.shape),
                    "stride": list(tensor.stride()),
                    "offset": int(tensor.storage_offset()) - first,
                    "device": str(tensor.device),
                    "parameter": isinstance(tensor, nn.Parameter),
                    "requires_grad": tensor.requires_grad and tensor.is_leaf,
                }
        return dict(sorted(entries.items())), described


def restored(
    entries: Mapping[str, Tensor], described: Mapping[str, Mapping[str, Any]], device: torch.device | None
) -> dict[str, Tensor]:
    """Make the described tensors from the entries of a file; raise Refused if the two do not match.

    Args:
        entries: the entries of the file.
        described: the description of each tensor from `TensorTable.stored`.
        device: the device of the tensors; None for the device that each had.
    """

    moved: dict[str, Tensor] = {}
    made: dict[str, Tensor] = {}
    for key, facts in described.items():
        entry, place = facts["entry"], device or facts["device"]
        try:
            # Clone the entry, because the alignment of memory may change the last bits of a product.
            tensor = moved[entry] = moved[entry] if entry in moved else entries[entry].clone().to(place)
        except (RuntimeError, AssertionError) as error:
            raise Refused(
                f"{key} cannot be moved to '{place}', which is not available here ({error}). Pass another device, such as "
                'device="cpu"'
            ) from None
        if facts["dtype"].startswith("torch.complex"):
            tensor = torch.view_as_complex(tensor)
        if str(tensor.dtype) != facts["dtype"]:
            raise Refused(f"{key} is {tensor.dtype}, not {facts['dtype']}")
        tensor = tensor.as_strided(facts["shape"], facts["stride"], facts["offset"])
        # Tensors of one entry share its memory, but each is a tensor of its own.
        made[key] = nn.Parameter(tensor, False) if facts["parameter"] else tensor.detach()
        made[key].requires_grad_(facts["requires_grad"])
    return made


def _check(tensor: Tensor) -> None:
    in_memory = tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_quantized)
    plain = (
        type(tensor) in (Tensor, nn.Parameter)
        and in_memory
        and str(tensor.dtype).removeprefix("torch.") in _STORED
    )
    if not plain or tensor.is_conj() or tensor.is_neg():
        raise Refused(
            f"a {qualified_name(type(tensor))} of {tensor.dtype}, {tensor.layout}, on {tensor.device}, which is no plain "
            "memory: safetensors stores dense tensors with data, no conjugate or negative views and no quantized ones"
        )


def _memory(tensors: list[Tensor]) -> tuple[Tensor, int]:
    """The memory of tensors with one storage, and its offset: one contiguous tensor, otherwise the whole storage."""
    if len(tensors) == 1 and tensors[0].is_contiguous():
        return tensors[0], int(tensors[0].storage_offset())
    if len({tensor.dtype for tensor in tensors}) > 1:
        raise Refused("tensors of several dtypes share memory, which cannot be saved: clone one of them")
    largest = max(tensors, key=lambda tensor: tensor.untyped_storage().nbytes())
    return largest.as_strided((largest.untyped_storage().nbytes() // largest.element_size(),), (1,), 0), 0
