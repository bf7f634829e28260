"""Descriptions of the inputs of a graph, made at capture and compared with the inputs of each call."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch

from fxopt.objects import attributes

Path = tuple[tuple[str, Any], ...]


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """A tensor; `shape` has an int for a static dimension, and an expression in symbols for a dynamic one."""

    name: str
    path: Path
    dtype: torch.dtype
    shape: tuple[int | str, ...]
    fixed_by: tuple[tuple[int, str], ...] = ()  # the lines that made requested dynamic dimensions static
    strict_dtype: bool = False  # the forward reads the dtype
    any_dtype: bool = False  # the forward casts the input to a dtype that it names
    layout: tuple[Any, ...] | None = None  # set if the forward reads strides
    requires_grad: bool | None = None  # set if the forward reads requires_grad
    # Set if the forward compares inputs by identity or memory address: the first input that is this tensor, maybe itself.
    same_as: str | None = None


@dataclasses.dataclass(frozen=True)
class ConstantSpec:
    """A value that is not a tensor; the graph is valid only for this value."""

    name: str
    path: Path
    value: Any


@dataclasses.dataclass(frozen=True)
class NumberSpec:
    """An int that the forward changes from call to call: an expression in symbols, or the only accepted value."""

    name: str
    path: Path
    value: int | str


@dataclasses.dataclass(frozen=True)
class StructureSpec:
    """A container or an object of this type, with these keys."""

    name: str
    path: Path
    type: type
    keys: tuple[Any, ...]


InputSpec = TensorSpec | ConstantSpec | NumberSpec | StructureSpec


def describe(expected: InputSpec) -> str:
    """Return the name of an input with the path inside it, such as `past[0].keys`."""
    return describe_path(expected.name, expected.path)


def describe_path(name: str, path: Path) -> str:
    return name + "".join(f"[{key!r}]" if kind == "item" else f".{key}" for kind, key in path)


def structure_keys(value: Any) -> tuple[Any, ...]:
    """Return the keys of a container: indices of a sequence, keys of a mapping, names of fields or attributes."""
    if isinstance(value, dict):
        return tuple(value)
    if isinstance(value, (tuple, list)):
        return tuple(range(len(value)))
    if dataclasses.is_dataclass(value):
        return tuple(field.name for field in dataclasses.fields(value))
    return tuple(attributes(value))


def dtype_kind(dtype: torch.dtype) -> str:
    """Return the kind of a dtype, which must be the same as at capture: floating, integer, complex or bool."""
    if dtype == torch.bool:
        return "bool"
    return "complex" if dtype.is_complex else "floating" if dtype.is_floating_point else "integer"


def layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Describe how a tensor lies in memory: contiguous or not, order of strides, strides, storage offset.

    If the elements fill their memory, order and sizes determine the strides, which are then None. Otherwise the strides are
    given; the stride of a dimension of size 1 may be any number. A sparse tensor has no strides.
    """
    if tensor.layout != torch.strided:
        return (tensor.layout,)
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))
    steps = [
        math.prod(max(tensor.shape[inner], 1) for inner in order[place + 1 :]) for place in range(len(order))
    ]
    dense = steps == [strides[dim] for dim in order]
    return tensor.is_contiguous(), tuple(order), None if dense else strides, tensor.storage_offset()


def same_value(value: Any, expected: Any) -> bool:
    """Tell whether two constants have the same type and exactly the same value; `==` is also true for 1 and True."""
    if type(value) is not type(expected):
        return False
    if isinstance(value, float):
        return repr(value) == repr(expected)
    parts = same_parts(value, expected, same_value)
    return bool(value == expected) if parts is None else parts


def same_parts(one: Any, other: Any, same: Callable[[Any, Any], bool]) -> bool | None:
    """Tell whether two tuples, lists, dicts or slices have the same parts; None for a value of another type."""
    if isinstance(one, slice):
        return isinstance(other, slice) and all(
            same(getattr(one, part), getattr(other, part)) for part in ("start", "stop", "step")
        )
    if isinstance(one, dict):
        return (
            isinstance(other, dict) and list(one) == list(other) and all(same(one[k], other[k]) for k in one)
        )
    if isinstance(one, (tuple, list)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return None


def same_objects(one: Any, other: Any) -> bool:
    """Tell whether nested tuples, lists, dicts and slices hold the same objects."""
    parts = same_parts(one, other, same_objects)
    return one is other if parts is None else parts
