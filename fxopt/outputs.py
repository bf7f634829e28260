"""Outputs of models: their leaves, their numbers and copies; and a context manager that restores buffers after a call."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fxopt.objects import attributes, is_open, tensors_in, with_order
from fxopt.torch_internals import buffers_of


def leaves(value: object, path: str = "output") -> Iterator[tuple[str, object]]:
    """The leaves of a nested output with their paths: tensors, numbers, strings, `None`.

    Example:
        >>> [path for path, _ in leaves({"logits": 1.0, "states": (2, 3), 1: None})]
        ['output.logits', 'output.states[0]', 'output.states[1]', 'output[1]']
    """
    return ((place, item) for place, item in walked(value, path) if entries(item) is None)


def tensors(value: object) -> list[Tensor]:
    """List the tensors among the leaves."""
    return [item for _, item in leaves(value) if isinstance(item, Tensor)]


def mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Copy nested values deeply, with `function(tensor)` for each tensor."""
    return copied(value, {id(tensor): function(tensor) for tensor in tensors_in(value)})


def copied(value: Any, memo: dict[int, Any]) -> Any:
    """Copy a value deeply, with dict entries in the same order: `copy.deepcopy` puts those of a `ModelOutput` in field order."""
    made = copy.deepcopy(value, memo)
    for (_, old), (_, new) in zip(walked(value, ""), walked(made, ""), strict=False):
        if isinstance(old, dict):
            with_order(new, old)
    return made


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Return True if two tensors have the same shape, dtype and values, bit for bit."""
    if left.shape != right.shape or left.dtype != right.dtype or left.is_meta != right.is_meta:
        return False
    if left.is_meta or not left.numel():
        return True
    return torch.equal(*(bits_of(plain(t)).cpu() for t in (left, right)))


def plain(tensor: Tensor) -> Tensor:
    """Convert a tensor with a layout without strides, or of a dtype that torch hardly supports, to a plain one."""
    if tensor.is_nested:
        return torch.cat([each.flatten() for each in tensor.unbind()])
    if tensor.is_quantized or tensor.layout != torch.strided:
        return tensor.dequantize() if tensor.is_quantized else tensor.to_dense()
    if tensor.is_floating_point() and tensor.element_size() == 1:
        return tensor.float()
    return tensor.to(_SIGNED[tensor.dtype]) if tensor.dtype in _SIGNED else tensor


_SIGNED = {torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.int64}


def bits_of(tensor: Tensor) -> Tensor:
    """The bits of a tensor as integers, in the same shape; complex128 has one more dimension."""
    raw = tensor.detach().resolve_conj().resolve_neg()
    return (torch.view_as_real(raw) if raw.dtype == torch.complex128 else raw).view(BITS[raw.element_size()])


BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def strides_of(tensor: Tensor) -> list[int]:
    """The strides of the dimensions with more than one entry; other strides do not matter."""
    if tensor.layout != torch.strided or tensor.is_nested or not tensor.numel():
        return []
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


@contextlib.contextmanager
def restored(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Restore the buffers of a module, and the values of some tensors, at the end of the block.

    Args:
        module: the module; buffers that the block replaces are put back.
        tensors: the tensors whose values are restored, by name: the buffers of `module`, or those that may be written.

    Returns:
        Each of these tensors, with a copy of it.
    """
    tables = [(table, dict(table)) for table in map(buffers_of, module.modules())]
    before = {name: (tensor, tensor.detach().clone()) for name, tensor in tensors.items()}
    try:
        yield before
    finally:
        for table, held in tables:
            if [*map(id, table.values())] != [*map(id, held.values())]:
                table.clear()
                table.update(held)
        for tensor, values in before.values():
            if not same_bits(values, tensor):
                with torch.no_grad():
                    tensor.copy_(values)


def walked(value: object, path: str, around: tuple[object, ...] = ()) -> Iterator[tuple[str, object]]:
    """Yield a nested value and all its containers and leaves, with their paths; cycles are not followed."""
    yield path, value
    around = (*around, value)
    for key, item in entries(value) or ():
        if not any(item is each for each in around):
            yield from walked(item, (path + key).lstrip("."), around)


def entries(value: object) -> list[tuple[str, object]] | None:
    """List the entries of a container with their path suffixes; `None` for a leaf."""
    if isinstance(value, Tensor):
        return None
    if isinstance(value, Mapping):
        return [(_key(key), item) for key, item in value.items()]
    if isinstance(value, tuple | list | deque):
        return [(f"[{index}]", item) for index, item in enumerate(value)]
    if isinstance(value, type | nn.Module) or (callable(value) and not any(True for _ in tensors_in(value))):
        return None
    if hasattr(value, "__dict__") or is_open(value) or dataclasses.is_dataclass(value):  # such as a cache
        return [(f".{key}", item) for key, item in attributes(value).items()]
    return None


def _key(key: object) -> str:
    return f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]"
