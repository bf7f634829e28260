"""Snapshots of the objects that a module holds, to compare them before and after a forward."""

from __future__ import annotations

import collections
import collections.abc
import contextlib
import contextvars
import dataclasses
import functools
import itertools
import logging
import pickle
import random
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch

from fxopt.capture.fakes.dynamic_shapes import SymbolicNumber
from fxopt.capture.fakes.unusable_number import is_unusable
from fxopt.objects import attributes, is_open

_SEQUENCES = (list, collections.deque)
_CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, torch.nn.Module)
_TOLD = (logging.Filterer, logging.LoggerAdapter)  # they cache which levels are enabled
_PLAIN = (bool, int, float, complex, str, bytes, type(None), itertools.count)


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The contents of an object; `tensors`, `sizes` and `modules` are the tensors, symbolic sizes and modules in it."""

    parts: Any
    kept: Any = dataclasses.field(compare=False)  # the object itself
    tensors: tuple[torch.Tensor, ...] = dataclasses.field(default=(), compare=False)
    sizes: tuple[Any, ...] = dataclasses.field(default=(), compare=False)
    modules: tuple[torch.nn.Module, ...] = dataclasses.field(default=(), compare=False)
    # True if a function in the object is a closure, whose variables `copy.deepcopy` does not copy.
    in_closure: bool = dataclasses.field(default=False, compare=False)


class SnapshotMaker:
    """Describes objects, each once; `named`, `sized` and `placed` return the names of a tensor, a size and a module."""

    def __init__(
        self,
        named: Callable[[torch.Tensor], Any],
        sized: Callable[[Any], Any] = str,
        placed: Callable[[torch.nn.Module], Any] = lambda module: None,
    ) -> None:
        self._named, self._sized, self._placed = named, sized, placed
        self._known: dict[int, Snapshot] = {}
        # Mutable objects, numbered in the order in which they were met in the current object. A reference keeps temporary
        # objects alive, so that no other object gets their identity.
        self._met: dict[int, tuple[int, Any]] = {}
        self._tensors: list[torch.Tensor] = []
        self._sizes: list[Any] = []
        self._modules: list[torch.nn.Module] = []
        self._in_closure = False

    def __call__(self, value: Any) -> Snapshot:
        if id(value) not in self._known:
            self._tensors, self._sizes, self._modules, self._met, self._in_closure = [], [], [], {}, False
            parts = self._parts(value)
            held = tuple(self._tensors), tuple(self._sizes), tuple(self._modules)
            self._known[id(value)] = Snapshot(parts, value, *held, self._in_closure)
        return self._known[id(value)]

    def _parts(self, value: Any) -> Any:
        if is_unusable(value):
            self._sizes.append(value)
            return "a size of an earlier call"
        if isinstance(value, _PLAIN):
            return type(value).__name__, repr(value)
        if isinstance(value, torch.Tensor):
            self._tensors.append(value)
            return self._named(value)
        if isinstance(value, SymbolicNumber):
            self._sizes.append(value)
            return self._sized(value)
        kind = type(value).__qualname__
        if isinstance(value, torch.nn.Module):
            self._modules.append(value)
            return kind, self._placed(value)
        if id(value) in self._met:
            return kind, self._met[id(value)][0]
        if isinstance(value, (set, frozenset)):
            return kind, frozenset(map(self._parts_of_one, tuple(value)))
        if isinstance(value, tuple):
            if isinstance(value, torch.Size) and any(type(size) is not int for size in value):
                self._sizes.append(value)
            return kind, tuple(map(self._parts, value))
        if (state := generator_state(value)) is not None:
            return kind, state
        self._met[id(value)] = len(self._met), value
        if isinstance(value, _SEQUENCES):
            return kind, tuple(map(self._parts, tuple(value)))  # another thread may change it meanwhile
        if isinstance(value, dict):
            return kind, tuple((self._parts(key), self._parts(item)) for key, item in tuple(value.items()))
        if is_open(value):
            return kind, self._parts(attributes(value))
        if isinstance(value, weakref.ref):
            return kind, self._parts(value())
        if isinstance(value, contextvars.ContextVar):
            return kind, self._parts(value_of(value))
        if isinstance(value, functools.partial):
            return kind, self._parts((value.func, value.args, value.keywords))
        if isinstance(value, types.MethodType):
            return kind, self._parts((value.__self__, value.__func__))
        if isinstance(value, types.FunctionType) and value.__closure__:
            self._in_closure = True
            filled = [cell.cell_contents for cell in value.__closure__ if cell != types.CellType()]
            return kind, self._parts(tuple(filled))
        if isinstance(value, collections.abc.Iterator) and (state := _place(value)) is not None:
            return kind, self._parts(state)
        if (held := _memory(value)) is not None:
            return kind, held
        if isinstance(value, (types.SimpleNamespace, threading.local, BaseException)):
            return kind, self._parts((vars(value), *getattr(value, "args", ())))
        held = {} if isinstance(value, (*_CODE, *_TOLD)) else attributes(value)
        return (kind, self._parts(held)) if held else kind  # nothing more is known about it

    def _parts_of_one(self, item: Any) -> Any:
        """The parts of one item of a set; objects met in other items do not count, because a set has no order."""
        met = dict(self._met)
        parts = self._parts(item)
        self._met = met
        return parts


def _place(iterator: Any) -> Any:
    """The position of a Python iterator in a comparable form; None if it cannot be determined."""
    if isinstance(iterator, types.GeneratorType):
        frame = iterator.gi_frame
        return frame and (frame.f_lasti, frame.f_locals)
    if type(iterator).__module__ not in ("builtins", "itertools"):
        return None
    with warnings.catch_warnings(), contextlib.suppress(TypeError, RuntimeError):
        warnings.simplefilter("ignore", DeprecationWarning)
        return iterator.__reduce__()[1:]
    return None


def value_of(variable: contextvars.ContextVar[Any]) -> Any:
    """The value of a context variable, or its default; None if it has neither."""
    try:
        return variable.get()
    except LookupError:
        return None


def _memory(value: Any) -> Any:
    """The contents of a buffer, such as a numpy array or a bytearray, in a comparable form; None for other values."""
    try:
        memory = memoryview(value)
    except (TypeError, ValueError, BufferError):
        return None
    return memory.format, memory.shape, hash(memory.tobytes())


def generator_state(value: Any) -> Any:
    """The state of a random generator of Python or numpy in a comparable form; None for other values."""
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return value.getstate()
    return pickle.dumps(value) if type(value).__module__.startswith("numpy.random") else None
