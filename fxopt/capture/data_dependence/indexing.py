"""Indexing with unbacked numbers: `x[scores.argmax()]`, and `x[rows, columns]` of sequences of such numbers.

torch reads the numbers, which no fake tensor has. Selecting with a number that is a node, and indexing with a tensor of
them, are the same in values and in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

# What makes a call of the forward: a function with its arguments.
MakesCall = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def with_tensors(index: Any, call: MakesCall) -> Any:
    """An index in which sequences of numbers, each a tensor, are one tensor."""
    if not isinstance(index, tuple) or are_numbers(index):
        return index
    return tuple(call(torch.stack, (list(part),), {}) if are_numbers(part) else part for part in index)


def select_by_scalar(value: torch.Tensor, index: Any, call: MakesCall) -> torch.Tensor | None:
    """`value[index]`: first a `select` for each unbacked number, then the rest.

    None where there is no such number, or a list: how many dimensions that takes depends on what is in it.
    """
    parts = index if isinstance(index, tuple) else (index,)
    known = (type(None), type(Ellipsis), int, slice, torch.SymInt, torch.Tensor)
    if not any(map(_is_unknown, parts)) or not all(isinstance(part, known) for part in parts):
        return None
    taken = sum(_dims(part) for part in parts)
    dim, numbers, rest = 0, [], []
    for part in parts:
        if _is_unknown(part):
            numbers.append((dim, part))
        else:
            rest.append(part)
        dim += value.dim() - taken if part is Ellipsis else _dims(part)
    result = value
    for dim, number in reversed(numbers):
        if isinstance(number, torch.Tensor):
            number = call(torch.Tensor.item, (number,), {})
        result = call(torch.Tensor.select, (result, dim, number), {})
    whole = all(part is Ellipsis or (isinstance(part, slice) and part == slice(None)) for part in rest)
    return result if whole else call(torch.Tensor.__getitem__, (result, tuple(rest)), {})


def are_numbers(data: Any) -> bool:
    """Tell whether data is a list of tensors of one number each, known only when the graph runs."""
    return (
        isinstance(data, (list, tuple))
        and bool(data)
        and all(isinstance(item, torch.Tensor) and item.dim() == 0 for item in data)
    )


def _is_unknown(part: Any) -> bool:
    """Tell whether a part of an index is an unbacked integer, as a tensor or a number."""
    if isinstance(part, FakeTensor):
        whole = not part.dtype.is_floating_point and part.dtype not in (torch.bool, torch.uint8)
        return part.dim() == 0 and whole and part.constant is None
    return isinstance(part, torch.SymInt) and bool(free_unbacked_symbols(part))


def _dims(part: Any) -> int:
    """How many dimensions a part of an index takes; an ellipsis takes those that are left."""
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    if isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8):
        return part.dim()
    return 1


def slices_in_turn(index: Any, dims: int) -> list[tuple[slice, ...]]:
    """Indices that each slice one dimension, for one with several slices at unbacked numbers; none for any other index."""
    parts: list[Any] = list(index) if isinstance(index, tuple) else []
    if sum(map(_is_unbacked_slice, parts)) < 2:
        return []
    for place in [place for place, part in enumerate(parts) if part is Ellipsis]:
        parts[place : place + 1] = [slice(None)] * (dims - len(parts) + 1)
    if not all(isinstance(part, slice) for part in parts):
        return []
    given = [any(p is not None for p in (part.start, part.stop, part.step)) for part in parts]
    return [(*(slice(None),) * dim, parts[dim]) for dim, some in enumerate(given) if some]


def _is_unbacked_slice(part: Any) -> bool:
    bounds = (part.start, part.stop) if isinstance(part, slice) else ()
    return any(isinstance(bound, torch.SymInt) and free_unbacked_symbols(bound) for bound in bounds)
