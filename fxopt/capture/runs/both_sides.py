"""Both sides of a data-dependent branch in one graph: the calls that differ become two graphs inside an `IfElse` node.

Each outcome was captured with the whole forward, so each graph is correct for its outcome. The calls after the last
difference are the same in both: the joined graph has them once, after the node, and they use its results.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from fxopt import effects
from fxopt.capture.fakes.module_tree import is_torch_layer
from fxopt.capture.nodes.comparison import (
    CallComparison,
    Pairs,
    calls_of,
    is_call,
    is_size,
    made_at,
    matched_unbacked_symbols,
    same_constants,
    same_results,
)
from fxopt.capture.nodes.completion import add_constant
from fxopt.capture.nodes.shared_memory import memory_of
from fxopt.capture.runs.equivalence import assumes_all_of, size_comparison, translation
from fxopt.capture.runs.run_result import RunResult, UnprovedError
from fxopt.capture.runtime import modes
from fxopt.capture.runtime.checks import check_outcome
from fxopt.capture.runtime.conditional import IfElse
from fxopt.capture.runtime.traced_module import TracedModule
from fxopt.graph import branches_of, called_module
from fxopt.objects import set_attributes, set_items
from fxopt.torch_internals import statically_known_true

_REFUSED = {set_attributes, set_items}


def join(yes: RunResult, no: RunResult) -> RunResult:
    """Join two runs, which differ in the outcome of one branch, into one graph; raise UnprovedError if that is impossible.

    Layers that only one side calls remain layers inside the node, where they are hidden: `called_in_branches` finds them.
    """
    # A later call may take one side and read a table that the other side has kept.
    kept = any(run.left_out or run.moved or run.keeps_tables for run in (yes, no))
    if kept or yes.changed_outside != no.changed_outside:
        raise UnprovedError("the two outcomes leave other state")
    for run, other in ((yes, no), (no, yes)):
        shared = _Shared(run, other)
        if assumes_all_of(run, other, shared.names):
            return _joined(shared)
    raise UnprovedError("the two outcomes assume other things of the inputs")


class _Shared:
    """The calls that two runs share: `before` the `checks` of a branch, and `after` the last difference."""

    def __init__(self, run: RunResult, other: RunResult) -> None:
        self.run, self.other = run, other
        mine, its = calls_of(run.graph), calls_of(other.graph)
        at = next((i for i, pair in enumerate(zip(mine, its, strict=False)) if _is_branch(*pair)), None)
        if at is None or list(map(made_at, mine[:at])) != list(map(made_at, its[:at])):
            raise UnprovedError("the two outcomes lead to other calls before the branch")
        self.checks = mine[at], its[at]
        asked = torch.fx.node.map_arg(mine[at].args[0], lambda node: node.meta.get("val"))
        if isinstance(asked, torch.Tensor) and not statically_known_true(asked.numel() == 1):
            raise UnprovedError("the forward decides on several values at once")
        self.before: Pairs = list(zip(mine[:at], its[:at], strict=True))
        self.after = list(zip(mine[:at:-1], its[:at:-1], strict=False))[::-1]
        different = [i for i, pair in enumerate(self.after) if made_at(pair[0]) != made_at(pair[1])]
        while True:
            self.after = self.after[different[-1] + 1 :] if different else self.after
            if not self.after:
                raise UnprovedError("the two outcomes give outputs of other kinds")
            names = matched_unbacked_symbols(self.pairs)
            if names is None:
                raise UnprovedError("the two outcomes name sizes that depend on values in different ways")
            self.names = names
            comparison = _Comparison(self)
            comparison.counterpart.update(self.before)
            others = {pair for pair in self.after if not comparison.same_call(*pair)}
            different = [
                i for i, pair in enumerate(self.after) if pair in others or comparison.late.intersection(pair)
            ]
            if not different:
                break
        # The differing values that the calls in `after` use, in pairs of both runs.
        self.values = list(comparison.values)

    @property
    def pairs(self) -> Pairs:
        return [*self.before, *self.after]


def called_in_branches(graph: Graph) -> set[str]:
    """Return the names of the layers that are called inside nodes with branches."""
    sides = [side.graph for node in graph.nodes for side in branches_of(node.target)]
    layers = {str(node.target) for side in sides for node in side.nodes if node.op == "call_module"}
    return layers.union(*map(called_in_branches, sides))


def _is_branch(mine: Node, its: Node) -> bool:
    decided = {mine.args[1], its.args[1]} if mine.target is its.target is check_outcome else ()
    return decided == {True, False} and all(type(answer) is bool for answer in decided)


class _Comparison(CallComparison):
    """Compares calls that two runs share, and collects differing tensors, which may be results of the sides."""

    def __init__(self, shared: _Shared) -> None:
        super().__init__(size_comparison(shared.run, translation(shared.run, shared.other, shared.names)))
        self._constants = shared.run.constants, shared.other.constants
        self._known = {node for pair in shared.pairs for node in pair}
        self._after = {node for pair in shared.after for node in pair}
        # The differing values, and the shared calls that compute them: such calls belong to the sides.
        self.values: dict[tuple[Node, Node], None] = {}
        self.late: set[Node] = set()

    def same(self, mine: Any, its: Any) -> bool:
        made_of = set().union(*(calls_behind(value) for value in (mine, its) if is_size(value)))
        return made_of <= self._known and super().same(mine, its)

    def same_value(self, mine: Node, its: Node) -> bool:
        if super().same_value(mine, its) and self._same_constants(mine, its):
            return True
        one, other = mine.meta.get("val"), its.meta.get("val")
        if (
            not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor))
            or (one.device, one.layout) != (other.device, other.layout)
            or not same_results([(mine, its)], self.same_size)
        ):
            return False
        self.late |= self._after & (calls_behind(mine) | calls_behind(its))
        self.values[mine, its] = None
        return True

    def _same_constants(self, mine: Node, its: Node) -> bool:
        if mine.op != "get_attr":
            return True
        held = [{n: t for n, t in constants.items() if n == mine.target} for constants in self._constants]
        return same_constants(*held)


def calls_behind(node: Node) -> set[Node]:
    """Return the node itself if it is a call, else the calls behind the size or the part of a result that it computes."""
    return {node} if is_call(node) else set().union(*map(calls_behind, node.all_input_nodes))


def _side(run: RunResult, check: Node, after: Collection[Node], values: Collection[Node]) -> list[Node]:
    """Return the nodes after a check that only this side has; UnprovedError if they do more than compute `values`."""
    calls = calls_of(run.graph)
    own, later = set(calls[calls.index(check) + 1 :]).difference(after), set(after)
    nodes = [node for node in run.graph.nodes if own & calls_behind(node)]
    if any(later & calls_behind(node) for node in nodes):
        raise UnprovedError("what follows the branch reads a size that a side of it has made")
    used = {source for node in nodes for source in node.all_input_nodes}.union(values).difference(nodes)
    given = memory_of(used)
    switches = [node for node in nodes if node.target in modes.SWITCHES]
    entered = {node for node in switches if not isinstance(node.args[0], Node)}
    if (
        any(node.target in _REFUSED for node in nodes)
        or {n.args[0] for n in switches if n not in entered} != entered
    ):
        raise UnprovedError("a side of the branch switches a mode, or changes an object")
    for node in nodes:
        if isinstance(node.target, IfElse):
            continue
        module = called_module(run.request.model, node)
        if module is not None and (not is_torch_layer(module) or isinstance(module, torch.jit.ScriptModule)):
            raise UnprovedError(f"a side of the branch calls the leaf {node.target!r}")
        if given & memory_of(effects.written_by(node, module) or ()):
            raise UnprovedError("a side of the branch writes into a tensor from outside")
    return nodes


def _joined(shared: _Shared) -> RunResult:
    """Write both sides as one node into the graph of the first run; the calls after the sides use its results."""
    run, other, values = shared.run, shared.other, shared.values
    if not values:
        raise UnprovedError("no value that is used later differs")
    given, its = zip(*values, strict=True)
    after, its_after = zip(*shared.after, strict=True)
    mine = _side(run, shared.checks[0], after, given)
    sides = [(mine, given), (_side(other, shared.checks[1], its_after, its), its)]
    check, graph, operands = shared.checks[0], run.graph, _Operands(shared)
    with graph.inserting_before(after[0]):
        modules = operands.modules(sides)
        target = IfElse(*(modules if check.args[1] else modules[::-1]))
        node = graph.call_function(target, (check.args[0], *operands.used))
        node.meta = {**check.meta, "val": tuple(value.meta["val"] for value in given)}
        results = {pair: graph.call_function(operator.getitem, (node, i)) for i, pair in enumerate(values)}
    for (value, _), result in results.items():
        result.meta = {**check.meta, "val": value.meta["val"]}
    for one, another in shared.after:
        one.args, one.kwargs = _replaced((one.args, one.kwargs), (another.args, another.kwargs), results)
    for moved in reversed([check, *mine]):
        if moved.users:
            raise UnprovedError("what follows the branch uses what a side of it has made")
        graph.erase_node(moved)
    decided = sum(call.target is check_outcome for call, _ in shared.before)
    rest = run.checks[decided + 1 :]
    checks = [
        *run.checks[:decided],
        *rest,
        *(text for text in other.checks[decided + 1 :] if text not in rest),
    ]
    return dataclasses.replace(run, constants=operands.constants, checks=checks)


def _replaced(mine: Any, its: Any, results: Mapping[tuple[Node, Node], Node]) -> Any:
    """Return an argument with results in place of the differing values."""
    if isinstance(mine, Node):
        return results.get((mine, its), mine)
    if isinstance(mine, slice):
        ends = ((getattr(mine, end), getattr(its, end)) for end in ("start", "stop", "step"))
        return slice(*(_replaced(*both, results) for both in ends))
    if isinstance(mine, dict):
        return {key: _replaced(value, its[key], results) for key, value in mine.items()}
    if isinstance(mine, (tuple, list)):
        parts = [_replaced(*both, results) for both in zip(mine, its, strict=True)]
        return tuple(parts) if isinstance(mine, tuple) else parts
    return mine


class _Operands:
    """The nodes from outside that the sides use; they are in the graph of the first run, before the calls in `after`."""

    def __init__(self, shared: _Shared) -> None:
        self._run, self._other, self._first = shared.run, shared.other, shared.after[0][0]
        self._nodes = {its: mine for mine, its in shared.before}
        # Where to insert a node of the other graph that is not a call: a later `x.t_()` would change the size of `x`.
        self._places: dict[Node, Node] = {}
        place = shared.checks[0]
        earlier = itertools.takewhile(lambda node: node is not shared.checks[1], shared.other.graph.nodes)
        for node in reversed(list(earlier)):
            place = self._places[node] = self._nodes.get(node, place)
        self.constants = dict(shared.run.constants)
        self.used: list[Node] = []

    def modules(self, sides: Sequence[tuple[Sequence[Node], Sequence[Node]]]) -> list[TracedModule]:
        """Build a graph module of each side, given by its nodes and its output values; all have the same inputs."""
        outside = [
            source
            for nodes, values in sides
            for source in dict.fromkeys([s for node in nodes for s in node.all_input_nodes] + [*values])
            if source not in set(nodes)
        ]
        self.used = list(dict.fromkeys(map(self._node, outside)))
        return [self._module(*side) for side in sides]

    def _module(self, nodes: Sequence[Node], values: Sequence[Node]) -> TracedModule:
        graph = Graph()
        inputs: dict[Node, Node] = {}
        copies: dict[Node, Node] = {}
        # Placeholders are named by position, so that equal sides of two runs have equal code.
        for place, operand in enumerate(self.used):
            inputs[operand] = graph.placeholder(f"operand_{place}")
            inputs[operand].meta = {"val": operand.meta.get("val")}

        def inside(node: Node) -> Node:
            return copies[node] if node in copies else inputs[self._node(node)]

        for node in nodes:
            arguments = torch.fx.node.map_arg((node.args, node.kwargs), inside)
            copies[node] = graph.create_node(node.op, node.target, *arguments)
            copies[node].meta = dict(node.meta)
        graph.output(tuple(map(inside, values)))
        layers = graph.find_nodes(op="call_module")
        return TracedModule(self._run.request.model if layers else torch.nn.Module(), graph, "Branch")

    def _node(self, node: Node) -> Node:
        """Return the first graph's node with the value of `node`; copy a non-call that is too late, or in the other graph."""
        if node not in self._nodes:
            here = node.graph is self._run.graph
            if here and node < self._first:
                return node
            if is_call(node):
                raise UnprovedError("a side of the branch uses what follows it")
            with self._run.graph.inserting_before(self._places.get(node, self._first)):
                self._nodes[node] = copy = self._run.graph.node_copy(node, self._node)
            if not here and node.op == "get_attr" and node.target in self._other.constants:
                tensor = self._other.constants[str(node.target)]
                copy.target = add_constant(self.constants, tensor, self._run.request.model)
        return self._nodes[node]
