"""Checks the nodes of a saved graph, so that the code generated from the graph runs nothing but its nodes."""

from __future__ import annotations

import enum
import keyword
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fxopt import objects
from fxopt.objects import qualified_name
from fxopt.rewriting.edits import Reference
from fxopt.rewriting.transformation import Transformation
from fxopt.saving.allowed import BUILTINS, CONSTANTS, Names, Refused, methods

_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), range, torch.device, Reference, enum.Enum),
    *CONSTANTS,
)
# Functions that find, create or change objects by names or attributes in their arguments.
_BY_NODES = (getattr, objects.build_object, objects.find, objects.set_attributes, objects.set_items)


def check_node(names: Names, op: str, target: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
    """Raise Refused unless a node is a call that a saved graph may make.

    Args:
        names: the objects that may be named.
        op: the op of the node.
        target: the target of the node: a function, or a text.
        args: the positional arguments, with a `Reference` in place of each node.
        kwargs: the keyword arguments.
    """
    _check_arguments(names, (*args, *kwargs.values()))
    for name in kwargs:
        check_name(name)
    if op == "call_function":
        _check_function(names, target, args, kwargs)
    elif op == "call_method":
        if target not in methods():
            raise Refused(f"the method {target!r}, which a saved graph cannot call")
    elif op == "placeholder":
        check_name(str(target).lstrip("*"))
    elif op in ("get_attr", "call_module"):
        check_path(target)
    elif (op, target) != ("output", "output"):
        raise Refused(f"a node of the kind {op!r} with the target {target!r}")


def check_path(path: Any) -> None:
    """Raise Refused unless a text is the qualified name of a module or tensor."""
    # Python normalizes names in code, so other letters may become underscores.
    normal = isinstance(path, str) and unicodedata.is_normalized("NFKC", path)
    parts = path.split(".") if normal else [""]
    names = (f"_{part.replace('-', '_')}" for part in parts)  # torch.fx writes `getattr(self, "-1")`
    if not all(name.isidentifier() and name != "_" and not name.startswith("___") for name in names):
        raise Refused(
            f"the path {path!r}, which code cannot name. Rename the module, tensor or attribute: letters, digits, hyphens and "
            "underscores, and no two of these in front"
        )


def check_name(name: Any) -> None:
    """Raise Refused unless a text can be the name of a value in code."""
    fits = isinstance(name, str) and name.isascii() and name.isidentifier() and not keyword.iskeyword(name)
    if not fits:
        raise Refused(f"the name {name!r}, which code cannot have")


def check_value(names: Names, value: Any) -> None:
    """Raise Refused if a value contains a function that only nodes may call, or a class of layers or passes.

    Assigned to an attribute, such an object could be called as a method.
    """
    for part in parts(value):
        makes_layers = isinstance(part, type) and issubclass(part, torch.nn.Module | Transformation)
        if (makes_layers or any(part is each for each in _BY_NODES)) and not _is_trusted(names, part):
            raise Refused(
                f"{qualified_name(part)} as a value, which could be called in the place of a method"
            )


def parts(value: Any) -> Iterator[Any]:
    """Yield the leaves of nested containers, including keys."""
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, slice):
        value = [value.start, value.stop, value.step]
    if isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from parts(item)
    else:
        yield value


def _is_trusted(names: Names, value: Any) -> bool:
    return names.trusted.get(qualified_name(value)) is value


def _check_arguments(names: Names, values: tuple[Any, ...]) -> None:
    """Raise Refused unless arguments are plain or trusted values: code contains their `repr`, which objects may define."""
    for part in parts(values):
        if isinstance(part, type):
            check_value(names, part)
        elif not isinstance(part, _PLAIN) and not _is_trusted(names, part):
            raise Refused(f"a {type(part).__name__} as an argument of a node")


def _check_function(names: Names, target: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
    names.target(names.of(target))
    # Builtins call the function that is passed as `key`.
    if kwargs and (target in _BY_NODES or (target in BUILTINS and target not in (dict, int))):
        raise Refused(f"{target.__name__} with keywords")
    if target is getattr:
        check_path(args[1])
    elif target is objects.build_object:
        names.target(args[0])
    elif target is objects.find:
        check_value(names, names.find(args[0]))
    if target in (objects.build_object, objects.set_attributes):
        if not isinstance(args[1], dict):
            raise Refused(f"{target.__name__} of attributes that are not written out")
        for name in args[1]:
            check_path(name)
            if callable(getattr(torch.Tensor, name, None)) and name != "values":
                raise Refused(f"the attribute {name!r}, by which code would call a method of a tensor")
