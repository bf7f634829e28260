"""A number that nobody can know while a forward is captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_OF_CLASSES = {"__class__", "__doc__", "__new__", "__init_subclass__", "__subclasshook__"}


class UnusableNumber:
    """Stands for a number that nobody can know: whatever is done with it calls `refuse`, which raises.

    It is no float, because functions in C read the number in a float without asking its class.
    """

    __slots__ = ("refuse",)

    def __init__(self, refuse: Callable[[], None]) -> None:
        object.__setattr__(self, "refuse", refuse)

    def __getattribute__(self, name: str) -> Any:
        _use(self)


def _use(number: UnusableNumber, *args: Any, **kwargs: Any) -> None:
    object.__getattribute__(number, "refuse")()


# Python looks for what operators and builtins do in the class.
for _name in {*dir(float), *dir(int)} - {*vars(UnusableNumber), *_OF_CLASSES}:
    setattr(UnusableNumber, _name, _use)
