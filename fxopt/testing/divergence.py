"""Where a changed graph first diverges: both graphs are run node by node, and values of nodes are compared by name."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxopt import graph
from fxopt.compare import Unlike, pairs, tensor_error
from fxopt.node_values import NodeValues
from fxopt.outputs import mapped, restored
from fxopt.rewriting.edits import NodeEdit, Redirect, Swapped
from fxopt.rewriting.record import Step, steps_of
from fxopt.submodules import is_inside
from fxopt.testing.observations import GIVEN, Call, run_call


@dataclasses.dataclass(frozen=True)
class Divergence:
    """The first node of a changed graph whose value diverges from the original.

    Attributes:
        node: the name of the node.
        module: the module of the model that the node calls or belongs to; empty if unknown.
        source: `file:line` of the model's code; empty if unknown.
        fault: the fault of the node, in words.
        was: the call in the original graph that the node replaces.
        now: the call in the changed graph; equal to `was` if the node is new or unchanged.
        step: the last pass that changed the node; empty if no pass did, or if unknown.
        call: the name of the inputs.
        dtype: the dtype in which the graphs were run; `None` for their own.
        error: the error of the first wrong value that the original has, too, relative to the largest value of its tensor.
        limit: the limit of `error`.
    """

    node: str
    module: str
    source: str
    fault: str
    was: str = ""
    now: str = ""
    step: str = ""
    call: str = GIVEN
    dtype: torch.dtype | None = None
    error: float = math.inf
    limit: float = 0.0

    def __str__(self) -> str:
        run = f"in {str(self.dtype).removeprefix('torch.')}, " if self.dtype else ""
        run += f"with {self.call}, " if self.call != GIVEN else ""
        module, step = self.module and f"module {self.module}", self.step and f"touched by {self.step}"
        place = ", ".join(filter(None, [module, self.source, step]))
        text = f"{run}it first diverges at node {self.node}{f' ({place})' if place else ''}: {self.fault}"
        return text if self.was == self.now else f"{text}; it was `{self.was}` and is `{self.now}`"


def divergence(
    wide: GraphModule,
    original: GraphModule,
    changed: GraphModule,
    calls: Sequence[Call],
    limit_of: Callable[[float], float],
) -> Divergence | None:
    """Find the first node of a changed graph that raises, or whose value is wrong, in the last of some calls.

    The value of a node is compared, in float64, with that of the node of its name in the original, or of the node that it
    replaces. The value of a new node counts as wrong if it leads to a wrong value.

    Args:
        wide: the original graph in float64.
        original: the original graph.
        changed: the changed graph, in the dtype of the original one.
        calls: the inputs, one call after the other.
        limit_of: computes the largest accepted error of a value from the error of the original, both relative to the
            largest value of the tensor.
    """
    truth, _ = _values(wide, [call.cast(torch.float64) for call in calls])
    rounded, _ = _values(original, calls)
    values, raised = _values(changed, calls)
    earlier = {step.key for step in steps_of(original)}
    steps = [step for step in steps_of(changed) if step.key not in earlier]
    stands_for = _counterparts(steps)
    nodes = list(changed.graph.nodes)
    faults: dict[Node, tuple[str, float, float]] = {}
    for node in nodes:
        name = stands_for.get(node.name, node.name)
        if node.name in values and name in truth and name in rounded:
            faults[node] = _fault(truth[name], rounded[name], values[node.name], limit_of)
    if raised:
        first, fault = nodes[: len(values) + 1][-1], (raised, math.inf, 0.0)
    else:
        wrong = dict.fromkeys(node for node in nodes if faults.get(node, ("new",))[0])
        ends = [node for node in wrong if node.op == "output"]
        guilty = {*graph.reached(ends, lambda node: [each for each in node.all_input_nodes if each in wrong])}
        in_order = [node for node in nodes if node in guilty]
        known = next((node for node in in_order if node in faults), None)
        if known is None:
            return None
        first, fault = in_order[0], faults[known]
        if known is not first:
            text = f"the original has no such value, and {known.name}, which follows, is {fault[0]}"
            fault = text, *fault[1:]
    was = {node.name: node for node in original.graph.nodes}.get(stands_for.get(first.name, first.name))
    return _described(first, was, steps, calls[-1].name, *fault)


def _values(graph_module: GraphModule, calls: Sequence[Call]) -> tuple[dict[str, Any], str]:
    """Compute the values of nodes in the last of some calls; if a node raises, the values before it, and its error as text."""
    values: dict[str, Any] = {}

    def keep(node: Node, value: Any) -> None:
        values[node.name] = mapped(value, lambda tensor: tensor.detach().clone())

    with restored(graph_module, dict(graph_module.named_buffers())):
        try:
            for call in calls[:-1]:
                run_call(graph_module, call)
            run_call(NodeValues(graph_module, keep), calls[-1])
        except Exception as error:  # a graph that raises anything diverges
            return values, f"it raises {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return values, ""


def _fault(
    truth: Any, rounded: Any, value: Any, limit_of: Callable[[float], float]
) -> tuple[str, float, float]:
    """Compare a value with the right one in float64 and in the own dtype; returns a text, empty if right, error and limit."""
    try:
        pairs(rounded, value, "its value")
        limit, error = limit_of(_error(truth, rounded)), _error(truth, value)
    except Unlike as unlike:
        return str(unlike), math.inf, 0.0
    text = f"off by {error:.3g} of its largest value; the limit is {limit:.3g}"
    return "" if error <= limit else text, error, limit


def _error(expected: Any, actual: Any) -> float:
    both = pairs(expected, actual, dtypes=False)
    return max((tensor_error(left, right)[1] for _, left, right in both), default=0.0)


def _counterparts(steps: Sequence[Step]) -> dict[str, str]:
    """The nodes that passes made to replace others, with the names of the replaced nodes in the original."""
    found: dict[str, str] = {}
    for edit in (edit for step in steps for edit in step.edits or ()):
        if isinstance(edit, Redirect) and edit.is_replacement:
            found[edit.new] = found.get(edit.old, edit.old)
    return found


def _described(
    node: Node, was: Node | None, steps: Sequence[Step], call: str, fault: str, error: float, limit: float
) -> Divergence:
    """Describe a node: its place in the model, its call in the original graph, and the last step that changed it."""
    known = graph.module_path(node) or graph.source_line(node)
    origin = node if known or was is None else was
    return Divergence(
        node.name,
        graph.module_path(origin),
        graph.source_line(origin),
        fault,
        was=_written(was or node),
        now=_written(node),
        step=next((step.name for step in reversed(steps) if _touches(step, node)), ""),
        call=call,
        error=error,
        limit=limit,
    )


def _touches(step: Step, node: Node) -> bool:
    """Tell whether a pass changed a node, its arguments, or the module or tensor that it uses by name."""
    names, paths = set(step.marked), set[str]()
    for edit in step.edits or ():
        if isinstance(edit, NodeEdit):
            names.add(edit.name)
        elif isinstance(edit, Redirect):
            names.update((edit.new, *edit.users))
        elif isinstance(edit, Swapped):
            paths.update(edit.left)
    return node.name in names or (
        node.op in ("call_module", "get_attr") and is_inside(str(node.target), paths)
    )


def _written(node: Node) -> str:
    """The text of a node as a call; a called layer is shown with its options."""
    values = [*map(str, node.args), *(f"{name}={value}" for name, value in node.kwargs.items())]
    name = graph.function_name(node) or str(node.target)
    if node.op == "call_module" and node.graph.owning_module is not None:
        layer = node.graph.owning_module.get_submodule(name)
        name = f"{name}: {type(layer).__name__}({layer.extra_repr()})"
    return f"{name}({', '.join(values)})"
