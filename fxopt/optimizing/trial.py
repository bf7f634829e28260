"""Runs of a model and of its graph on the same inputs, which leave the model as it was before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from fxopt import effects, graph
from fxopt.capture import TracedModule
from fxopt.graph_index import GraphIndex
from fxopt.optimizing.inputs import Inputs
from fxopt.outputs import mapped, relative_error, unlike
from fxopt.submodules import parts, split_path, tensors_of
from fxopt.torch_internals import buffers_of

_CHECKS = "fxopt.capture.runtime.checks"


class Unused(Exception):
    """The model falls back to eager; the message is the reason that the report gives."""


class Trial:
    """Runs a model and its graph, and puts back the buffers that they write into, such as a static cache.

    Attributes:
        places: the buffers that the model writes into, and the attributes that layers assign, each as a module and a name;
            known after `own`.

    Args:
        model: the model.
        traced: its graph, before any pass.
        inputs: the inputs of all runs.

    Raises:
        Unused: the graph draws random numbers, or has effects that cannot be put back.
    """

    def __init__(self, model: nn.Module, traced: TracedModule, inputs: Inputs) -> None:
        index = GraphIndex(traced)
        self._model, self._inputs = model, inputs
        own = dict(tensors_of({"": model}))
        written = {name: tensor for name, tensor in own.items() if index.memory.writer_of(tensor)}
        self._before = {name: (tensor, tensor.detach().clone()) for name, tensor in written.items()}
        self._left: dict[str, Tensor] = {}
        layers = {
            id(part) for node in index.nodes if node.op == "call_module" for part in parts(index.module(node))
        }
        self._layers = {path: part for path, part in model.named_modules() if id(part) in layers}
        self.places: list[tuple[str, str]] = []
        for node in index.nodes:
            fault = _fault(index, node)
            if fault:
                raise Unused(f"{fault}, at {graph.place(node)}")
        others = {id(tensor): tensor for _, tensor in tensors_of({"": traced})}
        for tensor in map(others.get, others.keys() - {*map(id, own.values())}):
            writer = index.memory.writer_of(tensor) if tensor is not None else None
            if writer is not None:
                raise Unused(f"each call writes into a tensor outside of the model, at {graph.place(writer)}")

    def own(self, eager: Callable[..., Any]) -> Any:
        """The outputs of the model's own method. Fake tensors let pass what others do not, such as two dtypes in a product."""
        before = {path: dict(vars(layer)) for path, layer in self._layers.items()}
        tables = [(table, dict(table)) for table in map(buffers_of, self._model.modules()) if table]
        try:
            value, self._left = self._run(eager)
        except Exception as error:
            raise Unused(f"it fails on these inputs, with {type(error).__name__}: {error}") from error
        replaced = [name for table, held in tables for name in held if table.get(name) is not held[name]]
        for table, held in tables:
            table.update(held)
        if replaced:
            raise Unused(f"the forward replaces the buffer {replaced[0]!r}. Write into it with `.copy_()`.")
        self.places = [split_path(name) for name in self._left]
        for path, layer in self._layers.items():  # `weight_norm` computes the attribute `weight`
            now = vars(layer)
            self.places += [(path, name) for name in now if now[name] is not before[path].get(name)]
        return value

    def run(self, function: Callable[..., Any]) -> Any:
        """The outputs of a graph.

        Raises:
            Unused: it leaves something else in the buffers than the model.
        """
        value, left = self._run(function)
        if unlike(self._left, left) or relative_error(self._left, left) > 1e-2:
            raise Unused("its graph leaves other values in the buffers that the model writes into")
        return value

    def repeatable(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that puts back what each call writes."""

        def again(*args: Any, **kwargs: Any) -> Any:
            value = function(*args, **kwargs)
            self._put_back()
            return value

        return again if self._left else function

    def _run(self, function: Callable[..., Any]) -> tuple[Any, dict[str, Tensor]]:
        value = self._inputs.call(function)
        left = {
            name: tensor.detach().clone()
            for name, (tensor, before) in self._before.items()
            if not torch.equal(tensor, before)
        }
        if left:  # an output may be a view of a buffer
            value = mapped(value, Tensor.clone)
            self._put_back()
        return value, left

    def _put_back(self) -> None:
        for tensor, before in self._before.values():
            if not torch.equal(tensor, before):
                tensor.detach().copy_(before)


def _fault(index: GraphIndex, node: Node) -> str | None:
    """Why a graph with this node cannot be tried out."""
    module = index.module(node) if node.op == "call_module" else None
    if module is not None and any(map(effects.has_forward_hooks, parts(module))):
        return "a layer has hooks on its forward"
    if effects.draws(node, module):
        return "the forward draws random numbers, so its outputs cannot be compared with those of a graph"
    if getattr(node.target, "__module__", "") == _CHECKS and any(
        other.op == "placeholder" and index.memory.written(other) for other in index.nodes
    ):
        return "its graph might refuse these inputs when it has already written into one of them"
    return None
