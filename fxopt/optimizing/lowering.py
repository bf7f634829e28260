"""A graph as a Python function, without what modules ask on each call, that writes sums into memory that is free."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node

from fxopt import graph
from fxopt.capture import TracedModule
from fxopt.graph_index import GraphIndex
from fxopt.kernels import PackedConv2d, PackedLinear, unguarded
from fxopt.operators import hooks_of

Function = Callable[..., Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Lowered:
    """A graph, and the function that computes what it does.

    The function is right as long as the modules and parameters of the graph stay as they are, no gradients are recorded, nothing
    traces or transforms, there are no global hooks, and autocast is off: its caller sees to that. It checks its inputs as
    the graph does.
    """

    traced: TracedModule
    function: Function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def lowered(traced: TracedModule) -> Lowered:
    """Write the function of a graph; where a node switches modes, or the graph asks for more than its inputs, it is the graph itself."""
    return Lowered(traced, _function(traced))


def _function(traced: TracedModule) -> Function:
    index = GraphIndex(traced)
    effects = (index.memory.written_by(node) for node in traced.graph.nodes if node is not index.guard)
    if traced.modes_read or traced.gradients_read or None in effects or _records_gradients(traced):
        return traced
    made, known = Graph(), dict[Node, Node]()
    for node in traced.graph.nodes:
        if node.op == "call_module":
            function, args, kwargs = _call(index, node)
            args, kwargs = torch.fx.node.map_arg((args, kwargs), known.__getitem__)
            # fx writes a function of torch by its name, and any other as a global of the code.
            bound: Any = functools.partial(function)
            bound.__name__, bound.__module__ = "layer", __name__
            known[node] = made.create_node("call_function", bound, args, kwargs, node.name)
        else:
            known[node] = made.node_copy(node, known.__getitem__)
    code = made.python_code("self")
    names = dict(code.globals)
    exec(compile(code.src, f"<fxopt.optimize of {type(traced).__name__}>", "exec"), names)
    return functools.partial(names["forward"], traced)


def _records_gradients(traced: TracedModule) -> bool:
    return any(node.target == "requires_grad_" for node in traced.graph.nodes)


def _call(index: GraphIndex, node: Node) -> tuple[Function, tuple[Any, ...], dict[str, Any]]:
    """What to call in the place of a module."""
    module: Any = index.module(node)
    if isinstance(module, PackedLinear | PackedConv2d):
        other, activation = node.kwargs.get("other"), node.kwargs.get("activation")
        values = [graph.value_of(value) for value in node.all_input_nodes]
        dtype = module.weight.dtype
        run = unguarded(module, dtype)
        if run and all(isinstance(value, torch.Tensor) and value.dtype is dtype for value in values):
            return run, (*node.args, other, activation, _may_overwrite(index, node, other)), {}
    if hooks_of(module):
        return module, node.args, dict(node.kwargs)
    if type(module) is nn.LayerNorm and len(node.args) == 1:
        options: dict[str, Any] = {
            "weight": module.weight,
            "bias": module.bias,
            "eps": module.eps,
            "cudnn_enable": False,
        }
        return (
            functools.partial(torch.layer_norm, normalized_shape=module.normalized_shape, **options),
            node.args,
            {},
        )
    return module.forward, node.args, dict(node.kwargs)


def _may_overwrite(index: GraphIndex, call: Node, other: Any) -> bool:
    """Tell whether nobody reads the memory of what a call adds any more, and the call itself does so at one place alone."""
    return (
        isinstance(other, Node)
        and index.memory.gives_new_memory(other)
        and not index.memory.may_alias(other, call.all_input_nodes[0])
        and not index.memory.seen_behind(other, call)
    )
