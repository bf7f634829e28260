"""The calls on which a module is judged: the given inputs, large values, NaN and infinities, and other sizes.

On one input, outputs may agree by chance: a graph may contain the batch size of the example or cache its first result, or
no value may reach a clamp. So the inputs are varied as far as the model accepts the variations.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxopt.compare import FILL, checksum, compare
from fxopt.errors import GuardError
from fxopt.outputs import leaves, mapped, plain
from fxopt.testing.free_sizes import APART, SIZES, batch_of_one, other_sizes
from fxopt.testing.observations import BROKEN, Call, Observation, copied, observe

VALUES = "other values"


def calls_of(
    reference: nn.Module,
    exact: nn.Module,
    given: Call,
    wide: torch.dtype,
    graphs: Mapping[torch.dtype | None, nn.Module | None],
    rtol: float,
) -> tuple[list[Call], list[Call]]:
    """Choose the calls on which candidates are judged in the dtype of the reference, and those in a wide dtype.

    The first list has the first call of the second list and, if there are other values or sizes, its last call.

    Args:
        reference: the module that is right.
        exact: the reference in the wide dtype.
        given: the given inputs.
        wide: the wide dtype.
        graphs: graphs of the reference, by the dtype in which they are called, `None` for its own. Their guards tell which
            sizes are dynamic, and calls that they refuse are left out.
        rtol: tolerance of two results in the wide dtype.
    """
    graph, refuses = graphs.get(None), functools.partial(_refused, graphs)

    def wide_run(*calls: Call) -> list[Observation]:
        return [seen for call in calls for seen in observe(exact, [call.cast(wide)])]

    def twice(call: Call) -> list[Observation]:
        return wide_run(call, call.cast(wide).changed(_nudged))

    def nan_places(call: Call) -> list[Observation]:
        # Infinities that become NaN (inf - inf) may become another value if the same steps run in another order.
        seen = wide_run(call, *[*_broken_calls(given)][1:])
        return [dataclasses.replace(each, output=mapped(each.output, Tensor.isnan)) for each in seen]

    # Values far beyond the limits of clamps; smaller ones if the model does not accept such values.
    large = _first_taken(_large_values(given, graph, 2.0**20), twice, refuses, rtol=rtol)
    large = large or _first_taken(
        itertools.chain(_large_values(given, graph, 64.0), _other_values(given, 4.0)), wide_run, refuses
    )
    broken = _first_taken(_broken_calls(given), nan_places, refuses)
    others = itertools.chain(other_sizes(given, graph), _other_values(given))
    other = _first_taken(others, lambda call: observe(reference, [call]), refuses)
    if other and other.name == APART:
        other = dataclasses.replace(other, name=SIZES)
    return (
        [call for call in (given, other) if call is not None],
        [call.cast(wide) for call in (given, large, broken, other) if call is not None],
    )


def _first_taken(
    calls: Iterable[Call],
    run: Callable[[Call], list[Observation]],
    refused: Callable[[Call], bool],
    *,
    rtol: float = 0.0,
) -> Call | None:
    """Find the first call that the reference accepts, with a finite result, and that its graphs do not refuse.

    `run` may return several results, for inputs that hardly differ; these may differ by `rtol`.
    """
    for call in calls:
        try:
            seen, *others = run(call)
            steady = all(compare(seen.output, other.output).max_rel <= rtol for other in others)
        except Exception:  # any error: the model does not accept such inputs
            continue
        if steady and not not_finite(seen.output) and not refused(call):
            return call
    return None


def _refused(graphs: Mapping[torch.dtype | None, nn.Module | None], call: Call) -> bool:
    """Tell whether one of the graphs refuses a call, each in its dtype."""
    for dtype, graph in graphs.items():
        try:
            if graph is not None:
                observe(graph, [call if dtype is None else call.cast(dtype)])
        except Exception as error:  # only a GuardError is a refusal; other errors count against a candidate
            if isinstance(error, GuardError) or call.name == APART:
                return True
    return False


def _large_values(given: Call, graph: nn.Module | None, scale: float) -> Iterator[Call]:
    """Yield calls with large values and zeros, the boldest first."""
    for call in (*batch_of_one(given, graph), given):
        for bold in (3, 2, 1, 0):
            yield _changed(call, scale=scale, zeros=True, bold=bold)


def _broken_calls(given: Call) -> Iterator[Call]:
    """Yield two calls with NaN in the first row of each floating input: with infinities in the next two rows, and without."""
    if any(isinstance(t, Tensor) and _breakable(t) for _, t in leaves([given.args, given.kwargs])):
        for values in ((math.nan, math.inf, -math.inf), (math.nan,)):
            yield given.changed(functools.partial(_broken, values=values), BROKEN)


def _breakable(tensor: Tensor) -> bool:
    """Tell whether a floating tensor is not a mask: it has values other than 0 and 1, and none as large as those of masks."""
    if not tensor.is_floating_point() or not tensor.numel():
        return False
    return not bool(((tensor == 0) | (tensor == 1)).all()) and bool((tensor.abs() < FILL).all())


def _broken(tensor: Tensor, values: Sequence[float]) -> Tensor:
    broken = copied(tensor)
    if tensor.ndim and _breakable(tensor):
        for row, value in enumerate(values[: len(tensor)]):
            broken[(row, *[0] * (tensor.ndim - 1))] = value
    return broken


def _nudged(tensor: Tensor) -> Tensor:
    """Move floating numbers by a few units in the last place, up and down in turn; masks stay."""
    if not tensor.is_floating_point() or bool(((tensor == 0) | (tensor == 1)).all()):
        return tensor.clone()
    signs = torch.arange(tensor.numel(), device=tensor.device).reshape(tensor.shape) % 2 * 2 - 1
    moved = tensor * (1 + 4 * torch.finfo(tensor.dtype).eps * signs.to(tensor.dtype))
    # Huge numbers stay: in a mask, the lowest number of a dtype hides an element.
    return torch.where(tensor.abs() < 1e30, moved, tensor)


def _other_values(given: Call, scale: float = 1.0) -> Iterator[Call]:
    """Yield calls with reordered and scaled numbers; the second call keeps integers, because they may be positions."""
    yield _changed(given, scale=scale)
    yield given.changed(lambda t: _other(t, scale=scale) if t.is_floating_point() else t.clone(), VALUES)


def _changed(given: Call, **how: Any) -> Call:
    """Change the numbers of a call; tensors with equal numbers get different ones."""
    seen: Counter[Any] = Counter()

    def change(tensor: Tensor) -> Tensor:
        numbers = tensor.dtype, tensor.numel(), checksum(tensor)
        seen[numbers] += 1
        return _other(tensor, seen[numbers] - 1, **how)

    return given.apart().changed(change, VALUES)


def _other(
    tensor: Tensor, turn: int = 0, *, scale: float = 1.0, zeros: bool = False, bold: int = 0
) -> Tensor:
    """Reorder the numbers of a tensor, and scale floating ones, except in masks and if all are between 0 and 1.

    From 1 on, `bold` also scales numbers between 0 and 1, except masks, uses ids that may not be in the example, lets a
    mask that hid nothing hide the end, and leaves gaps in memory between rows. From 2 on, it varies constant tensors, adds
    a row of zeros, and uses ids above those of the example, 0 and repeated ids. At 3, it adds negative numbers if there are none.
    """
    if tensor.dtype not in _VARIED:
        return copied(tensor)
    numbers = tensor.detach().flatten().flip(0).roll(turn)
    if tensor.is_floating_point() and (_breakable(tensor) if bold else _scalable(tensor)):
        numbers *= scale
        if zeros:
            numbers[::7] = 0
        if bold == 3 and (tensor >= 0).all():
            numbers[1::2] *= -1
    if not bold or not tensor.numel():
        return torch.empty_like(tensor).copy_(numbers.reshape(tensor.shape))
    if bold > 1 and (tensor == tensor.flatten()[0]).all():
        numbers = _unlike(numbers)
    elif tensor.dtype in _INTEGERS and tensor.max() > 1:
        # An index out of range is an exception on a CPU, but makes a GPU unusable for the rest of the process.
        above = bold > 1 and tensor.device.type == "cpu"
        numbers = tensor.min() + tensor.max() - numbers
        if above:
            numbers[0] = numbers[-1] = tensor.max() + 1
            numbers[2:-1:7] = 0
        if above and bold == 3 and tensor.min() >= 0:
            numbers[1::2] = -1 - numbers[1::2]
    numbers = numbers.reshape(tensor.shape)
    if tensor.ndim and tensor.shape[-1] > 1 and bool((tensor == 1).all()):
        numbers[..., -1 - turn % tensor.shape[-1]] = 0
    if tensor.ndim < 2:
        return numbers
    if bold > 1 and tensor.shape[-2] > 1 and _breakable(tensor):
        numbers[..., -1, :] = 0
    # The view also has a storage offset.
    wide = numbers.new_empty((*tensor.shape[:-1], tensor.shape[-1] + 1))
    return wide[..., 1:].copy_(numbers)


def _unlike(numbers: Tensor) -> Tensor:
    """Change the numbers of a constant tensor: for example, a mask then hides the end, and a zero state is no longer zero."""
    first = numbers[0]
    if numbers.is_floating_point() and not first:
        return torch.linspace(-1, 1, len(numbers), dtype=numbers.dtype, device=numbers.device)
    if first == 1 and len(numbers) > 1:  # a mask: the caller hides its last column
        return numbers
    if numbers.is_floating_point():
        return numbers * 0.75
    changed = numbers.clone()
    changed[-1] = not first if numbers.dtype == torch.bool else first - 1 if first > 0 else first + 1
    return changed


_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_VARIED = (
    *(torch.bool, *_INTEGERS, torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128),
)
"""The dtypes in which torch computes; other dtypes only store numbers."""


def _scalable(tensor: Tensor) -> bool:
    return _breakable(tensor) and not bool(((tensor >= 0) & (tensor <= 1)).all())


def not_finite(output: object) -> str:
    """Return the path of a tensor of an output that contains NaN or infinity; empty if there is none."""
    return next((path for path, finite in _finite(output).items() if not finite.all()), "")


def new_infinity(expected: object, actual: object) -> str:
    """Return the path of a tensor of `actual` with NaN or infinity where `expected` is finite; empty if there is none."""
    others = _finite(actual)
    return next((path for path, finite in _finite(expected).items() if (finite & ~others[path]).any()), "")


def has_finite(output: object) -> bool:
    """Tell whether a tensor of an output contains a finite number."""
    return any(bool(finite.any()) for finite in _finite(output).values())


def _finite(output: object) -> dict[str, Tensor]:
    """For each tensor of an output, by path, the mask of its finite elements."""
    found = ((path, value) for path, value in leaves(output) if isinstance(value, Tensor))
    return {path: plain(value).isfinite() for path, value in found if not value.is_meta}
