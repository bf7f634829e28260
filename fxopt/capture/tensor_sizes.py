"""Sizes that a forward keeps in tensors: `x[:, :n]` or `x.view(n, -1)`, where `n` is a tensor without dimensions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

# What takes sizes as arguments, by name.
_TAKES_SIZES = {
    *("view", "reshape", "expand", "repeat", "narrow", "unfold", "as_strided", "arange", "__getitem__"),
    *("zeros", "ones", "empty", "full", "new_zeros", "new_ones", "new_empty", "new_full"),
}


class TensorSizes:
    """The tensors of one capture that hold a number which is known as an expression of sizes."""

    def __init__(self) -> None:
        self._numbers: dict[int, Any] = {}
        self._alive: list[torch.Tensor] = []

    def keep_quotient(self, result: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep what `torch.div(size, n, rounding_mode=...)` is."""
        if len(args) != 2 or not isinstance(args[0], torch.SymInt) or not isinstance(args[1], int):
            return
        rounding = kwargs.get("rounding_mode") if len(kwargs) == 1 else None
        # Both ways of rounding are the same for what is not negative.
        if rounding == "floor" or (
            rounding == "trunc" and statically_known_true(args[0] >= 0) and args[1] > 0
        ):
            self._numbers[id(result)] = args[0] // args[1]
            self._alive.append(result)

    def given_as_numbers(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, with numbers in the place of such tensors where the call takes sizes."""
        if not self._numbers or name not in _TAKES_SIZES:
            return args, kwargs
        return with_numbers(args, kwargs, lambda tensor: self._numbers.get(id(tensor), tensor))


def holds_sizes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an argument, after the first one, is or holds an integer tensor without dimensions."""
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
        is_size = value.dim() == 0 and not value.dtype.is_floating_point and value.dtype != torch.bool
        return number(value) if is_size else value
    if type(value) in (tuple, list):
        return type(value)(_mapped(item, number) for item in value)
    if type(value) is dict:
        return {key: _mapped(item, number) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(_mapped(part, number) for part in (value.start, value.stop, value.step)))
    return value
