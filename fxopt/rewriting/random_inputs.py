"""Random inputs of a piece of a graph, chosen such that a wrong rewrite computes other values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxopt.compare import rounds
from fxopt.outputs import tensors

ZERO_OR_ONE = (0, 2)
"""Integers that are valid indices of most tables."""

ANY_SIGN = (-128, 128)
"""Integers of both signs that are not indices, such as the distance of two positions."""

FAR = (-999, 1000)
"""Integers far from 0, which are out of range for small tables."""


LARGE = 1e4
"""Constants of this size or more, such as those of masks, hide all other values."""


_FEW = (1, -1, 2, -2, 3, 7)
"""The multiples of `Numbers.unit` that are drawn."""


@dataclasses.dataclass(frozen=True)
class Numbers:
    """How random inputs are made.

    Attributes:
        dtype: the dtype to compute in; None for the dtypes of the values and weights.
        size_of: returns the integer to use for a size.
        integers: the range of integers: the smallest one, and the exclusive upper bound.
        unit: the number of which all floating numbers are small multiples; None for no restriction.
        even: whether numbers have one scale; otherwise some are large, small or zero.
        constants: numbers near which all elements are drawn; integers may equal them.
        turn: the index of a draw; each draw continues with the constants that did not fit into the one before.
    """

    dtype: torch.dtype | None
    size_of: Callable[[Any], int] = lambda size: number_of(size)
    integers: tuple[int, int] = (0, 128)
    unit: float | None = None
    even: bool = False
    constants: Sequence[int | float] = ()
    turn: int = 0

    def like(self, value: Any, seed: int) -> Any:
        """Draw random values with the shape, dtype and memory order of a tensor; other values are returned as they are."""
        if isinstance(value, torch.SymInt):
            return self.size_of(value)
        if not isinstance(value, Tensor):
            return value
        strides = [number_of(stride) for stride in value.stride()]
        order = sorted(range(value.ndim), key=lambda dim: -strides[dim])
        shape = [self.size_of(value.shape[dim]) for dim in order]
        generator = torch.Generator().manual_seed(seed)
        numbers = self._drawn(value, shape, generator)
        if value.is_complex():
            numbers = torch.complex(numbers, self._drawn(value, shape, generator))
        numbers = numbers.to(value.device, value.dtype)
        return numbers.permute([order.index(dim) for dim in range(value.ndim)])

    def _drawn(self, value: Tensor, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        if not rounds(value):
            low, high = (0, 2) if value.dtype == torch.bool else self.integers
            if self.constants and value.dtype != torch.bool:
                constants, distances = self._near_constants((-1, 0, 1), shape, generator)
                near = (constants + distances).long()
                return near if low < 0 and value.dtype.is_signed else near.clamp(min=0)
            return torch.randint(low if value.dtype.is_signed else 0, high, shape, generator=generator)
        if self.unit is not None:
            multiples, _ = dataclasses.replace(self, constants=_FEW)._near_constants((0,), shape, generator)
            return multiples * self.unit
        if self.constants:
            constants, distances = self._near_constants((-1, 1), shape, generator)
            # Not at constants, and without equal values: a function may have no gradient there.
            return constants + distances * (0.1 + 0.8 * torch.rand(shape, generator=generator))
        numbers = torch.randn(shape, generator=generator)
        scales = torch.tensor([1.0, 1.0, 1.0, 1.0, 30.0, 1 / 30, 0.0])
        if numbers.numel() > 1 and not self.even:  # a single number might become 0
            numbers = numbers * scales[torch.randint(0, len(scales), shape, generator=generator)]
            numbers[-1:] *= 1e-4 if len(numbers) > 1 else 1  # so that an overflow spares one row
        return numbers

    def _near_constants(
        self, distances: Sequence[int], shape: Sequence[int], generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Draw constants and distances as two tensors of a shape; with enough elements, each pair occurs."""
        pairs = torch.tensor(
            [(constant, distance) for constant in self.constants for distance in distances],
            dtype=torch.float64,
        )
        count = math.prod(shape)
        places = (torch.arange(count) + self.turn * count) % len(pairs)
        chosen = pairs[places[torch.randperm(count, generator=generator)]]
        return chosen[:, 0].reshape(shape), chosen[:, 1].reshape(shape)


def has_integers(values: Iterable[Any]) -> bool:
    """Tell whether a tensor among these holds integers; booleans do not count."""
    return any(isinstance(v, Tensor) and not (rounds(v) or v.dtype == torch.bool) for v in values)


def is_finite(value: object) -> bool:
    """Tell whether the tensors of a value hold neither NaN nor infinities."""
    return all(bool(tensor.isfinite().all()) for tensor in tensors(value))


def number_of(size: Any) -> int:
    """The integer for a size: a dynamic size is that of the example inputs, or 3 if it depends on values."""
    if isinstance(size, int):
        return size
    return int(size.node.hint) if size.node.has_hint() else number_with({}, size)


def resized(env: Any, guard: Any, choose: Callable[[int], int]) -> Callable[[Any], int] | None:
    """Return a function that replaces sizes of the example by other sizes; None if the graph accepts no other sizes.

    Args:
        env: the `ShapeEnv` of the graph; None if all sizes are static.
        guard: the module that checks the inputs of the graph; None if the graph has none.
        choose: computes another size from a size of the example.
    """
    if env is None:
        return None
    hints = {symbol: int(hint) for symbol, hint in env.backed_var_to_val.items()}
    bounds = {symbol: env.bound_sympy(symbol) for symbol in hints}

    def is_taken(numbers: Mapping[Any, int]) -> bool:
        if guard is not None:
            return bool(guard.takes({str(symbol): number for symbol, number in numbers.items()}))
        return all(
            bounds[symbol].lower <= number <= bounds[symbol].upper for symbol, number in numbers.items()
        ) and {each.expr.subs(numbers) for each in env.guards} <= {True}

    numbers = {symbol: choose(hint) for symbol, hint in hints.items()}
    if not is_taken(numbers):
        chosen, numbers = numbers, dict(hints)
        for symbol in hints:
            alone = {**numbers, symbol: chosen[symbol]}
            numbers = alone if is_taken(alone) else numbers
    return None if numbers == hints else lambda size: number_with(numbers, size)


def number_with(numbers: Mapping[Any, int], size: Any) -> int:
    """The integer for a size whose symbols have these numbers; symbols without a number count as 3."""
    if isinstance(size, int):
        return size
    return int(size.node.expr.subs({**dict.fromkeys(size.node.expr.free_symbols, 3), **numbers}))
