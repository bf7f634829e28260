"""Conditions on sizes, as Python: whether they are true, and the limit that they set for a size."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fxopt.capture.capture_internals import PythonPrinter


class SizeExpression:
    """An expression over sizes, as torch prints it, converted once to a function that torch.compile can trace."""

    def __init__(self, text: str) -> None:
        known: dict[str, Any] = {"math": math, "torch": torch}
        names = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
        self.text = text
        self.symbols = tuple(sorted(names - known.keys() - vars(builtins).keys()))
        self._function = eval(f"lambda {', '.join(self.symbols)}: {text}", known)

    def value(self, sizes: Mapping[str, int]) -> Any:
        """Return the value for these sizes."""
        return self._function(*[sizes[symbol] for symbol in self.symbols])

    def __reduce__(self) -> tuple[Any, ...]:
        return SizeExpression, (self.text,)


@dataclasses.dataclass(frozen=True)
class SizeGuard:
    """A condition on symbols, as Python, and the line of the model that needs it."""

    condition: str
    source: str
    formula: SizeExpression = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "formula", SizeExpression(self.condition))

    @property
    def symbols(self) -> tuple[str, ...]:
        """The sizes that the condition is about."""
        return self.formula.symbols

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Tell whether the condition is true for these sizes."""
        try:
            return bool(self.formula.value(sizes))
        except (ArithmeticError, ValueError):  # `math.log` of 0
            return False

    def limit(self, symbol: str, size: int) -> str | None:
        """Describe the limit for one size; None unless the condition is true on one side and false on the other."""

        def holds_at(n: int) -> bool:
            return self.holds({symbol: n})

        below = [n for n in (*range(2, 9), *(size - 2**k for k in range(20))) if 1 < n < size]
        good = [n for n in below if holds_at(n)]
        if good:
            edge = _edge(holds_at, max(good), size)
            monotone = all(holds_at(n) == (n <= edge) for n in (*below, edge + 1, 2 * size, 2 * size + 1))
            return f"it takes at most {edge}" if monotone else None
        above = [size + 2**k for k in range(20)]
        good = [n for n in above if holds_at(n)]
        if good:
            edge = _edge(holds_at, min(good), size)
            monotone = all(holds_at(n) == (n >= edge) for n in (*range(1, size + 1), *above))
            return f"it takes at least {edge}" if monotone else None
        return None


def python_expression(expression: Any) -> str:
    """Return a sympy expression over sizes as Python source."""
    return str(_Printer().doprint(expression))


class _Printer(PythonPrinter):
    """torch's printer, extended by functions of `math` that it does not support."""


for _name in ("log", "exp"):

    def _printed(self: Any, expression: Any, name: str = _name) -> str:
        return f"math.{name}({self.doprint(expression.args[0])})"

    setattr(_Printer, f"_print_OpaqueUnaryFn_{_name}", _printed)


def _edge(holds: Callable[[int], bool], good: int, bad: int) -> int:
    """Return the last size between `good` and `bad` for which the condition is true."""
    while abs(good - bad) > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if holds(middle) else (good, middle)
    return good
