"""Checks the nodes of a saved graph, so that the code that is generated from it does what its nodes say."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.fx import Node

from fxopt import objects
from fxopt.rewriting.edits import Reference
from fxopt.saving.allowed import BUILTINS, NameRefused, Names, is_identifier

_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), range),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, Node, Reference, enum.Enum),
)


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
        _check_argument(argument)
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


def _check_argument(value: Any) -> None:
    """The code has a value as it reads; no other kind may stand there, as a module that describes itself as it likes."""
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, slice):
        value = [value.start, value.stop, value.step]
    if isinstance(value, list | tuple | set | frozenset):
        for item in value:
            _check_argument(item)
    elif isinstance(value, torch.nn.Module) or not (isinstance(value, _PLAIN) or callable(value)):
        raise NameRefused(f"a {type(value).__name__} as an argument")


def _check_function(names: Names, target: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
    if names.target(names.of(target)) != target:
        raise NameRefused(str(target))
    if target in BUILTINS and kwargs and target not in (dict, int):  # a `key` is a function that they call
        raise NameRefused(f"{target.__name__} with keywords")
    if target in (objects.build_object, objects.set_attributes, objects.find, getattr) and kwargs:
        raise NameRefused(f"{target.__name__} with keywords")
    if target is getattr:
        _check_attributes(args[1:2])
    elif target in (objects.build_object, objects.find):
        names.find(args[0])
    if target in (objects.build_object, objects.set_attributes):
        if not isinstance(args[1], dict):
            raise NameRefused(f"{target.__name__} of attributes that are not written out")
        for name in args[1]:
            _check_attributes([name])


def _check_attributes(attributes: Iterable[Any]) -> None:
    for name in attributes:
        check_name(name)
        if name.startswith("__"):
            raise NameRefused(f"the attribute {name!r}")
