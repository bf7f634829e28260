"""Fake tensors that a forward has left in the process: in a cache of a function, in a dict, in an attribute.

After the capture, the model would compute with them. The search covers everything that the executed code can reach by name.
`ReachableState` compares part of this state before and after a run; here, only fakes that exist now matter.
"""

from __future__ import annotations

import collections
import functools
import gc
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fxopt.capture.fakes.dynamic_shapes import SymbolicNumber
from fxopt.capture.fakes.fake_mode import CaptureFakeMode
from fxopt.capture.nodes.source_location import is_model_package
from fxopt.capture.recording.request import Request
from fxopt.objects import qualified_name
from fxopt.torch_internals import FakeTensor

_SEQUENCES = (list, tuple, set, frozenset, collections.deque)
_WRAPPERS = (
    *(types.MethodType, types.CellType, functools.partial, weakref.ref),
    *(staticmethod, classmethod, property),
)
# Names are followed through at most this many functions that were not seen to run.
_DEPTH = 2

# A value, its place in words, and a function that removes it; None if Python cannot remove it.
_Entry = tuple[Any, str, Callable[[], Any] | None]


def remove_fakes(request: Request, only_clear_caches: bool = False) -> list[str]:
    """Clear each `functools.lru_cache` with fakes; return the places of other fakes, removed unless `only_clear_caches`."""
    found = []
    seen: dict[int, Any] = {}  # keeps the values alive, so that no id is reused
    left: list[tuple[_Entry, int]] = [(entry, 0) for entry in _roots(request)]
    while left:
        (value, where, remove), depth = left.pop()
        if _is_fake(value) or (isinstance(value, tuple) and any(map(_is_fake, value))):
            found.append(where)
            if remove is not None and not only_clear_caches:
                remove()
            continue
        if id(value) in seen or _is_foreign(value):
            continue
        seen[id(value)] = value
        if isinstance(value, functools._lru_cache_wrapper):
            if _holds_fake(gc.get_referents(value)):
                value.cache_clear()
            value = value.__wrapped__
        if not isinstance(value, types.FunctionType):
            left += [(entry, depth) for entry in _entries(value, where)]
        elif depth < _DEPTH:
            left += [(entry, depth + 1) for entry in _of_function(value)]
    return found


def _roots(request: Request) -> Iterator[_Entry]:
    for held in (value for module in request.model.modules() for value in vars(module).values()):
        if isinstance(held, weakref.ref) and not isinstance(held(), torch.nn.Module):
            # A copy of the model refers to the same object.
            yield held, f"a {type(held()).__qualname__} to which the model refers", None
    for function, known in request.running.functions.items():
        yield from _named(set(function.co_names), known)
        # The function itself, which a cache may wrap; a local function cannot be found by its name.
        owner, *path = function.co_qualname.split(".")
        value = known.get(owner)
        for name in path:
            value = vars(value).get(name) if isinstance(value, type) else None
        yield value, f"{owner!r} of {known.get('__name__')}", None


def _named(names: set[str], known: dict[str, Any]) -> Iterator[_Entry]:
    """Yield the globals that code names, and the attributes that it may read of those that are Python modules."""
    module = known.get("__name__")
    for name in names & known.keys():
        value = known[name]
        if not isinstance(value, types.ModuleType):
            yield value, f"{name!r} of {module}", functools.partial(known.pop, name, None)
        elif is_model_package(value.__name__):
            inside = vars(value)
            for part in names & inside.keys():
                remove = functools.partial(inside.pop, part, None)
                yield inside[part], f"{part!r} of {value.__name__}", remove


def _of_function(function: types.FunctionType) -> Iterator[_Entry]:
    yield from _named(set(function.__code__.co_names), function.__globals__)
    place = qualified_name(function)
    for held in (*(function.__closure__ or ()), *(function.__defaults__ or ()), *vars(function).values()):
        yield held, place, None


def _entries(value: Any, where: str) -> Iterator[_Entry]:
    """Yield the values in a container, a class or an object."""
    if isinstance(value, type):
        for name, held in list(vars(value).items()):
            yield held, f"{name!r} of {value.__qualname__}", functools.partial(delattr, value, name)
        return
    if isinstance(value, dict):
        for key, held in list(dict.items(value)):  # the `items` of a subclass may import modules
            yield held, where, functools.partial(dict.pop, value, key, None)
        return
    if isinstance(value, _SEQUENCES):
        for held in gc.get_referents(value):
            yield held, where, getattr(value, "clear", None)
        return
    if isinstance(value, weakref.ref):
        yield value(), where, None
    if not isinstance(value, _WRAPPERS):
        yield type(value), where, None
    attributes = object.__getattribute__(value, "__dict__") if type(value).__dictoffset__ else None
    if type(attributes) is dict:
        for name, held in list(attributes.items()):
            yield held, f"{name!r} of a {type(value).__qualname__}", functools.partial(delattr, value, name)
    for held in gc.get_referents(value):  # slots, and attributes of types written in C
        if held is not attributes and held is not type(value):
            yield held, where, None


def _holds_fake(values: Any, depth: int = 3) -> bool:
    if any(map(_is_fake, values)):
        return True
    inside = [value for value in values if depth and isinstance(value, (dict, *_SEQUENCES))]
    return any(_holds_fake(gc.get_referents(value), depth - 1) for value in inside)


def _is_fake(value: Any) -> bool:
    return isinstance(value, SymbolicNumber) or (
        isinstance(value, FakeTensor) and isinstance(value.fake_mode, CaptureFakeMode)
    )


def _is_foreign(value: Any) -> bool:
    """Tell whether a value does not belong to a model: a Python module, a tensor, code, or part of a package such as torch."""
    if isinstance(value, (dict, *_SEQUENCES, *_WRAPPERS)):
        return False
    if isinstance(value, (types.ModuleType, torch.Tensor, types.CodeType)):
        return True
    own = isinstance(value, (type, types.FunctionType, functools._lru_cache_wrapper))
    return not is_model_package((value if own else type(value)).__module__)
