"""Writes containers of Python's library, and dataclasses, as the calls that build them."""

from __future__ import annotations

import collections
import dataclasses
import keyword
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fxopt.capture.nodes.call_targets import importable
from fxopt.errors import TraceError
from fxopt.objects import attributes, find, in_order, is_found, is_open, qualified_name

_VIEWS = {type({}.keys()): "keys", type({}.values()): "values", type({}.items()): "items"}


def write_container(
    value: Any, argument: Callable[[Any], Any], create: Callable[..., Any], where: Callable[[], str]
) -> Any:
    """The node that builds a container or dataclass, written by `create` from parts by `argument`; None for other values."""

    def call(target: Any, *args: Any) -> Any:
        return create("call_function", target, tuple(map(argument, args)), {}, None)

    kind: Any = type(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return call(importable(kind), *value)
    if kind is collections.OrderedDict:
        return call(kind, list(value.items()))
    if kind is collections.Counter and not vars(value):
        return call(kind, dict(value))
    if kind is types.SimpleNamespace and all(map(_is_keyword, vars(value))):
        return create("call_function", kind, (), {n: argument(v) for n, v in vars(value).items()}, None)
    if kind is collections.defaultdict:
        made_by = value.default_factory
        name = qualified_name(made_by)
        if made_by is None or is_found(name, made_by):
            factory = made_by and create("call_function", find, (name,), {}, None)
            pairs = [(key, argument(item)) for key, item in value.items()]
            return create("call_function", kind, (factory, pairs), {}, None)
    if kind in (set, frozenset):
        return call(kind, list(value))
    if kind is collections.deque:
        return call(kind, list(value), value.maxlen)
    if kind in _VIEWS:
        return create("call_method", _VIEWS[kind], (call(dict, list(value.mapping.items())),), {}, None)
    # If the class has its own code for fields, the object is built from its current fields, as other open objects.
    is_made = _computes(kind) and is_open(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and not is_made:
        made = create("call_function", importable(kind), (), _fields(value, argument, where), None)
        names = [field.name for field in dataclasses.fields(value)]
        held: Any = value
        order = [*held] if isinstance(value, collections.OrderedDict) else []
        # The forward may have set a later field first.
        is_moved = order != [name for name in names if name in order]
        return create("call_function", in_order, (made, order), {}, None) if is_moved else made
    for base in (dict, list, tuple):
        if isinstance(value, base) and kind is not base and _is_made_as(kind, base) and not attributes(value):
            return call(importable(kind), base(value))
    return None


def check_keys(mapping: Mapping[Any, Any], where: str) -> None:
    """Raise TraceError if code cannot express a key of a dict."""
    for key in mapping:
        if isinstance(key, torch.Tensor) or is_open(key):
            raise TraceError(
                f"a dict has a {type(key).__name__} as a key, which no code of a graph can name: use a text or a number. {where}"
            )


def _is_keyword(name: Any) -> bool:
    """Tell whether a name is valid for a keyword argument."""
    return isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name)


def _computes(kind: Any) -> bool:
    """Tell whether a dataclass has its own code for setting fields; code that Python generates has no file."""
    code = [getattr(method, "__code__", None) for method in (kind.__init__, kind.__setattr__)]
    return hasattr(kind, "__post_init__") or any(each and each.co_filename != "<string>" for each in code)


def _is_made_as(kind: Any, base: Any) -> bool:
    """Tell whether a class written in Python is constructed and iterated like its base container."""
    is_same = all(getattr(kind, name) is getattr(base, name) for name in ("__init__", "__new__", "__iter__"))
    return is_same and type(kind).__call__ is type.__call__ and bool(kind.__dictoffset__)


def _fields(value: Any, argument: Callable[[Any], Any], where: Callable[[], str]) -> dict[str, Any]:
    """The arguments that build a dataclass (a ModelOutput, for example), without those that are the default."""
    fields = [field for field in dataclasses.fields(value) if field.init]
    held = {**attributes(value), **(value if isinstance(value, dict) else {})}
    if extra := set(held) - {field.name for field in fields}:
        raise TraceError(
            f"a {type(value).__name__} carries {sorted(extra)} besides its fields, which a graph cannot give back. {where()}"
        )
    given = {f.name: getattr(value, f.name) for f in fields}
    return {f.name: argument(given[f.name]) for f in fields if given[f.name] is not f.default}
