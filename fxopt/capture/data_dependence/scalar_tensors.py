"""Sizes that a forward keeps in tensors: `x[:, :n]` or `x.view(n, -1)`, where `n` is a tensor without dimensions.

The number in `n` is tracked through the arithmetic that computes it, from sizes and from integers in tensors of the model. If
torch uses `n` as a size, it gets the number. A tensor may round, overflow or be written, so the graph checks the number.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Set
from typing import Any

import sympy
import torch
from sympy.core.relational import Relational
from sympy.logic.boolalg import BooleanAtom

from fxopt.capture.capture_internals import FloorDiv, unset_fake_temporarily
from fxopt.capture.fakes.shape_env import CaptureShapeEnv
from fxopt.capture.nodes.graph_writer import GraphWriter
from fxopt.memory import version_of
from fxopt.objects import mapped
from fxopt.torch_internals import FakeTensor

# The functions with sizes as arguments, by name.
_TAKES_SIZES = {
    *("view", "reshape", "expand", "repeat", "narrow", "unfold", "as_strided", "__getitem__"),
    *("zeros", "ones", "empty", "full", "new_zeros", "new_ones", "new_empty", "new_full"),
}
# The functions that read tensors as sizes without a recorded call, so that no node would compute the numbers.
_READS_SIZES = {"pad", "interpolate", "repeat"}
# The calls whose arguments `given_as_numbers` may replace.
TAKES_SIZES = {"arange", *_TAKES_SIZES, *_READS_SIZES}


@dataclasses.dataclass
class Number:
    """The known value of a tensor as a sympy expression: a fraction of sizes and integers, or a comparison of fractions.

    `exact` is True if the tensor cannot contain another number at runtime: it is computed only from sizes, in int64.
    """

    value: Any
    exact: bool = True
    version: float = 0


class KnownScalars:
    """The tensors of one capture whose number is known as an expression of sizes; the forward writes those in `moving`."""

    def __init__(self, writer: GraphWriter, shape_env: CaptureShapeEnv, moving: Set[str]) -> None:
        self._writer, self._shape_env, self._moving = writer, shape_env, moving
        self._taken: list[tuple[str, torch.Tensor]] = []
        self._numbers: dict[int, Number] = {}
        self._checked: set[int] = set()
        self._alive: list[torch.Tensor] = []

    def keep(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Store the number in the result of a call, if it is known."""
        if not isinstance(result, torch.Tensor) or result.dim():
            return
        if name in _COPIES:  # the other arguments set dtype and device of the copy
            args, kwargs = args[:1], {}
        operands = [operand for arg in args if (operand := self._number(arg)) is not None]
        if len(operands) < len(args):
            return
        value = self._computed(name, [operand.value for operand in operands], kwargs, result.dtype)
        if value is not None:
            exact = all(operand.exact for operand in operands) and result.dtype == torch.int64
            self._numbers[id(result)] = Number(value, exact, version_of(result))
            self._alive.append(result)

    def _computed(self, name: str, values: list[Any], kwargs: dict[str, Any], dtype: torch.dtype) -> Any:
        """Return the number that a call computes from others; None if it is unknown."""
        if any(isinstance(value, _COMPARISON) for value in values):
            return None
        if name in _COPIES and values:
            rounds = not (values[0].is_integer or dtype.is_floating_point)
            return None if rounds or dtype == torch.bool else values[0]
        if name in ("div", "floor_divide", "__floordiv__") and len(values) == 2:
            rounding = "floor" if name != "div" else kwargs.get("rounding_mode")
            if set(kwargs) - {"rounding_mode"} or (rounding == "trunc" and self._may_be_negative(values[0])):
                return None  # `trunc` equals `floor` only for numbers that are not negative
            quotient = _quotient(*values)
            return quotient if rounding is None or quotient is None else _floor(quotient)
        operands, compute = _ARITHMETIC.get(name, (0, None))
        return compute(*values) if compute and len(values) == operands and not kwargs else None

    def _may_be_negative(self, value: Any) -> bool:
        numerator, _ = sympy.fraction(sympy.together(value))
        return bool(self._shape_env.bound_sympy(numerator).lower < 0)

    def given_as_numbers(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], item: Callable[[torch.Tensor], Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call with numbers in place of tensors used as sizes; `item` reads unknown numbers."""
        if name == "arange":
            (_, *numbers), kwargs = with_numbers((None, *args), kwargs, lambda t: self._read(t, item))
            return tuple(numbers), kwargs
        if name in _READS_SIZES:
            return with_numbers(args, kwargs, lambda tensor: self._read(tensor, item))
        if name == "__getitem__" and isinstance(args[1], torch.Tensor):
            number = self._numbers.get(id(args[1]))
            known = number is not None and number.exact and number.version == version_of(args[1])
            return (args[0], self._plain(number.value)) if known and number else args, kwargs
        if name in _TAKES_SIZES:
            return with_numbers(args, kwargs, lambda tensor: self._read(tensor, lambda unknown: unknown))
        return args, kwargs

    def truth(self, name: str, args: tuple[Any, ...]) -> bool | None:
        """Return `bool(tensor)` if it follows from sizes, else None."""
        if name != "__bool__" or id(args[0]) not in self._numbers:
            return None
        number = self._number(args[0])
        if number is None or not isinstance(number.value, _COMPARISON):
            return None
        number.value = sympy.sympify(bool(self._plain(number.value)))  # adds a guard
        return bool(self._read(args[0], lambda unknown: None))

    def written(self) -> set[str]:
        """Return the names of the model's tensors that were used as known numbers, although the forward writes them."""
        return {name for name, tensor in self._taken if version_of(tensor)}

    def _number(self, value: Any) -> Number | None:
        if isinstance(value, torch.SymInt):
            return Number(value.node.expr)
        if isinstance(value, int) and not isinstance(value, bool):
            return Number(sympy.Integer(value))
        if not isinstance(value, torch.Tensor) or value.dim():
            return None
        number = self._numbers.get(id(value))
        if number is None and _is_integer(value) and (number := self._held(value)) is not None:
            self._numbers[id(value)] = number
            self._alive.append(value)
        return number if number is not None and number.version == version_of(value) else None

    def _held(self, tensor: torch.Tensor) -> Number | None:
        """Return the number in an integer tensor of the model; None if it is unknown, or the forward writes the tensor."""
        name, real = self._writer.shell.real(tensor)
        if name in self._moving or version_of(tensor):
            return None
        if real is None and isinstance(tensor, FakeTensor):
            real = tensor.constant
        if real is None or real.is_meta or isinstance(real, FakeTensor):
            return None
        self._taken.append((name, tensor))
        with unset_fake_temporarily():
            return Number(sympy.Integer(int(real)), exact=False)

    def _read(self, tensor: torch.Tensor, unknown: Callable[[torch.Tensor], Any]) -> Any:
        """Return the number in a tensor, checked in the graph; `unknown(tensor)` if it is unknown."""
        number = self._number(tensor)
        if number is None or not (isinstance(number.value, BooleanAtom) or number.value.is_integer):
            return unknown(tensor)
        plain = self._plain(number.value)
        if not number.exact and id(tensor) not in self._checked:
            self._checked.add(id(tensor))
            item = self._writer.create("call_method", "item", (self._writer.argument(tensor),), {}, None)
            expected = self._writer.argument(plain)
            same = self._writer.call(operator.eq, item, expected)
            self._writer.assume(same, "what number a tensor holds that is used as a size")
        return plain

    def _plain(self, value: Any) -> Any:
        """Return a known value as the Python or symbolic number that the forward reads."""
        if isinstance(value, _COMPARISON):
            return bool(value) if isinstance(value, BooleanAtom) else self._shape_env.symbolic(value, bool)
        return int(value) if value.is_number else self._shape_env.symbolic(value, int)


def _quotient(a: Any, b: Any) -> Any:
    """Return a fraction; None if the divisor is a size, which may be 0 in a tensor, or is not positive."""
    return a / b if b.is_number and b > 0 else None


def _floor(value: Any) -> Any:
    return FloorDiv(*sympy.fraction(sympy.together(value)))


_COMPARISON = (Relational, BooleanAtom)
# The functions that return their first argument or a copy of it.
_COPIES = {"to", "long", "int", "float", "double", "clone", "detach", "tensor", "as_tensor"}
# By name of a call, the number of its operands, and the function that computes its result.
_ARITHMETIC: dict[str, tuple[int, Callable[..., Any]]] = {
    **dict.fromkeys(("add", "__add__", "__radd__"), (2, operator.add)),
    **dict.fromkeys(("sub", "__sub__"), (2, operator.sub)),
    **dict.fromkeys(("__rsub__", "rsub"), (2, lambda a, b: b - a)),
    **dict.fromkeys(("mul", "__mul__", "__rmul__"), (2, operator.mul)),
    **dict.fromkeys(("true_divide", "__truediv__"), (2, _quotient)),
    "floor": (1, _floor),
    "ceil": (1, lambda a: -_floor(-a)),
    **{name: (2, getattr(sympy, name.capitalize())) for name in ("lt", "le", "gt", "ge", "eq", "ne")},
}


def _is_integer(tensor: torch.Tensor) -> bool:
    other = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return not other and tensor.dtype not in (torch.bool, torch.uint8)  # as an index, these are masks


def _is_scalar_integer(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0 and _is_integer(value)


def holds_sizes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether an argument, after the first one, is or holds an integer tensor without dimensions."""
    found: list[Any] = []
    with_numbers(args, kwargs, found.append)
    return bool(found)


def with_numbers(
    args: tuple[Any, ...], kwargs: dict[str, Any], number: Callable[[torch.Tensor], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments, with `number(t)` in place of each integer tensor `t` without dimensions after the first one."""
    rest, keywords = mapped(
        (args[1:], kwargs), lambda part: number(part) if _is_scalar_integer(part) else part
    )
    return args[:1] + rest, keywords
