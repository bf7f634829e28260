"""Descriptions of the inputs of a graph, made at capture and compared with what it is given."""

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
    """A tensor; `shape` holds an int for a fixed dimension and an expression in symbols for a free one."""

    name: str
    path: Path
    dtype: torch.dtype
    shape: tuple[int | str, ...]
    fixed_by: tuple[tuple[int, str], ...] = ()  # the line that fixed a dimension that was left free
    strict_dtype: bool = False  # the forward read it
    any_dtype: bool = False  # it casts the input to one that it names
    layout: tuple[Any, ...] | None = None  # where it read strides
    requires_grad: bool | None = None  # where it asked for gradients
    # Where it compared inputs by identity or memory address, the first one that is the same: itself, if none is.
    same_as: str | None = None


@dataclasses.dataclass(frozen=True)
class ConstantSpec:
    """A value that is no tensor; the graph holds for this one alone."""

    name: str
    path: Path
    value: Any


@dataclasses.dataclass(frozen=True)
class NumberSpec:
    """An int that the forward changes from call to call: an expression in symbols, or the one value that it fixed."""

    name: str
    path: Path
    value: int | str


@dataclasses.dataclass(frozen=True)
class StructureSpec:
    """A container or an object, of this type with these keys."""

    name: str
    path: Path
    type: type
    keys: tuple[Any, ...]


InputSpec = TensorSpec | ConstantSpec | NumberSpec | StructureSpec


def describe(expected: InputSpec) -> str:
    """`past[0].keys`: the name of an input with the path inside it."""
    return describe_path(expected.name, expected.path)


def describe_path(name: str, path: Path) -> str:
    return name + "".join(f"[{key!r}]" if kind == "item" else f".{key}" for kind, key in path)


def structure_keys(value: Any) -> tuple[Any, ...]:
    """The keys of a container: indices of a sequence, keys of a mapping, names of fields or attributes."""
    if isinstance(value, dict):
        return tuple(value)
    if isinstance(value, (tuple, list)):
        return tuple(range(len(value)))
    if dataclasses.is_dataclass(value):
        return tuple(field.name for field in dataclasses.fields(value))
    return tuple(attributes(value))


def dtype_kind(dtype: torch.dtype) -> str:
    """The kind that a dtype must share with the one of the capture: floating, integer, complex or bool."""
    if dtype == torch.bool:
        return "bool"
    return "complex" if dtype.is_complex else "floating" if dtype.is_floating_point else "integer"


def layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    """How a tensor lies in memory: contiguous or not, the order of its strides, which with the sizes gives them all
    where its elements fill their memory, and where it starts. A sparse tensor has no strides.

    The stride of a dimension of size 1 may be any number, too.
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
    """Tell whether two constants are the same to the last bit and type; unlike `==`, which holds for 1 and True."""
    if type(value) is not type(expected):
        return False
    if isinstance(value, float):
        return repr(value) == repr(expected)
    parts = same_parts(value, expected, same_value)
    return bool(value == expected) if parts is None else parts


def same_parts(one: Any, other: Any, same: Callable[[Any, Any], bool]) -> bool | None:
    """Tell whether two tuples, lists, dicts or slices hold the same; None for what is none of these."""
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
