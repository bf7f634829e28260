"""The values of nodes: in a run, and as fake tensors computed from those of other nodes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fxopt import submodules
from fxopt.graph import called_with, describing, value_of
from fxopt.torch_internals import FakeTensor, pytree


class NodeValues(torch.fx.Interpreter):
    """Runs a graph node by node, with the signature of its graph module, and reports the value of each node.

    Args:
        graph_module: the graph to run.
        seen: function that is called with each node and its value, before a later node can write into the value.

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
        """Run a node, and report its value."""
        value = super().run_node(n)
        self._seen(n, value)
        return value


def described(graph_module: GraphModule, node: Node) -> Any:
    """Compute the value of a call as a fake tensor, from the fake tensors of its arguments; `None` if one is unknown."""
    sources = {each: value_of(each) for each in node.all_input_nodes}
    fakes = [leaf for leaf in pytree.tree_leaves(list(sources.values())) if isinstance(leaf, FakeTensor)]
    if None in sources.values() or not fakes:
        return None

    def known(each: Node) -> Any:  # views, because some functions change the shape in place
        return pytree.tree_map(
            lambda leaf: leaf.detach() if isinstance(leaf, FakeTensor) else leaf, sources[each]
        )

    try:
        with describing(fakes[0]), torch.no_grad():
            args, kwargs = map_arg((node.args, node.kwargs), known)
            if node.op != "call_module":
                return called_with(node, None, args, kwargs)
            module = submodules.module_at(graph_module, str(node.target))
            tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            mode = fakes[0].fake_mode
            fake = {name: mode.from_tensor(tensor, static_shapes=True) for name, tensor in tensors.items()}
            return torch.func.functional_call(module, fake, args, kwargs)
    except Exception:  # functions may raise anything for fake tensors
        return None
