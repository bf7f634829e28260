"""Inputs of which a graph takes any dtype, as it does with a mask that the forward casts before it computes with it."""

from __future__ import annotations

import numbers
import operator

import torch

from fxopt.operators import Fact, facts_of

_CASTS = {"bool", "int", "long", "short", "float", "double", "half", "bfloat16"}
_COMPARISONS = {operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge}


def takes_any_dtype(node: torch.fx.Node) -> bool:
    """Tell whether the graph makes a tensor of a fixed dtype of a value, or a view, before anything else reads it."""
    return all(
        _fixes_dtype(user, node) or (_views(user, node) and takes_any_dtype(user)) for user in node.users
    )


def _fixes_dtype(user: torch.fx.Node, node: torch.fx.Node) -> bool:
    """Tell whether what a call gives has one dtype, whichever its first argument has."""
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
    """Tell whether a call gives a view of its first argument, and reads that alone."""
    facts = facts_of(user)
    given = (*user.args, *user.kwargs.values())
    reinterprets = any(isinstance(option, torch.dtype) for option in given)  # `x.view(torch.int32)`
    is_view = Fact.VIEW in facts and not facts & (Fact.RANDOM | Fact.SEVERAL) and not reinterprets
    return is_view and user.args[:1] == (node,) and node not in _others(user)


def _others(user: torch.fx.Node) -> set[torch.fx.Node]:
    """The nodes that a call takes besides its first argument."""
    found: set[torch.fx.Node] = set()
    torch.fx.node.map_arg((user.args[1:], dict(user.kwargs)), found.add)
    return found
