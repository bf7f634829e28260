"""A number that nobody can know while a forward is captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_OF_CLASSES = {"__class__", "__doc__", "__new__", "__init_subclass__", "__subclasshook__"}


class UnusableNumber:
    """Stands for a number that nobody can know: whatever is done with it calls `refuse`. (Functions in C would read a float.)"""

    __slots__ = ("refuse",)

    def __init__(self, refuse: Callable[[], None]) -> None:
        object.__setattr__(self, "refuse", refuse)

    def __getattribute__(self, name: str) -> Any:
        _use(self)


def _use(number: UnusableNumber, *args: Any, **kwargs: Any) -> None:
    object.__getattribute__(number, "refuse")()


class CountedNumber(UnusableNumber):
    """Stands for a number of this `kind` that later calls may make others of, as counters do, and use for nothing else."""

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
        # `isinstance` asks for it, and `nn.Module` so before it takes an attribute.
        return object.__getattribute__(self, "kind") if name == "__class__" else _use(self)


def is_unusable(value: Any) -> bool:
    """Tell whether a value is such a number, without asking it."""
    return type(value) in (UnusableNumber, CountedNumber)


def _counted(number: CountedNumber, other: Any) -> Any:
    return number if is_unusable(other) or isinstance(other, (int, float)) else _use(number)


def _told(number: float) -> Callable[[CountedNumber], float]:
    """Make a method that says a number in a message, as `"%.2f"` asks for one."""

    def tell(counted: CountedNumber) -> float:
        _use(counted)
        return number

    return tell


# Python looks for what operators and builtins do in the class.
for _name in {*dir(float), *dir(int)} - {*vars(UnusableNumber), *_OF_CLASSES}:
    setattr(UnusableNumber, _name, _use)
for _name, _number in (("__float__", 0.0), ("__int__", 0), ("__index__", 0)):
    setattr(CountedNumber, _name, _told(_number))
for _name in ("add", "sub", "mul", "truediv", "floordiv"):
    for _form in (f"__{_name}__", f"__r{_name}__"):
        setattr(CountedNumber, _form, _counted)
