"""Sizes that a forward keeps in tensors: `x[:, :n]` or `x.view(n, -1)`, where `n` is a tensor without dimensions.

What such a tensor holds is followed through the arithmetic that made it: from sizes, and from integers that the model
holds in tensors (a stride, a kernel size). Where torch takes it as a size, it gets the number instead of a value that
only a run knows. A tensor may round or overflow, and the model's may be changed: the graph checks that it holds the
number.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Set
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fxopt.capture.nodes.graph_writer import GraphWriter
from fxopt.capture.runtime.checks import check_value

# What takes sizes as arguments, by name.
_TAKES_SIZES = {
    *("view", "reshape", "expand", "repeat", "narrow", "unfold", "as_strided", "__getitem__"),
    *("zeros", "ones", "empty", "full", "new_zeros", "new_ones", "new_empty", "new_full"),
}
# What reads sizes that are tensors without a word, so that no node would make their numbers.
_READS_SIZES = {"pad", "interpolate", "repeat"}
_INTEGERS = (int, torch.SymInt)
# The calls that may be `given_as_numbers`.
TAKES_SIZES = {"arange", *_TAKES_SIZES, *_READS_SIZES}


@dataclasses.dataclass
class Number:
    """The known value of a tensor: a fraction of sizes and integers, or the answer to a comparison.

    It is `exact` if it cannot be another number in a run, as one that is computed from sizes alone, in int64.
    """

    value: Any
    divisor: Any = 1
    exact: bool = False
    version: float = 0


class KnownScalars:
    """The tensors of one capture that hold a number which is known as an expression of sizes.

    `model_tensor` gives the name and the real tensor for a fake one; those called `written`, the forward writes.
    """

    def __init__(
        self,
        writer: GraphWriter,
        model_tensor: Callable[[torch.Tensor], tuple[str, torch.Tensor | None]],
        written: Set[str] = frozenset(),
    ) -> None:
        self._writer, self._model_tensor, self._written = writer, model_tensor, written
        self._taken: list[tuple[str, torch.Tensor]] = []
        self._numbers: dict[int, Number] = {}
        self._checked: set[int] = set()
        self._alive: list[torch.Tensor] = []

    def keep(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Keep what a call gives, if that is a number of this kind."""
        if not isinstance(result, torch.Tensor) or result.dim():
            return
        compute = _ARITHMETIC.get(name)
        if compute is None:
            return
        if compute is _same:
            args, kwargs = args[:1], {}
        operands = [self._number(arg) for arg in args]
        known = [operand for operand in operands if operand is not None]
        number = compute(known, kwargs, result) if len(known) == len(operands) else None
        if number is not None:
            number.version = _version(result)
            number.exact = (
                number.exact and all(operand.exact for operand in known) and result.dtype == torch.int64
            )
            self._numbers[id(result)] = number
            self._alive.append(result)

    def given_as_numbers(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        item: Callable[[torch.Tensor], Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, with numbers in the place of such tensors where the call takes sizes.

        `item` gives the number of a tensor of which nothing is known, where the call needs that.
        """
        if name == "arange":
            (_, *numbers), kwargs = with_numbers(
                (None, *args), kwargs, lambda tensor: self._read(tensor, item)
            )
            return tuple(numbers), kwargs
        if name in _READS_SIZES:
            return with_numbers(args, kwargs, lambda tensor: self._read(tensor, item))
        if name == "__getitem__" and isinstance(args[1], torch.Tensor):
            number = self._numbers.get(id(args[1]))
            known = number is not None and number.exact and number.version == _version(args[1])
            return (args[0], number.value) if known and number else args, kwargs
        if name in _TAKES_SIZES:
            return with_numbers(args, kwargs, lambda tensor: self._read(tensor, lambda unknown: unknown))
        return args, kwargs

    def truth(self, name: str, args: tuple[Any, ...]) -> bool | None:
        """Give `bool(tensor)` if that follows from sizes."""
        if name != "__bool__" or id(args[0]) not in self._numbers:
            return None
        number = self._number(args[0])
        if number is None or number.divisor != 1:
            return None
        number.value = bool(number.value)  # puts a guard
        return bool(self._read(args[0], lambda unknown: None))

    def written(self) -> set[str]:
        """The model's tensors that were taken for known numbers, though the forward writes them."""
        return {name for name, tensor in self._taken if _version(tensor)}

    def _number(self, value: Any) -> Number | None:
        if isinstance(value, _INTEGERS) and not isinstance(value, bool):
            return Number(value, exact=True)
        if not isinstance(value, torch.Tensor) or value.dim():
            return None
        number = self._numbers.get(id(value))
        if number is None and _is_integer(value) and (number := self._held(value)) is not None:
            self._numbers[id(value)] = number
            self._alive.append(value)
        return number if number is not None and number.version == _version(value) else None

    def _held(self, tensor: torch.Tensor) -> Number | None:
        """Give the numbers in an integer tensor of the model that the forward does not write."""
        name, real = self._model_tensor(tensor)
        if name in self._written or _version(tensor):
            return None
        if real is None and isinstance(tensor, FakeTensor):
            real = tensor.constant
        if real is None or real.is_meta or isinstance(real, FakeTensor):
            return None
        self._taken.append((name, tensor))
        with unset_fake_temporarily():
            return Number(int(real))

    def _read(self, tensor: torch.Tensor, unknown: Callable[[torch.Tensor], Any]) -> Any:
        """The number that a tensor holds, checked in the graph; `unknown(tensor)` if nobody knows it."""
        number = self._number(tensor)
        if number is None or number.divisor != 1:
            return unknown(tensor)
        if not number.exact and id(tensor) not in self._checked:
            self._checked.add(id(tensor))
            item = self._writer.create("call_method", "item", (self._writer.argument(tensor),), {}, None)
            expected = self._writer.argument(number.value)
            same = self._writer.create("call_function", operator.eq, (item, expected), {}, None)
            message = (
                f"the graph assumes what number a tensor holds that is used as a size. {self._writer.where()}"
            )
            self._writer.create("call_function", check_value, (same, message), {}, None)
        return number.value


def _sum(sign: int, reverse: bool = False) -> Callable[..., Number | None]:
    def computed(known: list[Number], kwargs: dict[str, Any], result: torch.Tensor) -> Number | None:
        if len(known) != 2 or kwargs:
            return None
        a, b = reversed(known) if reverse else known
        if a.divisor == b.divisor:
            return Number(a.value + sign * b.value, a.divisor, exact=True)
        return Number(a.value * b.divisor + sign * b.value * a.divisor, a.divisor * b.divisor, exact=True)

    return computed


def _product(known: list[Number], kwargs: dict[str, Any], result: torch.Tensor) -> Number | None:
    if len(known) != 2 or kwargs:
        return None
    a, b = known
    return Number(a.value * b.value, a.divisor * b.divisor, exact=True)


def _quotient(known: list[Number], kwargs: dict[str, Any], result: torch.Tensor) -> Number | None:
    """A true quotient, or `torch.div(..., rounding_mode=...)`."""
    if len(known) != 2 or set(kwargs) - {"rounding_mode"}:
        return None
    a, b = known
    if type(b.value) is not int or b.value <= 0:
        return None
    fraction = Number(a.value * b.divisor, a.divisor * b.value, exact=True)
    rounding = kwargs.get("rounding_mode")
    if rounding is None:
        return fraction
    # Both ways of rounding are the same for what is not negative.
    if rounding == "floor" or statically_known_true(a.value >= 0):
        return Number(fraction.value // fraction.divisor, exact=True)
    return None


def _floor(known: list[Number], kwargs: dict[str, Any], result: torch.Tensor) -> Number | None:
    if len(known) == 2:
        return _quotient(known, {**kwargs, "rounding_mode": "floor"}, result)
    return Number(known[0].value // known[0].divisor, exact=True)


def _ceiling(known: list[Number], kwargs: dict[str, Any], result: torch.Tensor) -> Number | None:
    return Number(-(-known[0].value // known[0].divisor), exact=True)


def _same(known: list[Number], kwargs: dict[str, Any], result: torch.Tensor) -> Number | None:
    """A copy, or a conversion that rounds nothing."""
    if not known or (known[0].divisor != 1 and not result.dtype.is_floating_point):
        return None
    return dataclasses.replace(known[0], exact=True) if result.dtype != torch.bool else None


def _compared(compare: Callable[[Any, Any], Any]) -> Callable[..., Number | None]:
    def computed(known: list[Number], kwargs: dict[str, Any], result: torch.Tensor) -> Number | None:
        if len(known) != 2 or kwargs:
            return None
        a, b = known
        return Number(compare(a.value * b.divisor, b.value * a.divisor))

    return computed


# What a call makes of numbers, by its name; divisors are above zero.
_ARITHMETIC: dict[str, Callable[[list[Number], dict[str, Any], torch.Tensor], Number | None]] = {
    **dict.fromkeys(("add", "__add__", "__radd__"), _sum(1)),
    **dict.fromkeys(("sub", "__sub__"), _sum(-1)),
    **dict.fromkeys(("__rsub__", "rsub"), _sum(-1, reverse=True)),
    **dict.fromkeys(("mul", "__mul__", "__rmul__"), _product),
    **dict.fromkeys(("div", "true_divide", "__truediv__"), _quotient),
    **dict.fromkeys(("floor_divide", "__floordiv__", "floor"), _floor),
    "ceil": _ceiling,
    # The other arguments say how the copy is held.
    **dict.fromkeys(
        ("to", "long", "int", "float", "double", "clone", "detach", "tensor", "as_tensor"), _same
    ),
    **{name: _compared(getattr(operator, name)) for name in ("lt", "le", "gt", "ge", "eq", "ne")},
}


def _version(tensor: torch.Tensor) -> float:
    """How often a tensor has been written to; equal to nothing under inference mode, where torch does not count."""
    return math.nan if tensor.is_inference() else tensor._version


def _is_integer(tensor: torch.Tensor) -> bool:
    other = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return not other and tensor.dtype not in (torch.bool, torch.uint8)  # as an index, these are masks


def holds_sizes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether an argument, after the first one, is or holds an integer tensor without dimensions."""
    found: list[Any] = []
    _mapped((args[1:], kwargs), lambda tensor: found.append(tensor))
    return bool(found)


def with_numbers(
    args: tuple[Any, ...], kwargs: dict[str, Any], number: Callable[[torch.Tensor], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with `number(t)` in the place of each such tensor."""
    rest, keywords = _mapped((args[1:], kwargs), number)
    return args[:1] + rest, keywords


def _mapped(value: Any, number: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return number(value) if value.dim() == 0 and _is_integer(value) else value
    if type(value) in (tuple, list):
        return type(value)(_mapped(item, number) for item in value)
    if type(value) is dict:
        return {key: _mapped(item, number) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(_mapped(part, number) for part in (value.start, value.stop, value.step)))
    return value
