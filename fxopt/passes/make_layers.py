"""Turns functions of torch on parameters into layers, so that other passes find them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fxopt import graph, submodules
from fxopt.functional import COUNT, FUNCTIONS, STATISTICS, Function
from fxopt.graph_index import GraphIndex
from fxopt.rewriting.explanation import Refusal
from fxopt.rewriting.rewrite import ReversibleRewrite
from fxopt.rewriting.rewriter import Rewriter
from fxopt.rewriting.spelling import call_of
from fxopt.torch_internals import buffers_of


@dataclasses.dataclass(frozen=True)
class FunctionCall:
    """A call of a function on parameters or buffers.

    Attributes:
        node: the call.
        value: the input of the layer.
        reads: the nodes that read the tensors, by attribute of the layer.
        layer: the layer, on the meta device.
        turned: whether the layer has the transposed weight.
    """

    node: Node
    value: Node
    reads: Mapping[str, Node]
    layer: nn.Module
    turned: bool


@dataclasses.dataclass(frozen=True)
class MakeLayers(ReversibleRewrite[FunctionCall]):
    """Turns functions that a model calls on its own parameters, and on running statistics, into layers of torch.nn.

    `linear`, `addmm`, `matmul` and `mm` become `Linear`. Convolutions, `batch_norm` with running statistics, `layer_norm`,
    `group_norm`, `rms_norm` and `embedding` become the layer of that name. Other passes can then find these layers, such as
    those of GPT-2, whose `Conv1D` calls `addmm`, and those of normalizations with a built-in activation.

    A layer gets the parameters themselves, or a transposed view of them; undo restores the current ones. A `BatchNorm` layer
    follows the training flag of the graph module, which the function did not.

    Example:
        >>> import torch
        >>> class Scores(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.weight = torch.nn.Parameter(torch.ones(2, 3))
        ...     def forward(self, x):
        ...         return x @ self.weight
        >>> layers = MakeLayers()(torch.fx.symbolic_trace(Scores()))
        >>> layers.linear
        Linear(in_features=2, out_features=3, bias=False)
        >>> [name for name, _ in MakeLayers()(layers, reverse=True).named_parameters()]
        ['weight']
    """

    preserves_computation = True

    def match(self, graph_module: GraphModule) -> Iterator[FunctionCall | Refusal]:
        """Yield the calls of functions whose weights no other node reads."""
        index = GraphIndex(graph_module)
        for node in index.nodes:
            call = call_of(node) if node.op in ("call_function", "call_method") else None
            function = FUNCTIONS.get(call.name) if call else None
            if call is None or function is None:
                continue
            given = {name: value for name, value in call.arguments.items() if value is not None}
            value, reads = given.pop(function.value, None), dict[str, Node]()
            for argument, attribute in function.tensors.items():
                if isinstance(read := given.get(argument), Node) and read.op == "get_attr":
                    reads[attribute] = given.pop(argument)
            if "weight" not in reads or not isinstance(value, Node):
                continue
            found = _layer(index, function, value, reads, given)
            reason = found if isinstance(found, str) else None
            for read in reads.values():
                reason = reason or index.moving_obstacle(read)
            if reason or isinstance(found, str):
                yield Refusal(node, reason or "")
            else:
                yield FunctionCall(node, value, reads, found, function.turned)

    def apply(self, rewriter: Rewriter, site: FunctionCall) -> Node:
        """Add a layer next to the tensors, move the tensors into it, and call it."""
        graph_module, layer = rewriter.graph_module, site.layer
        names = {attribute: str(read.target) for attribute, read in site.reads.items()}
        for attribute, name in names.items():
            tensor = submodules.attribute(graph_module, name)
            turns = site.turned and attribute == "weight"
            submodules.place(layer, attribute, _transposed(tensor) if turns else tensor)
        for name, buffer in buffers_of(layer).items():
            if buffer is not None and buffer.is_meta:  # the number of batches, which functions do not have
                buffers_of(layer)[name] = torch.zeros_like(buffer, device=tensor.device)
        parent, _ = submodules.split_path(names["weight"])
        path = submodules.free_path(graph_module, parent, type(layer).__name__.lower())
        restore = functools.partial(_tensors, path, names, site.turned)
        rewriter.swap({path: layer}, names.values(), restore)
        rewriter.set(site.node, op="call_module", target=path, args=(site.value,), kwargs={})
        for read in site.reads.values():
            rewriter.erase(read)
        return site.node


def _layer(
    index: GraphIndex, function: Function, value: Node, reads: Mapping[str, Node], given: Mapping[str, Any]
) -> nn.Module | str:
    """Make the layer equivalent to a call, on the meta device, or return why there is none."""
    shapes = dict[str, tuple[int, ...]]()
    for attribute, read in reads.items():
        tensor = submodules.find(index.graph_module, str(read.target))
        kind = "buffer" if attribute in STATISTICS else "parameter"
        fits = isinstance(tensor, Tensor) and isinstance(tensor, nn.Parameter) is (kind == "parameter")
        if not fits or not tensor.is_floating_point():
            return f"{read.target} is no floating {kind} of a module"
        shapes[attribute] = tuple(tensor.shape)
    if function.turned:
        shapes["weight"] = shapes["weight"][::-1]
    options = {name: tuple(option) if isinstance(option, list) else option for name, option in given.items()}
    if graph.nodes_in(options):
        return "an option of the call is computed"
    try:
        with torch.device("meta"):
            layer = function.make(shapes, graph.rank_of(value), **options)
    except TypeError:
        return f"the layer has no such options: {', '.join(options)}"
    except ValueError as error:
        return str(error)
    held = {name: tuple(tensor.shape) for name, tensor in submodules.tensors_of({"": layer}) if name != COUNT}
    if held != shapes:
        return "the shapes of its weights are not those of the layer"
    return layer.train(index.graph_module.training and not isinstance(layer, nn.modules.batchnorm._BatchNorm))


def _transposed(weight: Tensor) -> Tensor:
    return submodules.with_values(weight, weight.detach().t())


def _tensors(
    path: str, names: Mapping[str, str], turned: bool, now: Mapping[str, Any], left: object
) -> dict[str, Tensor]:
    """Return the current tensors of the layer, under their original names."""
    tensors = {attribute: getattr(now[path], attribute) for attribute in names}
    if turned:
        tensors["weight"] = _transposed(tensors["weight"])
    return {name: tensors[attribute] for attribute, name in names.items()}
