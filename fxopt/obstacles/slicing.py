"""Finds out whether a value may become a slice of a larger tensor, which is not contiguous and shares memory."""

from __future__ import annotations

import itertools
import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fxopt import graph, operators
from fxopt.graph_index import GraphIndex
from fxopt.operators import Fact, facts_of


def layout_obstacle(index: GraphIndex, value: Node, width: int | None) -> str | None:
    """Name a use of `value` that may depend on its memory being contiguous; `None` if there is none.

    Args:
        index: index of the graph.
        value: the value that may become a slice in one dimension.
        width: the size of that dimension, if it is the last one.
    """
    for part in index.memory.derived(value, until=("contiguous",)):
        for user in part.users:
            name = graph.function_name(user)
            if Fact.LAYOUT in facts_of(user) and not (part is value and _splits_last(user, width)):
                return f"{user.name} ({name}) depends on the memory layout of the output"
            if user.op == "call_module" and not operators.is_torch_module(index.module(user)):
                return f"{user.name} is a module whose use of the memory layout is unknown"
            known = operators.is_known_function(user.target) or operators.is_container(user.target)
            if user.op == "call_function" and not known:
                return f"{user.name} ({name}) is a function whose use of the memory layout is unknown"
    return None


def _splits_last(view: Node, width: int | None) -> bool:
    """Tell whether a `view` splits, but does not join, the last dimension, so that it is possible for a slice, too."""
    if width is None or view.target != "view" or view.kwargs or isinstance(view.args[1], torch.dtype):
        return False
    value = view.meta.get("val")
    shape: Any = value.shape if isinstance(value, Tensor) else view.args[1:]
    if len(shape) == 1 and isinstance(shape[0], tuple | list):
        shape = shape[0]
    sizes = itertools.takewhile(lambda size: isinstance(size, int) and size > 0, reversed(shape))
    return width in itertools.accumulate(sizes, operator.mul)
