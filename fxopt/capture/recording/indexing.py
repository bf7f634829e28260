"""Indexing, squeezing and unbinding with unknown numbers or sizes.

For `x[scores.argmax()]`, and `x[rows, columns]` with sequences of such numbers, torch reads the numbers, which no fake has.
For `x[n - 1]`, torch makes `n` static. Selecting with a number that is a node, and indexing with a tensor of numbers, give
the same values and memory.

Sizes of 0 and 1 are not specialized: torch treats any size that is not known to be 1 as different from 1, without a guard.
`squeeze` then keeps dimensions that eager mode would remove, and so does `unbind` of a product of sizes, which squeezes its
parts. Here each such size becomes a guard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import sympy
import torch

from fxopt.capture.fakes.dynamic_shapes import is_unbacked
from fxopt.torch_internals import FakeTensor

# Makes a call of the forward, from a function and its arguments, and writes its node.
MakesCall = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def with_tensors(index: Any, call: MakesCall) -> Any:
    """Replace each sequence of single-number tensors in an index by one tensor."""
    if not isinstance(index, tuple) or are_numbers(index):
        return index
    return tuple(call(torch.stack, (list(part),), {}) if are_numbers(part) else part for part in index)


def select_by_scalar(call: MakesCall, value: torch.Tensor, index: Any) -> Any:
    """`value[index]`: first a `select` for each symbolic number or number in a tensor, then the rest."""
    parts = index if isinstance(index, tuple) else (index,)
    if not any(map(_is_unknown, parts)) or not _are_counted(parts):
        return NotImplemented
    value, rest = _selected(call, value, parts)
    whole = all(part is Ellipsis or (isinstance(part, slice) and part == slice(None)) for part in rest)
    return value if whole else call(torch.Tensor.__getitem__, (value, rest), {})


def set_by_scalar(call: MakesCall, value: torch.Tensor, index: Any, given: Any) -> Any:
    """Rewrite `value[index] = given` as `selected[rest] = given` if a number or the end of a slice is symbolic."""
    parts = index if isinstance(index, tuple) else (index,)
    numbers = any(isinstance(part, torch.SymInt) for part in parts)
    slices = any(map(_is_unbacked_slice, parts)) and not any(isinstance(part, torch.Tensor) for part in parts)
    if not (numbers or slices) or not _are_counted(parts):
        return NotImplemented
    if numbers:
        value, parts = _selected(call, value, parts)
    if slices:
        value, parts = call(torch.Tensor.__getitem__, (value, parts), {}), ()
    return call(torch.Tensor.__setitem__, (value, parts or ..., given), {})


def _are_counted(parts: tuple[Any, ...]) -> bool:
    """Tell whether the number of indexed dimensions is known: for a list, it depends on the contents."""
    known = (type(None), type(Ellipsis), int, slice, torch.SymInt, torch.Tensor)
    return all(isinstance(part, known) for part in parts)


def _selected(
    call: MakesCall, value: torch.Tensor, parts: tuple[Any, ...]
) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """The view selected by the unknown numbers of an index, and the rest of the index."""
    taken = sum(_dims(part) for part in parts)
    dim, numbers, rest = 0, [], []
    for part in parts:
        if _is_unknown(part):
            numbers.append((dim, part))
        else:
            rest.append(part)
        dim += value.dim() - taken if part is Ellipsis else _dims(part)
    for dim, number in reversed(numbers):
        if isinstance(number, torch.Tensor):
            number = call(torch.Tensor.item, (number,), {})
        value = call(torch.Tensor.select, (value, dim, number), {})
    return value, tuple(rest)


def slice_in_turn(call: MakesCall, value: torch.Tensor, index: Any) -> Any:
    """Slice several dimensions at unbacked numbers one after the other, so that each new size has a source."""
    parts: list[Any] = list(index) if isinstance(index, tuple) else []
    if sum(map(_is_unbacked_slice, parts)) < 2:
        return NotImplemented
    for place in [place for place, part in enumerate(parts) if part is Ellipsis]:
        parts[place : place + 1] = [slice(None)] * (value.dim() - len(parts) + 1)
    if not all(isinstance(part, slice) for part in parts):
        return NotImplemented
    for dim, part in enumerate(parts):
        if any(bound is not None for bound in (part.start, part.stop, part.step)):
            value = call(torch.Tensor.__getitem__, (value, (*(slice(None),) * dim, part)), {})
    return value


def are_numbers(data: Any) -> bool:
    """Tell whether data is a list of single-number tensors, whose values are known only when the graph runs."""
    whole = isinstance(data, (list, tuple)) and bool(data)
    return whole and all(isinstance(item, torch.Tensor) and item.dim() == 0 for item in data)


def squeeze_with_guard(
    is_known: Callable[[Any], bool], input: torch.Tensor, *dims: Any, dim: Any = None
) -> Iterator[Any]:
    """Guard on whether squeezed sizes are 1, if `is_known` says that this is known; yield torch's assumptions about others."""
    sizes: Any = input.shape
    for size in (sizes[d] for d in _named(input, dims, dim)):
        is_one = is_known(size) and bool(size == 1)
        if not is_one and is_unbacked(size):
            yield sympy.Ne(size.node.expr, 1)


def unbind_with_guard(input: torch.Tensor, dim: int = 0) -> tuple[torch.Tensor, ...] | None:
    """Unbind along a dimension of dynamic or unbacked size, whose value is decided; return None for static sizes."""
    size: Any = input.shape[dim]
    return (
        tuple(input.select(dim, index) for index in range(int(size)))
        if isinstance(size, torch.SymInt)
        else None
    )


def _is_unknown(part: Any) -> bool:
    """Tell whether a part of an index is an unknown integer, as a tensor or symbolic number, which torch would make static."""
    if isinstance(part, FakeTensor):
        whole = not part.dtype.is_floating_point and part.dtype not in (torch.bool, torch.uint8)
        return part.dim() == 0 and whole and part.constant is None
    return isinstance(part, torch.SymInt)


def _dims(part: Any) -> int:
    """The number of dimensions that a part of an index uses; 0 for an ellipsis, which uses the remaining ones."""
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    is_mask = isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8)
    return part.dim() if is_mask else 1


def _is_unbacked_slice(part: Any) -> bool:
    return isinstance(part, slice) and (is_unbacked(part.start) or is_unbacked(part.stop))


def _named(input: torch.Tensor, dims: tuple[Any, ...], dim: Any) -> list[int]:
    """The dimensions to which a call of `squeeze` applies."""
    given = dim if dim is not None else dims[0] if len(dims) == 1 else dims or range(input.dim())
    listed = given if isinstance(given, (tuple, list, range)) else (given,)
    return sorted({d % input.dim() for d in listed}) if input.dim() else []
