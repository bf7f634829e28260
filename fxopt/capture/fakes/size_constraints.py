"""Constraints on dynamic sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import sympy
from torch.export import Dim

from fxopt.capture.capture_internals import Min
from fxopt.capture.fakes.dynamic_shapes import is_hint
from fxopt.capture.fakes.shape_env import CaptureShapeEnv
from fxopt.capture.runtime.size_guards import SizeGuard, python_expression
from fxopt.errors import TraceError

# A sympy condition on sizes, and the line of the model that needs it.
Condition = tuple[Any, str]


@dataclasses.dataclass
class DynamicDimension:
    """One dimension of a tensor, or one number (without a `dim`), that was requested to be dynamic."""

    where: str
    dim: int | None
    choice: Any
    symbol: Any
    hint: int


class DynamicDimensions:
    """The dynamic dimensions of one capture, and the conditions on them."""

    def __init__(self, shape_env: CaptureShapeEnv) -> None:
        self._shape_env = shape_env
        self.dimensions: list[DynamicDimension] = []

    def assumed(self) -> list[Condition]:
        """List the conditions that the forward relied on: guards, and ranges of sizes from checks in torch."""
        conditions = self._shape_env.conditions()
        for free in self.dimensions:
            bounds = self._shape_env.var_to_range.get(free.symbol)
            if bounds is not None and bounds.lower > 0:
                conditions.append((sympy.Ge(free.symbol, bounds.lower), "a check in torch"))
            if bounds is not None and bounds.upper < 2**31:
                conditions.append((sympy.Le(free.symbol, bounds.upper), "a check in torch"))
        return conditions

    def asked(self) -> list[Condition]:
        """List the conditions that `dynamic_shapes` states: limits, and equal sizes wherever a named `Dim` is used."""
        conditions: list[Condition] = []
        first: dict[str, DynamicDimension] = {}
        named = [free for free in self.dimensions if isinstance(free.choice, Dim)]
        for free in self.dimensions:
            choice: Any = free.choice
            origin = f"dynamic_shapes: {choice!r}"
            of = first.setdefault(choice.__name__, free) if free in named else free
            root = getattr(choice, "root", None)
            if root is not None:
                base = next((f for f in named if f.choice.__name__ == root.__name__), None)
                if base is None:
                    raise TraceError(f"dynamic_shapes uses {choice!r}, but gives {root!r} to no dimension.")
                conditions.append((sympy.Eq(free.symbol, choice.fn(base.symbol)), origin))
            elif of is not free:
                conditions.append((sympy.Eq(free.symbol, of.symbol), origin))
            else:
                if choice.min:
                    conditions.append((sympy.Ge(free.symbol, choice.min), origin))
                if choice.max is not None and choice.max < 2**31:
                    conditions.append((sympy.Le(free.symbol, choice.max), origin))
        return conditions

    def check_example(self) -> None:
        """Raise TraceError if the example inputs contradict `dynamic_shapes`, or a dynamic size is 0."""
        for free in self.dimensions:
            if free.dim is not None and free.hint == 0:
                raise TraceError(
                    f"dimension {free.dim} of {free.where} is 0 in the example inputs, but it is free in dynamic_shapes, "
                    "and a free size is at least 1. Give an example that is not empty, or fix this size."
                )
        hints = {free.symbol: free.hint for free in self.dimensions}
        for condition, origin in self.asked():
            if condition.xreplace(hints) == sympy.false:
                sizes = [
                    f"dimension {free.dim} of {free.where} is {free.hint}"
                    for free in self.dimensions
                    if free.symbol in condition.free_symbols
                ]
                raise TraceError(f"the example inputs contradict `{origin}`: {', '.join(sizes)}.")

    def roots(self) -> list[tuple[Any, DynamicDimension]]:
        """The symbols that remain after unification, each with one dimension (or number) of this size."""
        roots: dict[Any, DynamicDimension] = {}
        for free in self.dimensions:
            expression = self._shape_env.replace(free.symbol)
            if isinstance(expression, sympy.Symbol):
                roots.setdefault(expression, free)
        return list(roots.items())

    def check_asked(self) -> None:
        """Raise TraceError if the forward makes a dimension static that was requested to be dynamic."""
        for free in self.dimensions:
            expression = self._shape_env.replace(free.symbol)
            if expression.is_number and not is_hint(free.choice, Dim.AUTO):
                raise TraceError(
                    f"dimension {free.dim} of {free.where} was asked to be free, but the forward fixes it to "
                    f"{expression}, at {self.origin(free.symbol)}. Leave it out of dynamic_shapes, or give Dim.AUTO."
                )

    def origin(self, symbol: Any) -> str:
        """The line that needed the last condition on a size."""
        lines = [line for condition, line in self._shape_env.conditions() if symbol in condition.free_symbols]
        return lines[-1] if lines else "an unknown place"


def guards_of(conditions: list[Condition], translated: Callable[[Any], Any]) -> list[SizeGuard]:
    """The conditions as guards, without duplicates and without those that are always true."""
    guards: dict[str, SizeGuard] = {}
    for condition, origin in conditions:
        expression = translated(condition).replace(lambda part: isinstance(part, sympy.Eq), _limit)
        if expression is not sympy.true:
            text = python_expression(expression)
            guards.setdefault(text, SizeGuard(text, origin))
    return list(guards.values())


def _limit(equality: Any) -> Any:
    """Rewrite `min(24, s) == s`, torch's test for a slice of the whole dimension, as `s <= 24`; keep other equalities."""
    for side, whole in (equality.args, equality.args[::-1]):
        if isinstance(whole, Min) and side in whole.args:
            return sympy.And(*(sympy.Le(side, other) for other in whole.args if other != side))
    return equality
