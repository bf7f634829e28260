"""The structure of the inputs of a call, its sizes, and which of these differ from call to call."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from fxopt.objects import entries, is_open, tensors_in
from fxopt.optimizing.inputs import Inputs

Shapes = tuple[tuple[int, ...], ...]
"""The shapes of the tensors among the inputs, in order."""


Signature = tuple[Any, ...]
"""The arguments of a call in which tensors stand by their dtypes, devices and shapes."""


def plain_signature(inputs: Inputs) -> Signature | None:
    """Describe a call by what decides on a graph for it, fast; None where something else than tensors and constants is given."""
    found: list[Any] = []
    for name, value in (*enumerate(inputs.args), *inputs.kwargs.items()):
        if type(value) is Tensor:
            found.append((name, value.dtype, value.device, value.shape, value.requires_grad))
        elif value is None or type(value) in (bool, int, float, str):
            found.append((name, type(value), value))
        else:
            return None
    return tuple(found)


def structure_of(value: Any, *, inside: bool = False) -> Any:
    """Describe an input by what calls must share to share graphs with free sizes: containers, kinds of tensors, constants.

    Args:
        value: an input, or a dict of all inputs.
        inside: whether it is in an object, where numbers may count the calls.
    """
    if isinstance(value, Tensor):
        return value.dtype, value.device, value.dim()
    if _has_entries(value):
        within = inside or is_open(value)
        parts = entries(value) if not isinstance(value, tuple) else dict(enumerate(value))
        return type(value), tuple((key, structure_of(part, inside=within)) for key, part in parts.items())
    return type(value) if inside else (type(value), repr(value))


def shapes_of(value: Any) -> Shapes:
    """The shapes of the tensors in `value`, in order."""
    return tuple(tuple(int(size) for size in tensor.shape) for tensor in tensors_in(value))


def differing(shapes: Shapes, others: Shapes) -> set[tuple[int, int]]:
    """The dimensions, by the number of the tensor, in which two calls differ."""
    return {
        (number, dim)
        for number, (shape, other) in enumerate(zip(shapes, others, strict=True))
        for dim, (size, its) in enumerate(zip(shape, other, strict=True))
        if size != its
    }


def dynamic_shapes(inputs: Mapping[str, Any], free: set[tuple[int, int]]) -> dict[str, Any]:
    """The entry of each input for `fxopt.trace` that leaves these dimensions free."""
    numbers = itertools.count()

    def spec(value: Any) -> Any:
        if isinstance(value, Tensor):
            number = next(numbers)
            return {dim: Dim.AUTO for dim in range(value.dim()) if (number, dim) in free}
        if isinstance(value, tuple | list):
            return [spec(part) for part in value]
        if _has_entries(value):
            return {key: spec(part) for key, part in entries(value).items()}
        return None

    return {name: spec(value) for name, value in inputs.items()}


def text_of(inputs: Mapping[str, Any], free: set[tuple[int, int]]) -> str:
    """The inputs with their shapes, `?` where a size is free, for a report."""
    numbers = itertools.count()

    def text(value: Any) -> str:
        if isinstance(value, Tensor):
            number = next(numbers)
            sizes = ["?" if (number, dim) in free else str(size) for dim, size in enumerate(value.shape)]
            return " x ".join(sizes) or "a number"
        if _has_entries(value):
            shapes = [text(part) for part in tensors_in(value)]
            return f"{type(value).__name__}({', '.join(shapes[:1] + ['...'][: len(shapes) - 1])})"
        return repr(value) if value is None or isinstance(value, int | float | str) else type(value).__name__

    return ", ".join(f"{name}: {text(value)}" for name, value in inputs.items())


def has_own_kernels(value: Any) -> bool:
    """Tell whether a value is a tensor on which operators do what its class or layout says, which packed kernels do not know."""
    return isinstance(value, Tensor) and (
        type(value) not in (Tensor, nn.Parameter) or value.layout is not torch.strided or value.is_nested
    )


def _has_entries(value: Any) -> bool:
    return isinstance(value, tuple | list | dict) or is_open(value)
