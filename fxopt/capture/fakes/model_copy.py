"""`copy.deepcopy` that also copies functions with references to objects: closures, and caches of bound methods.

Otherwise a lambda over `self`, a hook that stores a feature, or a child's weak reference to its parent would still read and
write the user's model. The globals that a function names are not part of the model and are not copied.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from fxopt.objects import is_open
from fxopt.torch_internals import MODULES

T = TypeVar("T")

STAND_IN = "stand-in for a tensor"
"""Key in `memo` of an optional function that returns the stand-in for a tensor, or None to copy the tensor."""


def deepcopy_with_closures(value: T, memo: dict[Any, Any]) -> T:
    """Make a deep copy; `memo` maps identities of objects to replacements. The caller holds the capture's lock."""
    with _functions_copied():
        return copy.deepcopy(value, memo)


@contextlib.contextmanager
def _functions_copied() -> Iterator[None]:
    """Have `copy.deepcopy` copy functions in this thread."""
    module: Any = copy
    dispatch: dict[type, Any] = module._deepcopy_dispatch
    atomic = getattr(module, "_atomic_types", None)  # Python 3.14 looks here first
    before = {kind: dispatch.get(kind) for kind in _COPIERS}
    thread = threading.get_ident()
    for kind, copier in _COPIERS.items():
        dispatch[kind] = lambda value, memo, copier=copier: (
            copier(value, memo) if threading.get_ident() == thread else value
        )
    if atomic is not None:
        module._atomic_types = atomic - set(_COPIERS)
    try:
        yield
    finally:
        for kind, found in before.items():
            if found is None:
                del dispatch[kind]
            else:
                dispatch[kind] = found
        if atomic is not None:
            module._atomic_types = atomic


def uncopied(model: torch.nn.Module, memo: dict[Any, Any]) -> str:
    """Describe the attribute of the model that cannot be copied."""
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            try:
                copy.deepcopy(value, dict(memo)) if key != MODULES else None
            except Exception:
                return f" (the attribute {f'{name}.{key}'.lstrip('.')!r})"
    return ""


def _copy_function(function: types.FunctionType, memo: dict[int, Any]) -> types.FunctionType:
    """Copy a closure with its variables; plain functions and module-level functions are returned unchanged."""
    if not function.__closure__ or _is_global(function):
        return function
    cells = [memo.setdefault(id(cell), types.CellType()) for cell in function.__closure__]
    new = [cell for cell in cells if cell == types.CellType()]
    made = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells)
    )
    memo[id(function)] = made
    for name in ("__kwdefaults__", "__qualname__", "__module__", "__doc__", "__annotations__"):
        setattr(made, name, getattr(function, name))
    for cell, original in zip(cells, function.__closure__, strict=True):
        if any(cell is each for each in new) and original != types.CellType():
            cell.cell_contents = _copied_or_same(original.cell_contents, memo)
    made.__dict__.update({name: _copied_or_same(value, memo) for name, value in function.__dict__.items()})
    return made


def _copy_cache(cache: Any, memo: dict[int, Any]) -> Any:
    """Copy the `functools.lru_cache` of a closure or bound method as an empty cache, so that both caches stay separate."""
    function = cache.__wrapped__
    copied = _copied_or_same(function, memo)
    return cache if copied is function else functools.lru_cache(**cache.cache_parameters())(copied)


def _copy_reference(reference: weakref.ref[Any], memo: dict[int, Any]) -> weakref.ref[Any]:
    """Make a weak reference to the copy of a module or object; it keeps a copied object alive, as the model may not."""
    target = reference()
    if not isinstance(target, torch.nn.Module) and not is_open(target):
        return reference
    made = _Reference(copied := _copied_or_same(target, memo))
    made.held = None if isinstance(target, torch.nn.Module) else copied
    return made


class _Reference(weakref.ref[Any]):
    held: Any


def _copy_tensor(tensor: torch.Tensor, memo: dict[Any, Any]) -> torch.Tensor:
    """Copy a tensor; one with autograd history from an earlier call is detached, because torch cannot deepcopy it."""
    if tensor.is_leaf:
        stand_in = memo[STAND_IN](tensor) if STAND_IN in memo else None
        return tensor.__deepcopy__(memo) if stand_in is None else stand_in  # type: ignore[no-any-return]
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _copied_or_same(value: Any, memo: dict[int, Any]) -> Any:
    """A copy, or the value itself if Python cannot copy it, such as a lock or a file."""
    try:
        return copy.deepcopy(value, memo)
    except Exception:
        return value


def _is_global(function: types.FunctionType) -> bool:
    found: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function


_LOCKS = type(threading.Lock()), type(threading.RLock())
_COPIERS: dict[type, Callable[[Any, Any], Any]] = {
    types.FunctionType: _copy_function,
    functools._lru_cache_wrapper: _copy_cache,
    **dict.fromkeys((types.ModuleType, *_LOCKS), lambda value, memo: value),
    weakref.ref: _copy_reference,
    torch.Tensor: _copy_tensor,
}
