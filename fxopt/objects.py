"""Python objects that contain tensors, such as the cache of a decoder: their content, and how a graph makes and changes them.

An object is *open* if its class is written in Python, and all its state is in its attributes, in `__dict__` or in slots.
Class and attributes suffice to make such an object again. Nodes that call `build_object`, `set_attributes` and `set_items`
make and change objects when a graph runs.
"""

from __future__ import annotations

import builtins
import collections
import copy
import dataclasses
import importlib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.fx.node import has_side_effect

from fxopt.torch_internals import OpOverload, OpOverloadPacket


def why_no_inputs(args: Any, kwargs: Any) -> str | None:
    """Return the reason why `args` and `kwargs` are not example inputs for `f(*args, **kwargs)`; `None` if they are.

    A tensor is refused as `args`, because Python would unpack it row by row.
    """
    if isinstance(args, Mapping):
        return "args must be a tuple of example inputs, not a dict: write `kwargs={...}` for inputs by name"
    if not isinstance(args, Sequence) or isinstance(args, str):
        given = "a tensor" if isinstance(args, torch.Tensor) else f"a {type(args).__name__}"
        return f"args must be a tuple of example inputs, not {given}: write `(x,)`"
    if kwargs is not None and not isinstance(kwargs, Mapping):
        return f"kwargs must be a dict of example inputs by name, not a {type(kwargs).__name__}"
    return None


def is_open(value: Any) -> bool:
    """Tell whether an object consists of its class and attributes only, so that it can be made again from these."""
    cls = type(value)
    if isinstance(value, _VALUES) or not (hasattr(value, "__dict__") or "__slots__" in vars(cls)):
        return False
    if any(hasattr(cls, name) for name in ("__setstate__", "__getnewargs__", "__getnewargs_ex__")):
        return False
    if any(getattr(cls, name) is not getattr(object, name) for name in _PICKLING):
        return False
    try:
        parts: Any = object.__reduce_ex__(value, 2)
        _, arguments, state, *items = parts
    except TypeError:  # a class with memory of its own, written in C
        return False
    return len(arguments) == 1 and isinstance(state, (dict, tuple, type(None))) and not any(items)


def is_mutable(value: Any) -> bool:
    """Tell whether a value is a container that code may change: an open object, a list or a dict."""
    return type(value) in (list, dict, collections.OrderedDict) or is_open(value)


def entries(container: Any) -> dict[Any, Any]:
    """Return the entries of a list, a tuple, a dict or an open object, by index, key or name."""
    if isinstance(container, list | tuple):
        return dict(enumerate(container))
    return dict(container if isinstance(container, dict) else attributes(container))


def attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, including those in slots."""
    state: Any = object.__getstate__(value)
    named, in_slots = state if isinstance(state, tuple) else (state, {})
    return {**in_slots, **(named or {})}


def key_kind(container: Any) -> str:
    """How the entries of a container are reached: `item` for `container[key]`, `attr` for `container.key`."""
    return "item" if isinstance(container, (list, tuple, dict)) else "attr"


def rebuilt(container: Any, contents: dict[Any, Any]) -> Any:
    """Make a new container of the same class with these contents."""
    cls: Any = type(container)
    if isinstance(container, list):
        return cls(contents.values())
    if isinstance(container, dict):
        return with_order(cls(contents), contents)
    made = cls.__new__(cls)
    _set(made, contents)
    return made


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested containers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, _ITERATED):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))
    elif is_open(value):
        for item in entries(value).values():
            yield from tensors_in(item)


def mapped(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Apply `leaf` to the leaves of nested tuples, lists, dicts and slices, and return the same nesting."""
    if type(value) in (tuple, list):
        return type(value)(mapped(item, leaf) for item in value)
    if type(value) is dict:
        return {key: mapped(item, leaf) for key, item in value.items()}
    if type(value) is slice:
        return slice(mapped(value.start, leaf), mapped(value.stop, leaf), mapped(value.step, leaf))
    return leaf(value)


def nested(value: Any, leaf: Callable[[torch.Tensor], Any]) -> Any:
    """Return lists and dicts that are nested like the value, with `leaf(tensor)` for tensors and None for other leaves."""
    if isinstance(value, torch.Tensor):
        return leaf(value)
    if isinstance(value, tuple | list):
        return [nested(item, leaf) for item in value]
    if isinstance(value, dict) or is_open(value):
        return {key: nested(item, leaf) for key, item in entries(value).items()}
    return None


def build_object(name: str, state: dict[str, Any]) -> Any:
    """Make an object of the class of this qualified name with these attributes, without running its `__init__`."""
    cls: Any = find(name)
    made = cls.__new__(cls)
    _set(made, _plain(state))
    return made


def in_order(output: Any, names: Sequence[str]) -> Any:
    """Copy an OrderedDict, such as a `ModelOutput`, with its entries in the order of these names."""
    return with_order(copy.copy(output), names)


def with_order(made: Any, names: Iterable[Any]) -> Any:
    """Put the entries of an OrderedDict in the order of these names: a new `ModelOutput` has its fields in class order."""
    if isinstance(made, collections.OrderedDict) and [*made] != [*names]:
        for name in names:
            collections.OrderedDict.move_to_end(made, name)
    return made


@has_side_effect
def set_attributes(target: Any, changed: dict[str, Any], removed: Sequence[str] = ()) -> None:
    """Set and delete attributes of an object without calling its `__setattr__`."""
    _set(target, _plain(changed))
    for name in removed:
        if name in getattr(target, "__dict__", ()):
            del target.__dict__[name]
        else:
            object.__delattr__(target, name)


@has_side_effect
def set_items(target: Any, items: Any) -> None:
    """Replace the content of a list or a dict in place."""
    if isinstance(target, list):
        target[:] = _plain(items)
    else:
        target.clear()
        target.update(_plain(items))


def _set(target: Any, changed: dict[str, Any]) -> None:
    if isinstance(target, torch.nn.Module | type | types.FunctionType):  # whose attributes may be called
        raise TypeError(f"a graph gives no attributes to a {type(target).__name__}")
    for name, value in changed.items():
        if isinstance(getattr(type(target), name, None), types.MemberDescriptorType):
            object.__setattr__(target, name, value)  # a slot
        else:
            target.__dict__[name] = value


def qualified_name(value: Any) -> str:
    """The name by which a function, operator or class is imported, according to its own attributes."""
    if isinstance(value, OpOverload | OpOverloadPacket):
        return f"torch.ops.{str(value).replace('::', '.')}"
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    return f"{getattr(value, '__module__', None)}.{name}" if name else repr(value)


def find(name: str) -> Any:
    """Import the object of this qualified name; raise ImportError or AttributeError if it does not exist."""
    parts = name.split(".")
    if len(parts) == 1:
        return getattr(builtins, name)
    for cut in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise ImportError(name)


def is_found(name: str, value: Any) -> bool:
    """Tell whether `find(name)` returns this value."""
    try:
        return bool(find(name) == value)
    except (ImportError, AttributeError):
        return False


def _plain(value: Any) -> Any:
    """Convert torch.fx's immutable lists and dicts, which an interpreter passes, to those of Python."""
    if isinstance(value, immutable_list):
        return [_plain(item) for item in value]
    if isinstance(value, immutable_dict):
        return {key: _plain(item) for key, item in value.items()}
    return tuple(map(_plain, value)) if type(value) is tuple else value


# Never open objects, though some have a `__dict__`.
_VALUES = (type, torch.nn.Module, torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
_ITERATED: Any = (
    *(tuple, list, set, frozenset, collections.deque),
    *(type({}.keys()), type({}.values()), type({}.items())),
)
_PICKLING = ("__reduce__", "__reduce_ex__", "__getstate__")
