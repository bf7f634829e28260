"""State that the code of a model reaches by name outside of its modules: globals, closures, defaults, attributes of classes.

The state is compared before and after a forward, which may change it; state behind C functions is not visible. Modules reached
in this way count as well: the forward runs on a copy of the model, but these modules are the user's own.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import copy
import dataclasses
import functools
import threading
import types
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from typing import Any

import torch

from fxopt.capture.fakes.module_tree import recorded_modules
from fxopt.capture.fakes.snapshots import Snapshot, SnapshotMaker, value_of
from fxopt.capture.nodes.source_location import is_model_package
from fxopt.errors import FIRST_CALL, TraceError
from fxopt.objects import is_open, qualified_name
from fxopt.torch_internals import buffers_of, parameters_of

_METHODS = (property, staticmethod, classmethod)
_CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, *_METHODS)
_HOLDERS = (
    *(list, dict, set, collections.deque),
    *(collections.OrderedDict, collections.defaultdict, collections.Counter),
)
_ABSENT = object()


@dataclasses.dataclass(frozen=True)
class _Scope:
    """A namespace: its `place` in words, and functions to `read` its names and values, and to `write` and `remove` a name."""

    place: str
    read: Callable[[], Mapping[str, Any]]
    write: Callable[[str, Any], Any]
    remove: Callable[[str], Any]


class ReachableState:
    """The values that the recorded forwards of a model, and the functions and classes that they name, can reach.

    With `uncached`, the functions inside `functools.lru_cache` replace the cached ones until `restore` runs.
    """

    def __init__(self, model: torch.nn.Module, layers: Collection[int], uncached: bool = False) -> None:
        self._scopes: list[_Scope] = []
        self._names: dict[int, set[str]] = {}
        self._seen: set[int] = set()
        self._follow_classes(module for _, module in recorded_modules(model, layers))
        if uncached:
            for scope in self._scopes:
                for name, value in scope.read().items():
                    if (plain := _uncached(value)) is not value:
                        scope.write(name, plain)
        self._before: dict[tuple[int, str], Snapshot] = {}
        while found := self._modules(new := self._values(self._before)):
            self._before |= new
            for module, place in found.items():
                self._add_module(module, place)
            self._follow_classes(found)
        self._before |= new
        self._held = [(scope, dict(scope.read())) for scope in self._scopes]
        held = _holders([values for _, values in self._held])
        self._contents = [(holder, copy.copy(holder)) for holder in held]

    def changed(self) -> dict[str, bool]:
        """Return all changes since this object was created, in words, each with whether a tensor or a size is there now."""
        now = self._values()
        changed = {key for key in self._before.keys() | now.keys() if self._before.get(key) != now.get(key)}
        return {
            f"{name!r} of {self._scopes[scope].place}": (scope, name) in now
            and bool(now[scope, name].tensors or now[scope, name].sizes)
            for scope, name in sorted(changed)
        }

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the state at the end of the block, also after an error."""
        try:
            yield
        finally:
            self.restore()

    def restore(self) -> None:
        """Restore the initial values of all names, and the contents of the lists, dicts, sets and objects in these values."""
        for holder, before in self._contents:
            if _identities(holder) != _identities(before):
                holder.clear()
                holder.update(before) if isinstance(holder, (dict, set)) else holder.extend(before)
        for scope, values in self._held:
            now = dict(scope.read())
            for name in now.keys() - values.keys():
                scope.remove(name)
            for name, value in values.items():
                if now.get(name, _ABSENT) is not value:
                    scope.write(name, value)

    def _values(self, known: Container[tuple[int, str]] = ()) -> dict[tuple[int, str], Snapshot]:
        contents = SnapshotMaker(id, placed=id)
        return {
            (number, name): contents(value)
            for number, scope in enumerate(self._scopes)
            for name, value in scope.read().items()
            if not isinstance(value, _CODE) and (number, name) not in known
        }

    def _modules(self, values: Mapping[tuple[int, str], Snapshot]) -> dict[torch.nn.Module, str]:
        """Return the modules in these values that are new, with their places in words."""
        return {
            module: f"the {type(module).__qualname__} in {name!r} of {self._scopes[number].place}"
            for (number, name), value in values.items()
            for module in value.modules
            if id(module) not in self._seen and not isinstance(module, torch.jit.ScriptModule)
        }

    def _add_module(self, module: torch.nn.Module, place: str) -> None:
        self._seen.add(id(module))
        for held in (parameters_of(module), buffers_of(module), vars(module)):
            self._scopes.append(
                _Scope(place, functools.partial(dict, held), held.__setitem__, held.__delitem__)
            )

    def _follow_classes(self, modules: Iterable[torch.nn.Module]) -> None:
        """Follow the classes of modules, and the forwards, once each."""
        for cls in {type(module): None for module in modules}:
            for value in (*cls.__mro__, cls.forward):
                self._follow(value, _attributes(cls))

    def _follow(self, value: Any, methods: Mapping[str, Any]) -> None:
        """Add the state of a function or class, and follow what a function names: globals, and methods of its class."""
        if isinstance(value, _METHODS):
            value = value.fget if isinstance(value, property) else value.__func__
        if isinstance(value, functools._lru_cache_wrapper):
            value = value.__wrapped__
        if id(value) in self._seen or not isinstance(value, (type, types.FunctionType)):
            return
        self._seen.add(id(value))
        if not is_model_package(value.__module__ or ""):
            return
        place = qualified_name(value)
        if isinstance(value, type):
            write, remove = functools.partial(setattr, value), functools.partial(delattr, value)
            self._scopes.append(
                _Scope(
                    place,
                    lambda: {k: v for k, v in dict(vars(value)).items() if k[:2] != "__"},
                    write,
                    remove,
                )
            )
            return
        names = set(_names(value.__code__))
        modules = [m for m in map(value.__globals__.get, names) if isinstance(m, types.ModuleType)]
        reached = [value.__globals__, *(vars(m) for m in modules if is_model_package(m.__name__))]
        for known in reached:
            self._add_names(known, names)
        cells, own = _cells(value), value.__dict__
        self._scopes += [
            _Scope(
                place,
                lambda: _held(value),
                lambda name, held: setattr(cells[name], "cell_contents", held),
                lambda name: delattr(cells[name], "cell_contents"),
            ),
            _Scope(place, lambda: dict(own), own.__setitem__, own.__delitem__),
        ]
        for name in names:
            for found in (methods, *reached):
                self._follow(named := found.get(name), methods)
                cls = named if isinstance(named, type) else type(named)
                called = _attributes(cls) if is_model_package(cls.__module__) else {}
                for method in names & called.keys():
                    self._follow(called[method], called)
        for held in _held(value).values():
            self._follow(held, methods)

    def _add_names(self, known: dict[str, Any], names: set[str]) -> None:
        """Add these names of a Python module."""
        if id(known) not in self._names:
            used = self._names[id(known)] = set()
            named = lambda: {name: known[name] for name in used & known.keys()}  # noqa: E731
            self._scopes.append(
                _Scope(str(known.get("__name__")), named, known.__setitem__, known.__delitem__)
            )
        self._names[id(known)] |= names


def _attributes(cls: type) -> dict[str, Any]:
    """Return the attributes of a class, including inherited ones."""
    return {name: value for base in cls.__mro__[::-1] for name, value in vars(base).items()}


def _uncached(value: Any) -> Any:
    """Return the function inside `functools.lru_cache`, also inside a static method."""
    if isinstance(value, staticmethod):
        plain = _uncached(value.__func__)
        return value if plain is value.__func__ else staticmethod(plain)
    return value.__wrapped__ if isinstance(value, functools._lru_cache_wrapper) else value


def refused_outside(change: str) -> TraceError:
    """Return the error for state outside of the model that a later call would read."""
    return TraceError(
        f"the forward changes {change}: state outside of the model that differs from call to call, such as a counter or "
        "a generator of random numbers, cannot live in a graph. Give it as an input, or make the module that does this a "
        f"leaf (leaf_modules=...){FIRST_CALL}."
    )


def _holders(names: Any) -> list[Any]:
    """Return the lists, dicts, sets and attribute dicts of objects in a value, nested ones included."""
    found: dict[int, Any] = {}
    left = [names]
    while left:
        value = left.pop()
        value = value_of(value) if isinstance(value, contextvars.ContextVar) else value
        opened = is_open(value) or isinstance(value, (types.SimpleNamespace, threading.local))
        holder = vars(value) if opened and hasattr(value, "__dict__") else value
        if id(holder) in found or type(holder) not in (*_HOLDERS, tuple):
            continue
        found[id(holder)] = holder
        left += _items(holder)
    return [holder for holder in found.values() if type(holder) is not tuple]


def _items(holder: Any) -> list[Any]:
    """Return the values in a list, dict or set, and the keys of a dict."""
    return [*holder, *(holder.values() if isinstance(holder, dict) else ())]


def _identities(holder: Any) -> list[int]:
    """Return the identities of the objects in a list, dict or set."""
    identities = map(id, _items(holder))
    return sorted(identities) if isinstance(holder, set) else list(identities)


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes in code, and in the functions that are defined in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _cells(function: types.FunctionType) -> dict[str, Any]:
    """Return the closure cells of a function by variable name."""
    return dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))


def _held(function: types.FunctionType) -> dict[str, Any]:
    """Return the values that a function holds: closure variables and defaults."""
    cells = _cells(function).items()
    held = {name: cell.cell_contents for name, cell in cells if cell != types.CellType()}
    held |= {f"default {n}": value for n, value in enumerate(function.__defaults__ or ())}
    return held | (function.__kwdefaults__ or {})
