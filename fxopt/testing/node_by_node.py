"""A graph run node by node beside the original: the first node from which on values part."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fxopt import graph
from fxopt.capture.runs.first_difference import parting_place
from fxopt.node_values import NodeValues
from fxopt.objects import tensors_in
from fxopt.outputs import mapped
from fxopt.rewriting.edits import Redirect
from fxopt.rewriting.record import Step, steps_of
from fxopt.testing.differences import compare, unchanged
from fxopt.testing.divergence import Divergence, described
from fxopt.testing.observations import Call, observe, run_call
from fxopt.torch_internals import version_of

Limit = Callable[[str], float]
"""How far the value of a node may be off, by its name in the original graph."""


def parting(
    before: tuple[GraphModule, GraphModule],
    after: tuple[GraphModule, GraphModule],
    calls: Sequence[Call],
    wide_calls: Sequence[Call],
    *,
    wide_limit: float,
    own_limit: Callable[[float], float],
) -> Divergence | None:
    """The first node that parts in float64, else in the graphs' own dtype.

    Args:
        before: the original graph, in float64 and in its own dtype.
        after: the changed graph, in float64 and in its own dtype.
        calls: the inputs in their own dtype, one call after the other.
        wide_calls: the inputs in float64.
        wide_limit: how far a value may be off in float64, relative to the largest of its tensor.
        own_limit: how far it may be from its float64 value in the own dtype, given how far the original is.
    """
    for number in range(1, len(wide_calls) + 1):
        original = Original(before[0], wide_calls[:number])
        if found := original.divergence(after[0], wide_calls[:number], lambda name: wide_limit):
            return dataclasses.replace(found, dtype=torch.float64)
    for number in range(1, len(calls) + 1):
        original = Original(before[0], [call.cast(torch.float64) for call in calls[:number]])
        errors = original.errors(before[1], calls[:number])

        def limit(name: str, errors: Mapping[str, float] = errors) -> float:
            return own_limit(errors.get(name, 0.0))

        if found := original.divergence(after[1], calls[:number], limit):
            return found
    return None


def parting_place_of(model: nn.Module, graph_module: GraphModule, calls: Sequence[Call]) -> str:
    """Where a captured graph, before any pass, first gives other bits than its model; empty where it never does."""
    model, graph_module = copy.deepcopy(model), copy.deepcopy(graph_module)
    called = {str(node.target) for node in graph_module.graph.find_nodes(op="call_module")}
    layers = [name for name, _ in model.named_modules() if name in called]
    for call in calls:
        left, right = (observe(module, [call])[0].output for module in (model, graph_module))
        if not unchanged(left, right):
            place = parting_place(graph_module, model, layers, lambda run, call=call: run_call(run, call))
            return f"they part at {place}"
    return ""


class Original:
    """The original graph, run node by node on the last of some calls: what each node gives, and what it writes.

    Args:
        graph_module: the graph, in the dtype in which it is run.
        calls: the inputs that it is called on, one call after the other.

    Attributes:
        values: the value of each node, by name.
        dtypes: the dtypes of the tensors in it.
    """

    def __init__(self, graph_module: GraphModule, calls: Sequence[Call]) -> None:
        self.values: dict[str, Any] = {}
        self.dtypes: dict[str, list[torch.dtype]] = {}
        self._nodes = {node.name: node for node in graph_module.graph.nodes}
        self._steps = steps_of(graph_module)
        run = _Run(graph_module, len(calls), self._keep)
        observe(run, list(calls))
        self._writes, self._watched = {label for _, label in run.writes}, set(run.watched)

    def _keep(self, node: Node, value: Any) -> None:
        self.values[node.name] = mapped(value, lambda tensor: tensor.detach().clone())
        self.dtypes[node.name] = _dtypes(value)

    def errors(self, rounded: GraphModule, calls: Sequence[Call]) -> dict[str, float]:
        """How far each node of the same graph is off in another dtype, in which changed graphs will be judged."""
        found: dict[str, float] = {}

        def measure(node: Node, value: Any) -> None:
            self.dtypes[node.name] = _dtypes(value)
            found[node.name], _ = _apart(self.values.get(node.name), value)

        observe(_Run(rounded, len(calls), measure), list(calls))
        return found

    def divergence(self, changed: GraphModule, calls: Sequence[Call], limit: Limit) -> Divergence | None:
        """The first node of a changed graph that raises or writes what the original does not, or from which on values part."""
        steps = _new_steps(self._steps, changed)
        judged = _Judged(self, steps, limit)
        run = _Run(changed, len(calls), judged)

        def at(node: Node, fault: str) -> Divergence:
            return described(node, self._nodes.get(judged.counterpart(node)), steps, fault, calls[-1].name)

        try:
            observe(run, list(calls))
        except Exception as error:  # whatever it is: the node that raises is where the graph parts
            raising = next((n for n in changed.graph.nodes if n.name not in run.done), None)
            return raising and at(raising, f"it raises {type(error).__name__}: {_first_line(error)}")
        for node, label in run.writes:
            if label in self._watched | run.results and label not in self._writes:
                return at(node, f"it writes {label}, which no node of the original does")
        parted = _parted(changed, judged.agreeing)
        if not parted:
            return None
        known = next((node for node in parted if node.name in judged.errors), parted[-1])
        off, why = judged.errors.get(known.name, (float("inf"), ""))
        allowed = limit(judged.counterpart(known))
        fault = why or f"{off:.3g} of its largest value off, where {allowed:.3g} is right"
        if known is not parted[0]:
            fault = f"the original has no such value, and {known.name}, which follows, is {fault}"
        return dataclasses.replace(at(parted[0], fault), error=off, limit=allowed)


class _Judged:
    """Judges the value of each node of a changed graph.

    Attributes:
        agreeing: the nodes that give what their counterpart in the original does; new ones, what any node does.
        errors: how far those with a counterpart are off, and why they cannot be compared.
    """

    def __init__(self, original: Original, steps: Sequence[Step], limit: Limit) -> None:
        self.agreeing: set[str] = set()
        self.errors: dict[str, tuple[float, str]] = {}
        self._original, self._limit = original, limit
        self._stands_for: dict[str, str] = {}
        for edit in (edit for step in steps for edit in step.edits or ()):
            if isinstance(edit, Redirect) and edit.stands_in:
                self._stands_for[edit.new] = self._stands_for.get(edit.old, edit.old)

    def counterpart(self, node: Node) -> str:
        """The name of the node of the original whose value it is to have."""
        return self._stands_for.get(node.name, node.name)

    def __call__(self, node: Node, value: Any) -> None:
        name, values = self.counterpart(node), self._original.values
        if name in values:
            error, why = self._apart(name, value)
            self.errors[node.name] = error, why
            agrees = error <= self._limit(name)
        else:
            first = _start(value)
            agrees = first is not None and any(
                _like(first, _start(each)) and self._apart(other, value)[0] <= self._limit(other)
                for other, each in values.items()
            )
        if agrees:
            self.agreeing.add(node.name)

    def _apart(self, name: str, value: Any) -> tuple[float, str]:
        dtypes, now = self._original.dtypes[name], _dtypes(value)
        if dtypes != now and len(dtypes) == len(now):
            was, is_now = (", ".join(str(d).removeprefix("torch.") for d in each) for each in (dtypes, now))
            return float("inf"), f"{is_now}, where {was} is right"
        return _apart(self._original.values[name], value)


class _Run(nn.Module):
    """A graph that is run node by node; nodes and values are shown of the last of some calls alone.

    Attributes:
        done: the nodes that have been run in that call.
        watched: tensors that a node may write into, with the number of writes so far: inputs, parameters, buffers.
        results: the names of those that are results of earlier calls.
        writes: the nodes that wrote into such a tensor in that call, and its name.
    """

    def __init__(self, graph_module: GraphModule, calls: int, seen: Callable[[Node, Any], None]) -> None:
        super().__init__()
        self.graph_module, self._left, self._seen = graph_module, calls, seen
        self.done: set[str] = set()
        self.watched: dict[str, tuple[Tensor, int]] = {}
        self.results: set[str] = set()
        self.writes: list[tuple[Node, str]] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._left -= 1
        if self._left:
            result = self.graph_module(*args, **kwargs)
            for number, tensor in enumerate(tensors_in(result)):
                self.results.add(f"tensor {number} of an earlier result")
                self._watch(f"tensor {number} of an earlier result", tensor)
            return result
        for label, (tensor, _) in self.watched.items():
            self._watch(label, tensor)
        for name, tensor in (*self.graph_module.named_parameters(), *self.graph_module.named_buffers()):
            self._watch(name, tensor)
        return NodeValues(self.graph_module, self._note)(*args, **kwargs)

    def _note(self, node: Node, value: Any) -> None:
        self.done.add(node.name)
        for label, (tensor, writes) in self.watched.items():
            if version_of(tensor) != writes:
                self._watch(label, tensor)
                self.writes.append((node, label))
        for number, tensor in enumerate(tensors_in(value) if node.op == "placeholder" else ()):
            self._watch(f"the input {node.target}" + (f", tensor {number}" if number else ""), tensor)
        self._seen(node, value)

    def _watch(self, label: str, tensor: Tensor) -> None:
        if not tensor.is_inference():  # such tensors count no writes
            self.watched[label] = tensor, version_of(tensor)


def _new_steps(known: Sequence[Step], changed: GraphModule) -> list[Step]:
    keys = {step.key for step in known}
    return [step for step in steps_of(changed) if step.key not in keys]


def _parted(changed: GraphModule, agreeing: set[str]) -> list[Node]:
    """The nodes that do not agree and through which alone a wrong output came about, in graph order."""

    def parted(nodes: Iterable[Node]) -> list[Node]:
        return [node for node in nodes if node.name not in agreeing]

    outputs = parted(changed.graph.find_nodes(op="output"))
    found = set(graph.reached(outputs, lambda node: parted(node.all_input_nodes)))
    return [node for node in changed.graph.nodes if node in found]


def _apart(expected: Any, actual: Any) -> tuple[float, str]:
    """How far two values of a node are apart, relative to the largest of a tensor, and why they cannot be compared."""
    if unchanged(expected, actual):
        return 0.0, ""
    try:
        return compare(expected, actual, dtypes=False, path="its value").max_rel, ""
    except AssertionError as error:
        return float("inf"), str(error)


def _dtypes(value: Any) -> list[torch.dtype]:
    return [tensor.dtype for tensor in tensors_in(value)]


def _start(value: Any) -> Tensor | None:
    """The first numbers of a tensor, to tell most others from it."""
    if not isinstance(value, Tensor) or not value.numel():
        return None
    first = value.detach().flatten()[:8].resolve_conj()
    return (torch.view_as_real(first) if first.is_complex() else first).double()


def _like(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and one.shape == other.shape and torch.allclose(one, other, 1e-2, equal_nan=True)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")
