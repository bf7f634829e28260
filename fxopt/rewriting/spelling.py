"""A common form for the spellings of a call: function, method, Python operator, or layer without weights."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.fx import Graph, Node, Proxy
from torch.fx.proxy import GraphAppendingTracer

from fxopt import graph
from fxopt.operators import is_torch_module, name_of
from fxopt.torch_internals import schema_of

COMMUTATIVE = ("add", "mul", "maximum", "minimum", "eq", "ne", "logical_and", "logical_or")
"""Operators whose two arguments may be swapped."""

_DIMENSIONS = ("dim", "dims", "dim0", "dim1", "start_dim", "end_dim")
_NEW_DIMENSION = ("unsqueeze", "stack")
_MANY = ("permute", "view", "reshape", "expand", "repeat", "tile", "flip")
"""Methods that accept several numbers, or one list of numbers."""


class Call(NamedTuple):
    """An operator, and its arguments by name; arguments that equal their default are left out."""

    name: str
    arguments: Mapping[str, Any]


def call_of(node: Node, module: nn.Module | None = None) -> Call | None:
    """Describe the operator call of a node; `None` if the node calls something else.

    Args:
        node: the node.
        module: the module that the node calls, if it calls one.

    Example:
        >>> import torch.nn.functional as F
        >>> x = torch.fx.Graph().placeholder("x")
        >>> calls = x.graph.call_method("softmax", (x, -1)), x.graph.call_function(F.softmax, (x,), {"dim": -1})
        >>> call_of(calls[0]), call_of(calls[0]) == call_of(calls[1])
        (Call(name='softmax', arguments={'self': x, 'dim': -1}), True)
    """
    if module is not None:
        value = graph.input_of(node, module) if is_torch_module(module) else None
        inner = _inside(module) if value is not None else None
        if inner is None:
            return None
        return Call(
            inner.name, {name: value if isinstance(a, Node) else a for name, a in inner.arguments.items()}
        )
    name = name_of(node)
    arguments = _bound(node, name) if name else None
    if arguments and name == "pad" and arguments.get("value") == 0:
        del arguments["value"]  # the default is None, which also pads with 0
    return None if arguments is None else Call(name, arguments)


def ways(wanted: Call, call: Call) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Yield the arguments of two calls, for each equivalent order of those of `call`; dimensions are counted from the first.

    Args:
        wanted: a call in a pattern, where ranks are unknown.
        call: a call of the same operator in a graph.
    """
    rank = _rank_of(call)
    one, other = (
        {n: _counted(v, rank) if n in _DIMENSIONS else v for n, v in each.arguments.items()}
        for each in (wanted, call)
    )
    yield one, other
    turns = [("self", "other")] if call.name in COMMUTATIVE and other.keys() == {"self", "other"} else []
    for first, second in (*turns, ("dim0", "dim1")):
        if first in other and second in other:
            yield one, {**other, first: other[second], second: other[first]}


def arguments_of(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Name the arguments of a call by the parameters, leaving out defaults; None if the function does not accept the call."""
    try:
        signature = inspect.signature(function)
        bound = signature.bind(*args, **kwargs)
    except (TypeError, ValueError):  # a function implemented in C may have no signature
        return None
    return _named(bound.arguments, {p.name: p.default for p in signature.parameters.values()})


def _rank_of(call: Call) -> int | None:
    """The rank to which the dimension arguments of a call refer; None if unknown."""
    values = call.arguments.get("self", call.arguments.get("tensors"))
    ranks = {
        graph.rank_of(each) if isinstance(each, Node) else None
        for each in (values if isinstance(values, list | tuple) else [values])
    }
    rank = ranks.pop() if len(ranks) == 1 else None
    return rank if rank is None else rank + (call.name in _NEW_DIMENSION)


def _counted(value: Any, rank: int | None) -> Any:
    if isinstance(value, list | tuple):
        return [_counted(each, rank) for each in value]
    return value + rank if type(value) is int and value < 0 and rank is not None else value


def _inside(module: nn.Module) -> Call | None:
    """The call of a torch layer that has no weights and computes a single operator of its input; None for other layers."""
    if any(True for _ in (*module.parameters(), *module.buffers(), *module.children())):
        return None
    inside = Graph()
    given = Proxy(inside.placeholder("input"), GraphAppendingTracer(inside))
    try:
        made = module.forward(given)
    except Exception:  # the forward needs the value of its input
        return None
    if len(inside.nodes) != 2 or not isinstance(made, Proxy):
        return None
    return call_of(made.node)


def _bound(node: Node, name: str) -> dict[str, Any] | None:
    """The arguments of a call by name, without defaults; by position if the names are unknown."""
    args = node.args
    if name in _MANY and len(args) > 1 and not isinstance(args[1], list | tuple):
        args = (args[0], list(args[1:]))
    function: Any = getattr(torch.Tensor, str(node.target), None) if node.op == "call_method" else node.target
    if isinstance(function, types.FunctionType):
        return arguments_of(function, args, node.kwargs)
    packet = getattr(torch.ops.aten, name, None)
    for overload in packet.overloads() if packet is not None else ():
        arguments = schema_of(getattr(packet, overload)).arguments
        names = [each.name for each in arguments if not each.kwarg_only]
        given = {("self" if key == "input" else key): value for key, value in node.kwargs.items()}
        if len(args) <= len(names) and given.keys() <= {each.name for each in arguments}:
            defaults = {each.name: each.default_value for each in arguments if each.has_default_value()}
            return _named(dict(zip(names, args, strict=False)) | given, defaults)
    return None if node.kwargs else {str(place): value for place, value in enumerate(args)}


def _named(arguments: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    known = {**defaults, "inplace": False}
    return {
        ("self" if name == "input" else name): value
        for name, value in arguments.items()
        if name != "_stacklevel" and not _is_default(value, known.get(name, inspect.Parameter.empty))
    }


def _is_default(value: Any, default: Any) -> bool:
    return not isinstance(value, Node) and type(value) is type(default) and value == default
