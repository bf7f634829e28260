"""Finds where a graph diverges from its model, and why; used only if they differ."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fxopt.capture.capture_internals import IS_COMPILING, IS_EXPORTING, DisableTorchFunction, call_impl_of
from fxopt.capture.nodes.source_location import describe_location, model_frame
from fxopt.capture.patches.replaced import replaced
from fxopt.capture.runs.eager_outcome import condensed_numbers
from fxopt.node_values import NodeValues
from fxopt.objects import tensors_in
from fxopt.outputs import plain
from fxopt.torch_internals import COMPILED

Digest = tuple[Any, ...]

STATE = (
    "the forward keeps state from one call to the next (a number, a list, an iterator, an object, a closure), but a graph "
    "keeps only tensors: hold the state in a buffer and write it with `.copy_()`, or give it as an input"
)
EXPORTING = (
    "the forward asks whether it is being compiled or exported (torch.compiler.is_compiling, is_exporting), and does "
    "something else then"
)
BACKWARD = (
    "something happens in backward that a graph does not repeat: a second forward of activation checkpointing around a "
    "layer with statistics, a hook on gradients, a write over what backward needs"
)
UNSEEN = (
    "the forward asks Python for something that differs under capture and that no guard holds: the type, the identity or the "
    "memory address of a tensor, a setting that it changes for one call, the state of something outside of the model"
)


def place_of_divergence(
    graph: torch.nn.Module, model: torch.nn.Module, layers: Collection[str], run: Callable[..., Any]
) -> str:
    """Describe the first node whose value the model does not compute, else the first call of the model without a node.

    `run` calls a module under the same conditions each time; both modules are in their state before the differing call.
    """
    eager = _EagerValues(model, layers)
    run(eager)
    found: list[tuple[torch.fx.Node, Digest]] = []
    given: set[Digest] = set()

    def keep(node: torch.fx.Node, value: Any) -> None:
        if node.op in ("placeholder", "get_attr", "output"):
            given.update(_digests(value))
        else:
            found.extend((node, digest) for digest in _digests(value))

    assert isinstance(graph, torch.fx.GraphModule)
    run(NodeValues(graph, keep))
    for node, digest in found:
        if digest not in eager.digests | given:
            trace = (node.meta.get("stack_trace") or "").strip().splitlines()[-2:]
            line = " ".join(part.strip() for part in trace)
            return f"node {node.format_node()!r}" + (f", {line}" if line else "")
    known = {digest for _, digest in found} | given
    for place, digest in eager.calls:
        if digest not in known:
            return f"a call of the model that the graph does not make. {place}"
    return "no node: each node computes a value of the model, but the outputs are assembled differently"


def likely_cause(difference: str, call: int, agrees_when_exporting: bool) -> str:
    """Return the usual cause of such a difference."""
    if call > 1:
        return STATE
    if agrees_when_exporting:
        return EXPORTING
    return BACKWARD if difference.startswith(("gradient", "backward", "buffer")) else UNSEEN


def exporting(call: Callable[[], Any]) -> Any:
    """Call a function while torch reports that it compiles and exports."""
    with (
        replaced(*IS_COMPILING, True),
        replaced(*IS_EXPORTING, True),
    ):
        return call()


class _EagerValues(TorchFunctionMode):
    """Runs a model, and keeps digests of the results of its torch calls; `calls` omits the calls inside layers."""

    def __init__(self, model: torch.nn.Module, layers: Collection[str]) -> None:
        super().__init__()
        self.digests: set[Digest] = set()
        self.calls: list[tuple[str, Digest]] = []
        self._model, self._layers, self._depth = model, layers, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for name in self._layers:
            layer = self._model.get_submodule(name)
            setattr(layer, COMPILED, lambda *a, layer=layer, **k: self._layer(layer, a, k))
        with self:
            return self._model(*args, **kwargs)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._kept(function(*args, **(kwargs or {})))

    def _kept(self, result: Any) -> Any:
        for digest in _digests(result):
            self.digests.add(digest)
            if not self._depth:
                self.calls.append((describe_location(model_frame(sys._getframe(2)), None), digest))
        return result

    def _layer(self, layer: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        self._depth += 1
        try:
            result = call_impl_of(layer)(*args, **kwargs)
        finally:
            self._depth -= 1
        return self._kept(result)


def _digests(value: Any) -> list[Digest]:
    """Return sums that distinguish tensors."""
    with DisableTorchFunction(), torch.no_grad():
        return [_digest(tensor.detach()) for tensor in tensors_in(value)]


def _digest(tensor: torch.Tensor) -> Digest:
    sums = condensed_numbers(plain(tensor))
    order = torch.arange(1, len(sums) + 1, device=sums.device)
    return tensor.dtype, tuple(tensor.shape), repr(float((sums * order).sum()))
