"""Finds inputs that may have another dtype than in the trace; values that depend on this dtype must not be fixed."""

from __future__ import annotations

import torch
from torch import nn
from torch.fx import Node

from fxopt import graph
from fxopt.capture.runtime.input_guard import InputGuard
from fxopt.capture.runtime.input_specs import TensorSpec
from fxopt.graph_index import GraphIndex
from fxopt.operators import facts_of

CASTS = ("to", "float", "double", "half", "bfloat16")
"""Methods that return the tensor itself if it already has the dtype."""


def input_of_any_dtype(index: GraphIndex, node: Node) -> Node | None:
    """An input that determines the dtype of `node`, and may have another dtype in a later call; None if there is none."""

    def sources(each: Node) -> list[Node]:
        return [] if _names_dtype(each) or _has_one_dtype(index, each) else each.all_input_nodes

    inputs = (each for each in graph.reached([node], sources) if each.op == "placeholder")
    return next((each for each in inputs if _may_change(index, each)), None)


def _may_change(index: GraphIndex, placeholder: Node) -> bool:
    """Tell whether an input may have another dtype than in the trace."""
    guard = None if index.guard is None else index.module(index.guard)
    if index.guard is None or not isinstance(guard, InputGuard):
        return True
    specs = [spec for spec in guard.inputs if index.guard.kwargs[spec.name] is placeholder]
    return any(isinstance(spec, TensorSpec) and not spec.strict_dtype for spec in specs)


def _has_one_dtype(index: GraphIndex, node: Node) -> bool:
    """Tell whether a node calls a layer of torch that accepts only inputs in the dtype of its weight."""
    module = index.called(node)
    layers = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Embedding
    return isinstance(module, layers) and bool(facts_of(node, module))


def _names_dtype(node: Node) -> bool:
    """Tell whether a call names the dtype of its result."""
    options = (*node.args[1:], *node.kwargs.values())
    name = graph.function_name(node)
    return name in CASTS and (name != "to" or any(isinstance(option, torch.dtype) for option in options))
