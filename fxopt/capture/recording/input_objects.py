"""Inputs: which objects a graph takes apart, how their fakes are made and compared, and which tensors accept any dtype."""

from __future__ import annotations

import collections
import dataclasses
import numbers
import operator
from collections.abc import Mapping
from typing import Any

import torch

from fxopt.objects import attributes, entries, is_mutable, is_open, rebuilt, with_order
from fxopt.operators import Fact, facts_of

_CASTS = {"bool", "int", "long", "short", "float", "double", "half", "bfloat16"}
_COMPARISONS = {operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge}


def is_taken_apart(value: Any, inside: bool) -> bool:
    """Tell whether the graph takes an object apart; one that can be compared and holds no tensors is a constant."""
    if not is_open(value) or (dataclasses.is_dataclass(value) and not inside):
        return False
    cls: Any = type(value)
    return cls.__eq__ is object.__eq__ or any(map(has_parts, attributes(value).values()))


def has_parts(value: Any) -> bool:
    """Tell whether there is a tensor, or an object that the graph takes apart, in a value."""
    if isinstance(value, torch.Tensor) or is_taken_apart(value, False):
        return True
    if isinstance(value, dict):
        return any(map(has_parts, value.values()))
    if isinstance(value, (tuple, list)):
        return any(map(has_parts, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return any(has_parts(getattr(value, field.name)) for field in dataclasses.fields(value))
    return False


def snapshot(value: Any) -> Any:
    """Copy a fake, to keep its state before the forward changes it."""
    if type(value) is tuple:
        return tuple(map(snapshot, value))
    if not is_mutable(value):
        return value
    return rebuilt(value, {key: snapshot(item) for key, item in entries(value).items()})


def hides_tensors(value: Any, depth: int = 3) -> bool:
    """Tell whether an object that is not a known container holds tensors, or is an array."""
    if isinstance(value, torch.Tensor) or (hasattr(value, "__array__") and getattr(value, "shape", ()) != ()):
        return True
    if depth == 0 or isinstance(value, (type, torch.nn.Module)):
        return False
    containers = (tuple, list, set, frozenset, collections.deque)
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, containers) else ()
    return any(hides_tensors(item, depth - 1) for item in [*items, *getattr(value, "__dict__", {}).values()])


def filled(value: Any, items: dict[Any, Any]) -> Any:
    """Build a container like `value` with these items; fields that a dataclass's `__init__` does not accept are set later."""
    cls: Any = type(value)
    if isinstance(value, (tuple, list)):
        return cls(*items.values()) if hasattr(value, "_fields") else cls(items.values())
    if cls is collections.defaultdict:
        return cls(value.default_factory, items)
    if cls in (dict, collections.OrderedDict):
        return cls(items)
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    later = {field.name for field in fields if not field.init}
    made = cls(**{name: item for name, item in items.items() if name not in later})
    for name in later & items.keys():
        object.__setattr__(made, name, items[name])  # the dataclass may be frozen
    return with_order(made, items)


def identities(container: Any) -> list[tuple[Any, int]]:
    return [(key, id(value)) for key, value in entries(container).items()]


def takes_any_dtype(node: torch.fx.Node) -> bool:
    """Tell whether the graph converts an input, or its views, to a fixed dtype before any other use."""
    return all(
        _fixes_dtype(user, node) or (_views(user, node) and takes_any_dtype(user)) for user in node.users
    )


def _fixes_dtype(user: torch.fx.Node, node: torch.fx.Node) -> bool:
    """Tell whether the result of a call has the same dtype for any dtype of its first argument."""
    if user.args[:1] != (node,) or node in _others(user):
        return False
    if not isinstance(user.meta.get("val"), torch.Tensor):
        return user.target == "size" or (user.target is getattr and user.args[1] in ("device", "shape"))
    if user.target in _COMPARISONS:
        return isinstance(user.args[1], numbers.Number)
    options = (*user.args[1:], *user.kwargs.values())
    named = user.target in ("to", "type") and any(isinstance(option, torch.dtype) for option in options)
    return user.op == "call_method" and (user.target in _CASTS or named)


def _views(user: torch.fx.Node, node: torch.fx.Node) -> bool:
    """Tell whether a call returns a view of its first argument and reads no other tensor."""
    facts = facts_of(user)
    given = (*user.args, *user.kwargs.values())
    reinterprets = any(isinstance(option, torch.dtype) for option in given)  # `x.view(torch.int32)`
    is_view = Fact.VIEW in facts and not facts & (Fact.RANDOM | Fact.SEVERAL) and not reinterprets
    return is_view and user.args[:1] == (node,) and node not in _others(user)


def _others(user: torch.fx.Node) -> set[torch.fx.Node]:
    """The nodes among the arguments of a call, except the first argument."""
    found: set[torch.fx.Node] = set()
    torch.fx.node.map_arg((user.args[1:], dict(user.kwargs)), found.add)
    return found
