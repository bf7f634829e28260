"""All of a call's arguments that the metadata of its result can depend on."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


class UncertainError(Exception):
    """Metadata does not tell all about a value."""


def argument_key(value: Any, tensors: list[torch.Tensor]) -> Any:
    """All of an argument that metadata of a result can depend on; its tensors are added to `tensors`."""
    if isinstance(value, torch.Tensor):
        for position, other in enumerate(tensors):
            if other is value:
                return position
        key = metadata_key(value)
        tensors.append(value)
        return key
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return type(value), value.node.expr
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list, torch.Size):
        return type(value), tuple(argument_key(item, tensors) for item in value)
    if type(value) is dict:
        return dict, tuple((key, argument_key(item, tensors)) for key, item in value.items())
    if isinstance(value, slice):
        return slice, argument_key((value.start, value.stop, value.step), tensors)
    raise UncertainError


def metadata_key(tensor: Any) -> tuple[Any, ...]:
    plain = type(tensor) is FakeTensor and tensor.layout == torch.strided and tensor.constant is None
    if not plain or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.is_inference():
        raise UncertainError
    return (
        tuple(map(_expression, tensor.shape)),
        tuple(map(_expression, tensor.stride())),
        _expression(tensor.storage_offset()),
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
    )


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def layer_key(layer: torch.nn.Module) -> tuple[Any, ...]:
    """All of a layer that the metadata of its output can depend on."""
    attributes = tuple(
        (name, argument_key(value, [])) for name, value in layer.__dict__.items() if not name.startswith("_")
    )
    tensors = tuple(
        (name, None if tensor is None else metadata_key(tensor))
        for registry in (layer._parameters, layer._buffers)
        for name, tensor in registry.items()
    )
    return attributes, tensors


def has_hooks(layer: torch.nn.Module) -> bool:
    return bool(
        layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    )
