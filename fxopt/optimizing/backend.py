"""`torch.compile(model, backend="fxopt")`: the graphs that dynamo finds are optimized as models are.

Dynamo's graphs take weights as inputs and call functions. Here they get layers again, which hold the weights that come in,
and `optimize` makes the rest of it: graphs for the sizes that occur, checks against float64, and the graph as it was where
gradients are recorded or a graph is not faster.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from fxopt.operators import name_of
from fxopt.optimizing.optimize import graphs_of, optimize
from fxopt.optimizing.structures import requires_grad
from fxopt.submodules import attribute
from fxopt.torch_internals import buffers_of, parameters_of, register_backend

MOST_WEIGHTS = 64
"""With how many sets of weights one graph is optimized, as where dynamo shares the code of blocks; others run it as it is."""

_trainings = itertools.count(1)
_last_training = 0


def compile_graph(
    graph_module: GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile a graph of dynamo, at its first call: the backend behind `torch.compile(model, backend="fxopt")`.

    Args:
        graph_module: what dynamo has captured.
        example_inputs: its inputs, weights among them.
        options: `precision`, `tune` and `memory`, as `fxopt.optimize` takes them.

    Example:
        >>> import fxopt, torch
        >>> model, x = torch.nn.Linear(8, 4).eval(), torch.randn(2, 8)
        >>> fast = torch.compile(model, backend="fxopt", options={"tune": False})
        >>> with torch.no_grad():
        ...     torch.allclose(fast(x), model(x), atol=1e-6)
        True
    """
    return _Compiled(graph_module, example_inputs, dict(options or {}))


class _Compiled:
    """Runs a graph of dynamo with each set of weights that it is called with."""

    def __init__(
        self, graph_module: GraphModule, example_inputs: Sequence[Any], options: dict[str, Any]
    ) -> None:
        self._graph_module, self._options = graph_module, options
        nodes = graph_module.graph.find_nodes(op="placeholder")
        pairs = list(zip(nodes, example_inputs, strict=True))
        self._weights = [i for i, (node, value) in enumerate(pairs) if _is_weight(node, value)]
        given = [node for i, node in enumerate(nodes) if i not in self._weights]
        self._sizes = {node: found for node in given if (found := _size(node, given))}
        self._inputs = [nodes.index(node) for node in given if node not in self._sizes]
        # The modules hold the weights, so that no other tensor has the id of one.
        self._made: dict[tuple[int, ...], tuple[nn.Module, int]] = {}

    def __call__(self, *args: Any) -> Any:
        global _last_training
        if torch.is_grad_enabled() and requires_grad(args):
            _last_training = next(_trainings)
            return self._graph_module(*args)
        key = tuple(id(args[i]) for i in self._weights)
        fast, seen = self._made.get(key, (None, 0))
        if fast is None:
            if len(self._made) >= MOST_WEIGHTS:
                return self._graph_module(*args)
            nodes = self._graph_module.graph.find_nodes(op="placeholder")
            model = _WithLayers(self._graph_module, {nodes[i]: args[i] for i in self._weights}, self._sizes)
            fast = optimize(model.eval(), **self._options)
        elif seen != _last_training:
            graphs_of(fast).trained()
        self._made[key] = fast, _last_training
        return fast(*(args[i] for i in self._inputs))


def _is_weight(node: Node, value: Any) -> bool:
    return isinstance(value, nn.Parameter) or "_dynamo_static_input_type" in node.meta.get("tensor_dict", {})


class _WithLayers(nn.Module):
    """A graph of dynamo that holds its weights, in layers where it can.

    Args:
        graph_module: the graph.
        held: the weights, by their placeholders.
        sizes: the placeholders of sizes, each with that of a tensor and the dimension which has the size.
    """

    def __init__(
        self,
        graph_module: GraphModule,
        held: Mapping[Node, Tensor],
        sizes: Mapping[Node, tuple[Node, int]],
    ) -> None:
        super().__init__()
        attributes: dict[str, Any] = {node.name: tensor for node, tensor in held.items()}
        new, values = Graph(), dict[Node, Node]()
        for node in graph_module.graph.find_nodes(op="placeholder"):
            if node not in held and node not in sizes:
                values[node] = new.placeholder(node.name)
        for node, (tensor, dim) in sizes.items():
            values[node] = new.call_method("size", (values[tensor], dim))
        for node in held:
            values[node] = new.get_attr(node.name)
        for node in graph_module.graph.nodes:
            found = _layer(node, held)
            if found is not None:
                value, attributes[node.name] = found
                values[node] = new.call_module(node.name, (values[value],))
            elif node.op != "placeholder":
                if node.op in ("get_attr", "call_module"):
                    attributes[node.target] = attribute(graph_module, node.target)
                values[node] = new.node_copy(node, values.__getitem__)
        for node in new.find_nodes(op="get_attr"):
            if not node.users:
                new.erase_node(node)
        self.dynamo = GraphModule(attributes, new)

    def forward(self, *inputs: Any) -> Any:
        """Run the graph with its inputs, but for weights and sizes."""
        return self.dynamo(*inputs)


def _size(node: Node, inputs: Sequence[Node]) -> tuple[Node, int] | None:
    """A tensor among the inputs with the size that `node` is, and the dimension; None where there is none."""
    value = node.meta.get("example_value")
    if not isinstance(value, torch.SymInt):
        return None
    for other in inputs:
        tensor = other.meta.get("example_value")
        for dim, size in enumerate(tensor.shape if isinstance(tensor, Tensor) else ()):
            if str(size) == str(value):
                return other, dim
    return None


def _layer(node: Node, held: Mapping[Node, Tensor]) -> tuple[Node, nn.Module] | None:
    """The layer that computes what a node does, with tensors that are held, and its input; None where there is none."""
    name = name_of(node)
    given: dict[str, Any] = dict(zip(_PARAMETERS.get(name, ()), node.args, strict=False)) | node.kwargs
    nodes: dict[str, Node] = {n: each for n in _TENSORS if (each := given.pop(n, None)) is not None}
    value = given.pop("input", None)
    if name not in _PARAMETERS or not isinstance(value, Node) or value in held:
        return None
    weights = {*nodes.values()}
    if not weights or {*node.all_input_nodes} != {value, *weights} or not held.keys() >= weights:
        return None  # an option, such as a stride or an `eps`, may be another one in each call
    tensors = {n: held[each] for n, each in nodes.items()}
    layer = _norm(value, given, tensors) if name == "batch_norm" else _product(given, **tensors)
    if layer is None:
        return None
    for n, tensor in tensors.items():
        registry: Any = parameters_of(layer) if isinstance(tensor, nn.Parameter) else buffers_of(layer)
        registry[n] = tensor
    return value, layer


def _norm(value: Node, options: dict[str, Any], tensors: Mapping[str, Tensor]) -> nn.Module | None:
    """A normalization by statistics, which do not change, without weights of its own."""
    described = value.meta.get("example_value")
    kind: Any = _NORMS.get(described.dim()) if isinstance(described, Tensor) else None
    affine = {"weight", "bias"} & tensors.keys()
    learned = all(isinstance(tensors[n], nn.Parameter) for n in affine) and len(affine) != 1
    if kind is None or options.pop("training", False) is not False or len(tensors) - len(affine) != 2:
        return None
    made: nn.Module = kind(*tensors["running_mean"].shape, **options, affine=bool(affine))
    return made if learned else None


def _product(options: Mapping[str, Any], weight: Any = None, bias: Any = None) -> nn.Module | None:
    """A linear layer or a convolution, without weights of its own."""
    if not isinstance(weight, nn.Parameter) or not isinstance(bias, nn.Parameter | None) or weight.dim() < 2:
        return None
    out, inner, *kernel = weight.shape
    fixed: dict[str, Any] = {"bias": bias is not None, "device": "meta", **options}
    if not kernel:
        return nn.Linear(inner, out, **fixed)
    made: nn.Module = _CONVS[len(kernel)](inner * options.get("groups", 1), out, tuple(kernel), **fixed)
    return made


_TENSORS = ("weight", "bias", "running_mean", "running_var")
_CONV = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_PARAMETERS: Mapping[str, Sequence[str]] = {
    "linear": ("input", "weight", "bias"),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _CONV),
    "batch_norm": ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
}
"""The parameters of the functions that are layers."""

_CONVS: Mapping[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_NORMS: Mapping[int, Any] = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}

# Where fxopt is not installed, but only imported.
if not entry_points(group="torch_dynamo_backends", name="fxopt"):
    register_backend(compile_graph, name="fxopt")
