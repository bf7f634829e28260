"""A graph as a Python function that calls no modules, and writes sums into memory that no later node reads."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from fxopt import graph
from fxopt.capture import TracedModule
from fxopt.capture.runtime import modes
from fxopt.capture.runtime.traced_module import ASSIGNED
from fxopt.graph_index import GraphIndex
from fxopt.kernels import PackedLayer, packed_weight, unchecked_function
from fxopt.operators import hooks_of
from fxopt.packed_operators import Packed
from fxopt.submodules import attribute, sharing_copy
from fxopt.torch_internals import parameters_of

Function = Callable[..., Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Lowered:
    """A graph, and the function that computes what it does.

    The caller must see to it that the modules and parameters of the graph stay as they are, no gradients are recorded, nothing
    traces or transforms, there are no global hooks, autocast is off, and no input has kernels of its own. The function checks
    its inputs as the graph does.

    Attributes:
        traced: the graph. Layers in `given_up` hold a weight on the meta device.
        function: the function.
        packed: the packed weights of the function, by the names of their layers.
        given_up: the names of layers whose only weight is the packed one.
        assigned: the module and the name of each attribute that a run assigns. If there are any, the function returns the
            result and a tuple of the values to assign.
    """

    traced: TracedModule
    function: Function
    packed: Mapping[str, Packed]
    given_up: Collection[str]
    assigned: Sequence[tuple[nn.Module, str]]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        value = self.function(*args, **kwargs)
        if not self.assigned:
            return value
        value, left = value
        for (module, name), each in zip(self.assigned, left, strict=True):
            setattr(module, name, each)
        return value

    def with_weights(self) -> GraphModule:
        """A graph that assigns nothing and has all its weights; those in `given_up` are unpacked, bit for bit."""
        if not self.given_up and not self.assigned:
            return self.traced
        whole = sharing_copy(self.traced)
        if self.assigned:
            output: Any = whole.graph.output_node()
            output.args = output.args[0][:1]
            whole.graph.eliminate_dead_code()
            whole.recompile()
        for path in self.given_up:
            unpack: Any = self.packed[path].unpack
            parameters_of(whole.get_submodule(path))["weight"] = nn.Parameter(unpack(), False)
        return whole


def lowered(traced: TracedModule, model: nn.Module, keep_model: bool) -> Lowered:
    """Write the function of a graph, and give up weights of the graph that are also packed.

    Args:
        traced: the graph.
        model: the model of the graph.
        keep_model: keep the weights that are the model's own parameters.
    """
    packed: dict[str, Packed] = {}
    given_up: list[str] = []
    function = function_of(traced, packed)
    own = {*map(id, model.parameters() if keep_model else ())}
    uses = Counter(id(parameter) for _, parameter in traced.named_parameters(remove_duplicate=False))
    uses.update(id(attribute(traced, str(n.target))) for n in traced.graph.find_nodes(op="get_attr"))
    for path, weight in packed.items():
        layer: Any = traced.get_submodule(path)
        if weight.unpack is not None and id(layer.weight) not in own and uses[id(layer.weight)] == 1:
            parameters_of(layer)["weight"] = nn.Parameter(
                torch.empty_like(layer.weight, device="meta"), False
            )
            del layer.__dict__["_packed"]  # it holds the weight that it was made of
            given_up.append(path)
    return Lowered(traced, function, packed, tuple(given_up), assigned_attributes(traced, model))


def assigned_attributes(traced: TracedModule, model: nn.Module) -> list[tuple[nn.Module, str]]:
    """The module of a model, or of its copy, and the name of each attribute that a run of the graph assigns."""
    return [(model.get_submodule(path), name) for path, name in traced.meta.get(ASSIGNED, ())]


def function_of(traced: TracedModule, packed: dict[str, Packed]) -> Function:
    """Write the function of a graph; returns the graph itself if it switches modes, or depends on more than its inputs.

    Args:
        traced: the graph.
        packed: takes the packed weights of the function, by the names of their layers.
    """
    index = GraphIndex(traced)
    idle = modes.idle(index.nodes)
    checked = (index.guard, *idle)
    effects = (index.memory.written_by(node) for node in index.nodes if node not in checked)
    records = any(node.target == "requires_grad_" for node in index.nodes)
    if traced.modes_read or traced.gradients_read or records or None in effects:
        return traced
    code = _without_modules(index, packed, idle).python_code("self")
    names = dict(code.globals)
    exec(compile(code.src, f"<fxopt.optimize of {type(traced).__name__}>", "exec"), names)
    return functools.partial(names["forward"], traced)


def _without_modules(index: GraphIndex, packed: dict[str, Packed], left_out: Collection[Node]) -> Graph:
    """Copy a graph with calls of functions in the place of calls of modules; the nodes keep their names."""
    made = Graph()
    known: dict[Node, Node] = {}
    for node in index.nodes:
        if node in left_out:
            continue
        if node.op == "call_module":
            function, args, kwargs = _call(index, node, packed)
            args, kwargs = torch.fx.node.map_arg((args, kwargs), known.__getitem__)
            # torch.fx writes a function of torch by its name, and makes a global of a function of any other module.
            bound: Any = functools.partial(function)
            bound.__name__, bound.__module__ = "layer", __name__
            known[node] = made.create_node("call_function", bound, args, kwargs, node.name)
        else:
            known[node] = made.node_copy(node, known.__getitem__)
    return made


def _call(
    index: GraphIndex, node: Node, packed: dict[str, Packed]
) -> tuple[Function, tuple[Any, ...], dict[str, Any]]:
    """The function to call in the place of a module, with its arguments."""
    module: Any = index.module(node)
    if isinstance(module, PackedLayer):
        dtype, other = module.get_parameter("weight").dtype, node.kwargs.get("other")
        values = [graph.value_of(value) for value in node.all_input_nodes]
        run, weight = unchecked_function(module, dtype), packed_weight(module)
        if run and weight and all(isinstance(v, torch.Tensor) and v.dtype is dtype for v in values):
            packed[str(node.target)] = weight
            overwrites = _may_overwrite(index, node, other)
            given = graph.first_argument(node)
            return run, (given, other, node.kwargs.get("activation"), overwrites), {}
    function = module.forward
    if hooks_of(module):
        function = module
    elif type(module) is nn.LayerNorm:  # saves the checks of `torch.nn.functional` on each call
        options = {name: getattr(module, name) for name in ("normalized_shape", "weight", "bias", "eps")}
        function = functools.partial(torch.layer_norm, **options)
    return function, node.args, dict(node.kwargs)


def _may_overwrite(index: GraphIndex, call: Node, other: Any) -> bool:
    """Tell whether a call may write its sum into `other`: no later node reads that memory, and the input does not share it."""
    return (
        isinstance(other, Node)
        and index.memory.gives_new_memory(other)
        and not index.memory.may_alias(other, call.all_input_nodes[0])
        and not index.memory.is_seen_after(other, call)
    )
