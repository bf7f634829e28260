"""Higher-order operators: `torch.cond` becomes one node, the others become the calls of torch that they represent.

`while_loop`, `scan`, `map` and `flex_attention` exist so that a compiler need not read Python's loops. A capture does read
them: a loop over a dimension is unrolled. A branch of `torch.cond` is recorded in place, layers call by call. Its nodes are
then moved into a separate graph. The inputs of this graph are all outside values that it uses, including parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxopt import effects
from fxopt.capture.capture_internals import cond, free_unbacked_symbols, sdpa_dense
from fxopt.capture.nodes.comparison import is_call, is_device
from fxopt.capture.nodes.shared_memory import memory_of
from fxopt.capture.recording.recorder import Recorder
from fxopt.capture.recording.torch_call import Call
from fxopt.capture.runtime import checks, modes
from fxopt.capture.runtime.conditional import Conditional
from fxopt.capture.runtime.traced_module import TracedModule
from fxopt.errors import TraceError
from fxopt.memory import storage_of
from fxopt.objects import build_object, set_attributes, set_items, tensors_in
from fxopt.torch_internals import pytree

_REFUSED: dict[Any, str] = {
    **dict.fromkeys(modes.SWITCHES, "switches a mode"),
    **dict.fromkeys((build_object, set_attributes, set_items), "makes or changes an object"),
    **dict.fromkeys(checks.CHECKS, "decides on a value itself"),
}


def expand(recorder: Recorder, call: Call) -> Any:
    """Record `torch.cond` as a node with its branches, and any other higher-order operator as the calls that it represents."""
    if call.function is cond:
        return _conditional(recorder, *call.args, **call.kwargs)
    expanded = _EXPANSIONS.get(call.function.name())
    if expanded is None:
        raise TraceError(
            f"the forward calls the higher-order operator {call.function.name()!r}, which a graph cannot hold. "
            f"{recorder.writer.where()}"
        )
    with recorder.recorded_inside():
        return expanded(*call.args, **call.kwargs)


def _while_loop(
    cond_fn: Any, body_fn: Any, carried: Sequence[Any], additional: Sequence[Any], *_: Any
) -> Any:
    while cond_fn(*carried, *additional):
        carried = body_fn(*carried, *additional)
    return tuple(carried)


def _scan(combine_fn: Any, init: Sequence[Any], xs: Sequence[Any], additional_inputs: Sequence[Any]) -> Any:
    carry, rows = list(init), []
    for row in zip(*(x.unbind(0) for x in xs), strict=True):
        results = combine_fn(*carry, *row, *additional_inputs)
        carry = list(results[: len(init)])
        rows.append(results[len(init) :])
    return [*carry, *(torch.stack(column) for column in zip(*rows, strict=True))]


def _map(function: Any, xs: Sequence[Any], args: Sequence[Any], mutated_arg_indices: str = "") -> Any:
    if mutated_arg_indices:
        raise TraceError("map is called with a function that writes into its arguments: return the results.")
    rows = [function(*row, *args) for row in zip(*(x.unbind(0) for x in xs), strict=True)]
    return pytree.tree_map(lambda *column: torch.stack(column), *rows)


def _flex_attention(*args: Any, **kwargs: Any) -> Any:
    return sdpa_dense()(*args, **kwargs)


_EXPANSIONS: dict[str, Callable[..., Any]] = {
    "while_loop": _while_loop,
    "scan": _scan,
    "map_impl": _map,
    "flex_attention": _flex_attention,
}


@dataclasses.dataclass(frozen=True)
class _Branch:
    """The outputs of a branch and their structure, its nodes, and the nodes that it uses from outside."""

    outputs: list[torch.Tensor]
    structure: Any
    nodes: list[torch.fx.Node]
    operands: list[torch.fx.Node]

    @property
    def form(self) -> Any:
        """The properties that must be equal in both branches."""
        return self.structure, [(t.shape, t.stride(), t.dtype, t.device) for t in self.outputs]


def _conditional(
    recorder: Recorder, predicate: Any, true: Callable[..., Any], false: Callable[..., Any], operands: Any
) -> Any:
    """Record a call of `torch.cond`; for a number or a size as predicate, decide it as `if` does."""
    if not isinstance(predicate, torch.Tensor):
        with recorder.recorded_inside():
            return true(*operands) if predicate else false(*operands)
    writer = recorder.writer
    node = writer.argument(predicate)
    pytree.tree_map_only(torch.Tensor, writer.argument, operands)
    branches = [_recorded(recorder, branch, operands) for branch in (true, false)]
    taken, other = branches
    if taken.form != other.form:
        recorder.fail("the branches of torch.cond give tensors of different shapes, strides or dtypes")
    if not set(taken.nodes).isdisjoint(other.operands):
        recorder.fail("a branch of torch.cond uses what the other one has made")
    needed = list(dict.fromkeys([*taken.operands, *other.operands]))
    target = Conditional(*(_graph_module(branch, needed, writer) for branch in branches))
    for branch in reversed(branches):
        writer.forget(set(branch.nodes))
        for moved in reversed(branch.nodes):
            writer.graph.erase_node(moved)
    made = tuple(_like(*pair) for pair in zip(taken.outputs, other.outputs, strict=True))
    writer.create("call_function", target, (node, *needed), {}, made)
    return pytree.tree_unflatten(list(made), taken.structure)


def _recorded(recorder: Recorder, function: Callable[..., Any], operands: Sequence[Any]) -> _Branch:
    """Record the calls of a branch after the existing nodes."""
    graph, decisions = recorder.writer.graph, recorder.decisions
    before, asked = set(graph.nodes), decisions.count
    in_branch, recorder.records_layers_in_calls = recorder.records_layers_in_calls, True
    with recorder.recorded_inside():
        result = function(*operands)
    recorder.records_layers_in_calls = in_branch
    if decisions.count > asked:
        recorder.fail("a branch of torch.cond decides on a value itself")
    outputs, structure = pytree.tree_flatten(result)
    if not outputs or not all(isinstance(output, torch.Tensor) for output in outputs):
        recorder.fail("a branch of torch.cond gives something that is no tensor")
    results = [recorder.writer.argument(output) for output in outputs]
    nodes: dict[torch.fx.Node, None] = {}
    for node in graph.nodes:
        own = is_call(node) or is_device(node) or any(source in nodes for source in node.all_input_nodes)
        if node not in before and own:
            nodes[node] = None
    used = [source for node in nodes for source in node.all_input_nodes] + results
    outside = list(dict.fromkeys(source for source in used if source not in nodes))
    given = memory_of(outside)
    if reason := next(filter(None, (_refused(node, given) for node in nodes)), None):
        recorder.fail(f"a branch of torch.cond {reason}, which a graph of its own cannot")
    memory = [storage_of(output) for output in outputs]
    if len(set(memory) | given) < len(memory) + len(given):
        recorder.fail(
            "a branch of torch.cond gives a tensor that shares memory with what it gets, or with another result, which torch "
            "refuses: return a clone"
        )
    for source in outside:
        value = source.meta.get("val")
        if not isinstance(value, (torch.Tensor, torch.SymInt, int)) or isinstance(value, bool):
            recorder.fail(f"a branch of torch.cond uses {source.name!r}, which is no tensor and no size")
    return _Branch(outputs, structure, list(nodes), outside)


def _refused(node: torch.fx.Node, given: set[int]) -> str | None:
    """The reason why a node cannot be in a branch that gets this memory; None if it can."""
    if node.target in _REFUSED:
        return _REFUSED[node.target]
    if node.op == "call_module":
        return f"calls the leaf {node.target!r}"
    if any(free_unbacked_symbols(tensor) for tensor in tensors_in(node.meta.get("val"))):
        return "makes a tensor whose size depends on values"
    if isinstance(node.target, Conditional):
        return None
    written = effects.written_by(node, None) or ()
    return None if given.isdisjoint(memory_of(written)) else "writes into a tensor from outside"


def _graph_module(branch: _Branch, operands: Sequence[torch.fx.Node], writer: Any) -> TracedModule:
    """Build the graph module of a branch."""
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for operand in operands:
        copies[operand] = graph.placeholder(operand.name)
        copies[operand].meta = {"val": operand.meta.get("val")}
    for node in branch.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[writer.argument(output)] for output in branch.outputs))
    return TracedModule(torch.nn.Module(), graph, "Branch")


def _like(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """A tensor with the metadata that both branches return."""
    with torch.no_grad():
        made = torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=one.device)
    differentiable = torch.is_grad_enabled() and (one.requires_grad or other.requires_grad)
    return made.requires_grad_().view_as(made) if differentiable else made
