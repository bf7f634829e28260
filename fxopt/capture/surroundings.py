"""What the code of a model can reach by name outside of its modules: globals, closures, defaults, attributes of classes.

A forward may count there, or draw from a random generator that is kept there, and so compute something else at each
call. What its code names is compared before and after it ran; what stands behind functions in C is out of sight.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from fxopt.capture.contents import Contents, ContentsOf
from fxopt.errors import TraceError
from fxopt.objects import is_open

_METHODS = (property, staticmethod, classmethod)
_CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, torch.nn.Module, *_METHODS)


class Surroundings:
    """The values that the forwards of `modules`, and the functions and classes that they name, can reach."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        # Where names are looked up, in words, with what is there.
        self._scopes: list[tuple[str, Callable[[], Mapping[str, Any]]]] = []
        self._names: dict[int, set[str]] = {}
        self._seen: set[int] = set()
        for cls in {type(module): None for module in modules}:
            attributes = {name: value for base in cls.__mro__[::-1] for name, value in vars(base).items()}
            for value in (*cls.__mro__, cls.forward):
                self._follow(value, attributes)
        self._before = self._values()

    def changed(self) -> dict[str, bool]:
        """What is not as it was when this was made, in words, and whether there is a tensor in it now."""
        now = self._values()
        changed = {key for key in self._before.keys() | now.keys() if self._before.get(key) != now.get(key)}
        return {
            f"{name!r} of {self._scopes[scope][0]}": (scope, name) in now and now[scope, name].kept is None
            for scope, name in sorted(changed)
        }

    def copies(self) -> list[tuple[Any, Any]]:
        """Each list, dict, set and object among the values, with what is in it."""
        values = [value for _, read in self._scopes for value in read().values()]
        holders = [vars(value) if is_open(value) else value for value in values]
        return [(holder, copy.copy(holder)) for holder in holders if type(holder) in (list, dict, set)]

    def _values(self) -> dict[tuple[int, str], Contents]:
        contents = ContentsOf(id)
        return {
            (scope, name): contents(value)
            for scope, (_, read) in enumerate(self._scopes)
            for name, value in read().items()
            if not isinstance(value, _CODE)
        }

    def _follow(self, value: Any, methods: Mapping[str, Any]) -> None:
        """Add what a function or class holds, and what a function names in turn: globals, or one of its class's methods."""
        if isinstance(value, _METHODS):
            value = value.fget if isinstance(value, property) else value.__func__
        if id(value) in self._seen or not isinstance(value, (type, types.FunctionType)):
            return
        self._seen.add(id(value))
        package = (value.__module__ or "").partition(".")[0]
        if package in sys.stdlib_module_names or package in ("torch", "fxopt", "numpy"):
            return
        place = f"{value.__module__}.{value.__qualname__}"
        if isinstance(value, type):
            self._scopes.append((place, lambda: {k: v for k, v in vars(value).items() if k[:2] != "__"}))
            return
        names, known = set(_names(value.__code__)), value.__globals__
        if id(known) not in self._names:
            used = self._names[id(known)] = set()
            self._scopes.append(
                (value.__module__, lambda: {name: known[name] for name in used & known.keys()})
            )
        self._names[id(known)] |= names
        self._scopes.append((place, lambda: {**_held(value), **value.__dict__}))
        for name in names:
            self._follow(known.get(name), methods)
            self._follow(methods.get(name), methods)
        for held in _held(value).values():
            self._follow(held, methods)


@contextlib.contextmanager
def restored(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Give lists, dicts, sets and objects around the modules back what was in them; a fake tensor must not stay there."""
    copies = Surroundings(modules).copies()
    try:
        yield
    finally:
        for holder, before in copies:
            if _identities(holder) != _identities(before):
                holder.clear()
                holder.extend(before) if type(holder) is list else holder.update(before)


def refused_outside(change: str) -> TraceError:
    """The error for state outside of the model that a later call would read."""
    return TraceError(
        f"the forward changes {change}: state outside of the model that differs from call to call, such as a counter or "
        "a generator of random numbers, cannot live in a graph. Give it as an input, or make the module that does this a "
        "leaf (leaf_modules=...)."
    )


def _identities(holder: Any) -> list[int]:
    """Which objects are in a list, dict or set."""
    if type(holder) is set:
        return sorted(map(id, holder))
    return [id(item) for item in (*holder, *(holder.values() if type(holder) is dict else ()))]


def _names(code: types.CodeType) -> Iterator[str]:
    """The names of globals and attributes in code, and in the functions that are defined in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _held(function: types.FunctionType) -> dict[str, Any]:
    """What a function holds: variables of the functions around it, and defaults."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    held = {name: cell.cell_contents for name, cell in cells if cell != types.CellType()}
    held |= {f"default {n}": value for n, value in enumerate(function.__defaults__ or ())}
    return held | (function.__kwdefaults__ or {})
