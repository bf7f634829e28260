"""Checks the nodes of a saved graph, so that the code that is generated from it does what its nodes say."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.fx import Node

from fxopt import objects
from fxopt.rewriting.edits import Reference
from fxopt.rewriting.transformation import Transformation
from fxopt.saving.allowed import BUILTINS, NameRefused, Names, is_identifier, qualified_name

_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), range),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, Node, Reference, enum.Enum),
)

# Functions that look up, make or change what they are told.
_BY_NODES = (getattr, objects.build_object, objects.find, objects.set_attributes, objects.set_items)


def check_node(names: Names, op: str, target: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
    """Raise NameRefused unless a node is a call that a saved graph may make.

    Args:
        names: what may be named.
        op: of the node.
        target: of the node; a function, or a text.
        args: of the node.
        kwargs: of the node.
    """
    for argument in (*args, *kwargs.values()):
        _check_argument(names, argument)
    for name in kwargs:
        check_name(name)
    if op == "call_function":
        _check_function(names, target, args, kwargs)
    elif op == "call_method":
        names.method(target)
    elif op == "placeholder":
        check_name(str(target).lstrip("*"))
    elif op in ("get_attr", "call_module"):
        check_path(target)
    elif (op, target) != ("output", "output"):
        raise NameRefused(f"a node of the kind {op!r} with the target {target!r}")


def check_path(path: Any) -> None:
    """Raise NameRefused unless a text is the qualified name of a module or tensor."""
    parts = path.split(".") if isinstance(path, str) else [""]
    if not all(f"_{part}".isidentifier() and part and not part.startswith("__") for part in parts):
        raise NameRefused(f"the path {path!r}")


def check_name(name: Any) -> None:
    """Raise NameRefused unless a text may stand in code as the name of a value."""
    if not is_identifier(name):
        raise NameRefused(f"the name {name!r}")


def check_value(names: Names, value: Any) -> None:
    """Raise NameRefused where a layer or an object would call, in the place of a method, what only nodes may, or layers of a class."""
    makes_layers = isinstance(value, type) and issubclass(value, torch.nn.Module | Transformation)
    if (makes_layers or any(value is each for each in _BY_NODES)) and not _is_trusted(names, value):
        raise NameRefused(f"{qualified_name(value)} as a value")


def _is_trusted(names: Names, value: Any) -> bool:
    return any(value is each for each in names.trusted.values())


def _check_argument(names: Names, value: Any) -> None:
    """The code has a value as it reads; no other kind may stand there, as a module that describes itself as it likes."""
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, slice):
        value = [value.start, value.stop, value.step]
    if isinstance(value, list | tuple | set | frozenset):
        for item in value:
            _check_argument(names, item)
    elif isinstance(value, type):
        check_value(names, value)
    elif not isinstance(value, _PLAIN) and not _is_trusted(names, value):
        raise NameRefused(f"a {type(value).__name__} as an argument")


def _check_function(names: Names, target: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
    if names.target(names.of(target)) != target:
        raise NameRefused(str(target))
    if target in BUILTINS and kwargs and target not in (dict, int):  # a `key` is a function that they call
        raise NameRefused(f"{target.__name__} with keywords")
    if target in _BY_NODES and kwargs:
        raise NameRefused(f"{target.__name__} with keywords")
    if target is getattr:
        _check_attributes(args[1:2])
    elif target is objects.build_object:
        names.target(args[0])
    elif target is objects.find:
        check_value(names, names.find(args[0]))
    if target in (objects.build_object, objects.set_attributes):
        if not isinstance(args[1], dict):
            raise NameRefused(f"{target.__name__} of attributes that are not written out")
        _check_attributes(args[1])
        for name in args[1]:
            if callable(getattr(torch.Tensor, name, None)) and name != "values":
                raise NameRefused(f"the attribute {name!r}, by which code would call a method of a tensor")


def _check_attributes(attributes: Iterable[Any]) -> None:
    for name in attributes:
        check_name(name)
        if name.startswith("__"):
            raise NameRefused(f"the attribute {name!r}")
