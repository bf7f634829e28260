"""Calls with NaN and infinities, and the places where a module makes NaN of them because it multiplies them by 0."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from fxopt.objects import tensors_in
from fxopt.outputs import leaves, plain
from fxopt.testing.differences import FILL
from fxopt.testing.observations import BROKEN, Call, Observation, copied, observe

INFINITIES = (math.inf, -math.inf)
VALUES = (math.nan, *INFINITIES)
ORDINARY = (1024.0, -1024.0, 0.0)
"""Numbers in the place of these: an output that is the same with each, and with that of the example, has no use for any."""


def broken_calls(given: Call) -> Iterator[Call]:
    """Calls with NaN in the first row of each floating input: one with infinities in the next two, one without."""
    if any(isinstance(t, Tensor) and breakable(t) for _, t in leaves([given.args, given.kwargs])):
        for values in (VALUES, VALUES[:1]):
            yield given.changed(functools.partial(_broken, values=values), BROKEN)


def breakable(tensor: Tensor) -> bool:
    """Tell whether a tensor holds floating numbers that are no mask: not 0 and 1 alone, and none that hides a place."""
    if not tensor.is_floating_point() or not tensor.numel():
        return False
    return not bool(((tensor == 0) | (tensor == 1)).all()) and bool((tensor.abs() < FILL).all())


def _broken(tensor: Tensor, values: Sequence[float], first: int = 0) -> Tensor:
    broken = copied(tensor)
    if tensor.ndim and breakable(tensor):
        for row, value in enumerate(values[: max(0, len(tensor) - first)], first):
            broken[(row, *[0] * (tensor.ndim - 1))] = value
    return broken


SPARED = f"with {BROKEN}, it has numbers where the original has NaN although its result does not depend on them there, as in 0 * inf"
"""The remark on a candidate that is right but for such places."""


def one_by_one(
    given: Call, taken: Call, reference: nn.Module, candidate: nn.Module
) -> list[tuple[Call, Observation, Observation, bool]]:
    """The effects on two modules of NaN, and of each infinity, alone.

    0 times NaN is NaN, and 0 times infinity, too: `one_hot(ids) @ table` gives NaN for every id where a single row of the table
    has one, and the lookup that may stand for it does so for that row alone. Such a place of the original has the same number
    whichever finite ones stand there, so that a candidate may have this number, as well as NaN. A place that is NaN of NaN alone
    is none: `x.clamp(0, 1).amax()` has no use for most numbers either, and has to pass NaN on.

    Args:
        given: the inputs of the example.
        taken: those with NaN, and infinities where the reference takes them.
        reference: the module that is right, in the dtype of `given`.
        candidate: the module to judge, in that dtype.

    Returns:
        The calls, with what is right and what the candidate does, and whether it may have a number where the reference has NaN;
        none where the reference raises with an infinity, so that nothing tells.
    """
    found = []
    infinite = _infinities(taken) > _infinities(given)
    for row, value in enumerate(VALUES if infinite else VALUES[:1]):

        def alone(value: float, row: int = row) -> Call:
            return given.changed(functools.partial(_broken, values=[value], first=row), BROKEN)

        try:
            broken, *others = observe(reference, [*map(alone, (value, *INFINITIES, *ORDINARY)), given])
        except Exception:  # whatever it raises: part of the values would hide the others
            return []
        (actual,) = observe(candidate, [alone(value)])
        output, spared = _spared(broken, others, actual)
        found.append((alone(value), dataclasses.replace(broken, output=output), actual, spared))
    return found


def _infinities(call: Call) -> int:
    return sum(int(tensor.isinf().sum()) for tensor in tensors_in([call.args, call.kwargs]))


def _spared(broken: Observation, others: Sequence[Observation], actual: Observation) -> tuple[object, bool]:
    """The output of a reference with the numbers of ordinary calls where these agree, and a candidate is not NaN as it is.

    The others are those with each infinity, and the ordinary ones.
    """
    sides = [list(tensors_in(each.output)) for each in (broken, actual, *others)]
    memo: dict[int, Tensor] = {}
    for mine, its, up, down, number, *numbers in zip(*sides, strict=False):
        same_shape = len({each.shape for each in (mine, its, up, down, number, *numbers)}) == 1
        if mine.is_floating_point() and same_shape and plain(mine) is mine and not mine.is_meta:
            free = mine.isnan() & ~its.isnan() & (up.isnan() | down.isnan()) & number.isfinite()
            for other in numbers:
                free &= other == number
            if free.any():
                memo[id(mine)] = torch.where(free, number, mine)
    return (copy.deepcopy(broken.output, {**memo}), True) if memo else (broken.output, False)
