"""Tensors that a forward keeps for later calls and that are the same at each: tables of positions, grids, masks.

Such a tensor is made of fixed sizes, constants and buffers. Where a later call reads what an earlier one made, the graph
makes it anew, which is equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fxopt.capture.fakes.snapshots import Snapshot
from fxopt.capture.nodes.comparison import calls_of, same_calls, same_constants
from fxopt.capture.runs.run_result import RunResult
from fxopt.effects import written_by


class CachedValues:
    """The tensors that a run has left in the model and that depend on nothing that varies; `known` are their values,
    by the identity of the tensors."""

    def __init__(self, run: RunResult) -> None:
        self._run = run
        buffers = run.request.model.named_buffers()
        self._buffers = {name: buffer for name, buffer in buffers if name in run.unchanged_buffers}
        self._values: dict[torch.fx.Node, Any] = {}
        self._nodes = {key: node for key, node in _nodes_of_kept(run).items() if self._is_known(node)}
        self.known = {key: self._values[node].clone() for key, node in self._nodes.items()}

    def same(self, again: RunResult) -> bool:
        """Tell whether `again`, which found the `known` tensors, makes the calls that this run makes with its own."""
        kept = {key: f"kept{number}" for number, key in enumerate(self.known)}
        graph, constants = self._without_values({self._nodes[key]: name for key, name in kept.items()})
        names = {id(real): kept[key] for key, real in self.known.items()}
        other, others = _renumbered(_copied(again.graph)[0], again.constants, names)
        calls, its = calls_of(graph), calls_of(other)
        return (
            again.state == self._run.state
            and not again.changed_outside
            and len(calls) == len(its)
            and same_constants(constants, others)
            and same_calls(list(zip(calls, its, strict=True)), lambda mine, size: bool(mine == size))
        )

    def _is_known(self, node: torch.fx.Node) -> bool:
        """Tell whether a node has one value at each call, which is computed here."""
        state = torch.get_rng_state()
        try:
            with torch.no_grad(), torch.random.fork_rng():
                self._value(node)
                return torch.equal(torch.get_rng_state(), state)
        except LookupError:
            return False

    def _value(self, node: torch.fx.Node) -> Any:
        """The value of a node; LookupError where it has none before the graph runs."""
        if node not in self._values:
            target: Any = node.target
            constants = self._run.constants
            if node.op == "get_attr":
                self._values[node] = constants[target] if target in constants else self._buffers[target]
            elif target is getattr and node.args[1] == "device":
                self._values[node] = self._run.request.device()
            elif node.op not in ("call_function", "call_method") or written_by(node, None) != ():
                raise LookupError(node)
            else:
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), self._value)
                call = target if node.op == "call_function" else getattr(torch.Tensor, target)
                self._values[node] = call(*args, **kwargs)
        return self._values[node]

    def _without_values(
        self, names: Mapping[torch.fx.Node, str]
    ) -> tuple[torch.fx.Graph, dict[str, torch.Tensor]]:
        """A copy of the graph in which these nodes are attributes of these names, and its constants."""
        graph, copies = _copied(self._run.graph)
        for node, name in names.items():
            with graph.inserting_before(copies[node]):
                copies[node].replace_all_uses_with(graph.get_attr(name))
        computed = {copies[node] for node in self._values}
        for node in reversed(graph.nodes):
            if node in computed and not node.users:
                graph.erase_node(node)
        return _renumbered(graph, self._run.constants, {})


def _nodes_of_kept(run: RunResult) -> dict[int, torch.fx.Node]:
    """The nodes of the tensors that a run has left in the model, by the identity of the tensors."""
    snapshots = [value for value in run.changes.values() if isinstance(value, Snapshot)]
    made = {id(t): run.made_by(t) for snapshot in snapshots for t in snapshot.tensors or ()}
    return {key: node for key, node in made.items() if node is not None}


def _copied(graph: torch.fx.Graph) -> tuple[torch.fx.Graph, dict[torch.fx.Node, torch.fx.Node]]:
    copied = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in graph.nodes:
        copies[node] = copied.node_copy(node, copies.__getitem__)
    return copied, copies


def _renumbered(
    graph: torch.fx.Graph, constants: Mapping[str, torch.Tensor], names: Mapping[int, str]
) -> tuple[torch.fx.Graph, dict[str, torch.Tensor]]:
    """The graph with its constants numbered as it uses them; those in `names`, by identity, get these names."""
    numbered: dict[int, str] = {}
    used: dict[str, torch.Tensor] = {}
    for node in graph.nodes:
        tensor = constants.get(str(node.target)) if node.op == "get_attr" else None
        if tensor is not None and id(tensor) in names:
            node.target = names[id(tensor)]
        elif tensor is not None:
            node.target = numbered.setdefault(id(tensor), f"constant{len(numbered)}")
            used[node.target] = tensor
    return graph, used
