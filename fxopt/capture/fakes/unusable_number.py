"""Numbers whose value is unknown while a forward is captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_OF_CLASSES = {"__class__", "__doc__", "__new__", "__init_subclass__", "__subclasshook__"}


class UnusableNumber:
    """Represents an unknown number: every use calls `refuse`. (C functions would read the value of a float.)"""

    __slots__ = ("refuse",)

    def __init__(self, refuse: Callable[[], None]) -> None:
        object.__setattr__(self, "refuse", refuse)

    def __getattribute__(self, name: str) -> Any:
        _use(self)


def _use(number: UnusableNumber, *args: Any, **kwargs: Any) -> None:
    object.__getattribute__(number, "refuse")()


class CountedNumber(UnusableNumber):
    """Represents a counter of this `kind`: later calls may only derive new numbers from it."""

    __slots__ = ("kind",)

    def __init__(self, refuse: Callable[[], None], kind: type) -> None:
        super().__init__(refuse)
        object.__setattr__(self, "kind", kind)

    def __format__(self, specification: str) -> str:
        _use(self)
        return "..."  # in a message

    def __round__(self, digits: int | None = None) -> CountedNumber:
        _use(self)
        return self

    __repr__ = __str__ = lambda self: format(self)

    def __getattribute__(self, name: str) -> Any:
        # `isinstance` reads `__class__`, also in `nn.Module.__setattr__`.
        return object.__getattribute__(self, "kind") if name == "__class__" else _use(self)


def is_unusable(value: Any) -> bool:
    """Tell whether a value is an unusable number, without using it."""
    return type(value) in (UnusableNumber, CountedNumber)


def _counted(number: CountedNumber, other: Any) -> Any:
    return number if is_unusable(other) or isinstance(other, (int, float)) else _use(number)


def _told(number: float) -> Callable[[CountedNumber], float]:
    """Make a method that returns a number for messages, as formats such as `"%.2f"` require."""

    def tell(counted: CountedNumber) -> float:
        _use(counted)
        return number

    return tell


# Python looks up the methods of operators and builtins in the class.
for _name in {*dir(float), *dir(int)} - {*vars(UnusableNumber), *_OF_CLASSES}:
    setattr(UnusableNumber, _name, _use)
for _name, _number in (("__float__", 0.0), ("__int__", 0), ("__index__", 0)):
    setattr(CountedNumber, _name, _told(_number))
for _name in ("add", "sub", "mul", "truediv", "floordiv"):
    for _form in (f"__{_name}__", f"__r{_name}__"):
        setattr(CountedNumber, _form, _counted)
