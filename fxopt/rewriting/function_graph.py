"""A function of a pattern as a graph of its calls."""

from __future__ import annotations

import dataclasses
import threading
import unittest.mock
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Interpreter, Node, Proxy
from torch.fx.node import map_aggregate
from torch.fx.proxy import GraphAppendingTracer, TraceError

from fxopt import effects, graph
from fxopt.errors import PassError
from fxopt.torch_internals import MODULES


@dataclasses.dataclass(frozen=True)
class FunctionGraph:
    """A function as a graph.

    Attributes:
        graph: the graph.
        modules: the modules that its nodes call, by target.
    """

    graph: Graph
    modules: dict[str, nn.Module]

    @property
    def result(self) -> Node:
        """The node whose value the function returns."""
        return self.graph.output_node().all_input_nodes[0]

    @property
    def steps(self) -> tuple[Any, ...]:
        """The calls in order, with layers replaced by their class; equal for graphs that differ only in weights."""

        def told(leaf: Any) -> Any:
            """Replace devices, because a proof runs on the CPU."""
            return torch.device if isinstance(leaf, torch.device) else leaf

        return tuple(
            (
                node.name,
                type(self.modules[node.target]) if node.target in self.modules else node.target,
                repr(map_aggregate((node.args, node.kwargs), told)),
            )
            for node in self.graph.nodes
        )

    @property
    def draws(self) -> bool:
        """True if a call may draw random numbers."""
        return any(effects.draws(node, self.modules.get(str(node.target))) for node in self.graph.nodes)

    def run(self, values: Mapping[str, Any]) -> Any:
        """Compute the function; `values` are the tensors by parameter."""
        root = nn.Module()
        vars(root)[MODULES] = self.modules
        given = [values[str(node.target)] for node in self.graph.find_nodes(op="placeholder")]
        interpreter = Interpreter(root, graph=self.graph)
        interpreter.extra_traceback = False  # errors are those of the author
        return interpreter.run(*given)


_LOCK = threading.RLock()


def trace_function(pass_: Any, method: str, values: Mapping[str, Any]) -> FunctionGraph:
    """Trace a function of a pattern with proxies; each call of a layer becomes one node.

    Args:
        pass_: the pattern.
        method: the name of the function.
        values: the arguments by name. Numbers and layers are passed as they are; a node or `None` becomes a proxy.
    """
    made, modules, call = Graph(), dict[str, nn.Module](), nn.Module.__call__
    tracer, where = GraphAppendingTracer(made), f"{method} of {type(pass_).__name__}"

    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(value, Proxy) for value in (*args, *kwargs.values())):
            return call(module, *args, **kwargs)
        known = (name for name, value in {**values, **modules}.items() if value is module)
        target = next(known, f"new_{len(modules)}")
        modules[target] = module
        return tracer.create_proxy("call_module", target, args, kwargs)

    given = {
        name: Proxy(made.placeholder(name), tracer) if value is None or isinstance(value, Node) else value
        for name, value in values.items()
    }
    # Layers that other threads call meanwhile get no proxies, and compute as usual.
    with _LOCK, torch.no_grad(), unittest.mock.patch.object(nn.Module, "__call__", called):
        try:
            result = getattr(pass_, method)(**given)
        except TraceError as error:
            raise PassError(
                f"{where} asks for a value or a shape, which only a run knows: {error}"
            ) from error
    if not isinstance(result, Proxy):
        raise PassError(
            f"{where} returned a {type(result).__name__}: it has to return one value that it computes"
        )
    for node in made.nodes:
        if any(isinstance(leaf, Tensor) for leaf in graph.leaf_arguments(node)):
            raise PassError(
                f"{where} gives a tensor to {node.target}: keep tensors in layers, such as nn.Linear, and call these"
            )
    made.output(result.node)
    return FunctionGraph(made, modules)
