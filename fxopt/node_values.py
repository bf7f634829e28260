"""The value of each node of a graph that is run."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node


class NodeValues(torch.fx.Interpreter):
    """Runs a graph node by node, under the signature of its graph module, and shows what each node gives.

    Args:
        graph_module: the graph to run.
        seen: is told each node and its value, before anything can write into it.

    Example:
        >>> names = []
        >>> run = NodeValues(torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.ReLU())), lambda node, value: names.append(node.name))
        >>> run(input=torch.tensor(-2.0)), names
        (tensor(0.), ['input_1', '_0', 'output'])
    """

    def __init__(self, graph_module: GraphModule, seen: Callable[[Node, Any], None]) -> None:
        super().__init__(graph_module)
        self._seen, self._given = seen, dict[str, Any]()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(self.module.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        self._given = bound.arguments
        return self.run()

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        """The argument of this name."""
        return self._given[target.lstrip("*")]

    def run_node(self, n: Node) -> Any:
        """Run a node, and show its value."""
        value = super().run_node(n)
        self._seen(n, value)
        return value
