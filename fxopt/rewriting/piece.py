"""The piece of a graph at a rewritten site, before and after its changes, with nodes around it."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.fx import Node

from fxopt import effects, graph, operators
from fxopt.operators import Fact
from fxopt.outputs import tensors
from fxopt.rewriting.edits import Edit, NodeEdit, NodeState, Redirect, Swap
from fxopt.rewriting.snapshot import Snapshot
from fxopt.submodules import is_inside, weights_of

AROUND = 24
"""The largest number of nodes around a site that are run with it."""


class Read(NamedTuple):
    """A use of a piece by another node: the user, and the used node before and after the changes."""

    user: str
    old: str
    new: str


class Piece:
    """The nodes of a site before and after its changes.

    The core is the changed nodes and, with `whole`, also the untouched nodes through which values flow from changed nodes
    to other changed nodes. The nodes around the core may reveal a wrong change: those that follow the core, and those before
    its end that read the same inputs, because the inputs may be written in place. The piece ends at nodes that mix values,
    such as matrix products, because these have rounding errors of their own.

    Attributes:
        before: the nodes before the changes, in order, by name.
        after: the nodes after the changes, in order, by name.
        taken: the modules, parameters and buffers that were replaced, by qualified name.
        put: the values that replaced them, by qualified name.
        mixes: whether a node of the core mixes values.
        changes_mix: whether a changed node mixes values.
        between: the untouched nodes of the core.

    Args:
        then: the graph module before the changes.
        nodes: its nodes by name, with those that were created.
        edits: all changes of the site.
        around: whether the piece includes nodes around the core.
        whole: whether untouched nodes between changed ones belong to the core. They never do if other nodes write among
            them, or if one of them has jumps, which would hide small errors.
    """

    def __init__(
        self,
        then: Snapshot,
        nodes: Mapping[str, Node],
        edits: Sequence[Edit],
        *,
        around: bool,
        whole: bool = False,
    ) -> None:
        self._graph_module, self._nodes, self._then = then.graph_module, nodes, then
        now = list(self._graph_module.graph.nodes)
        order_then, order_now = [*then.nodes], [node.name for node in now]
        self._places = [{name: i for i, name in enumerate(order)} for order in (order_then, order_now)]
        swaps = [edit for edit in edits if isinstance(edit, Swap)]
        self.taken = {path: value for swap in reversed(swaps) for path, value in swap.before.items()}
        self.put = {path: value for swap in swaps for path, value in swap.after.items()}
        changed = [path for path in self.put if self.put[path] is not self.taken[path]]
        redirects = [edit for edit in edits if isinstance(edit, Redirect)]
        core = {edit.name for edit in edits if isinstance(edit, NodeEdit) and (edit.fields or edit.meta)}
        readers = (node for node in now if node.op in ("call_module", "get_attr"))
        core |= {node.name for node in readers if is_inside(str(node.target), changed)}
        # The node that replaces a value may be an existing one, computed elsewhere from the same inputs.
        core |= {edit.new for edit in redirects if nodes[edit.new].op != "placeholder"}
        self._core = core
        self.between = self._between(order_now) if whole else set()
        values = (*self.taken.values(), *self.put.values())
        self.changes_mix = any(w is not None for v in values for w in weights_of(v)) or any(
            self._is_mixture(nodes[name]) for name in order_now if name in core
        )
        core |= self.between
        self._redirected = {user for edit in redirects for user in edit.users} - core
        self._stands_in = [nodes[edit.new] for edit in redirects]
        present = [nodes[name] for name in order_now if name in core]
        self.mixes = self.changes_mix or any(self._is_mixture(nodes[name]) for name in self.between)
        chosen = core | (self._around(present, order_now, order_then) if around else set())
        self.before = {name: then.state(name) for name in order_then if name in chosen}
        self.after = {name: NodeState.of(nodes[name]) for name in order_now if name in chosen}

    @property
    def around(self) -> list[str]:
        """The nodes of the piece outside the core."""
        return [name for name in self.after if name not in self._core]

    @property
    def inputs(self) -> list[str]:
        """The nodes outside the piece whose values it uses, or whose values replace those of its nodes."""
        uses, taken = self._uses(), set[str]()
        for after, side in enumerate((self.before, self.after)):
            names = {pair[after] for pair in uses}.union(*(s.references() for s in side.values()))
            taken |= names - side.keys()
        return sorted(taken)

    @property
    def outputs(self) -> list[tuple[str, str]]:
        """Pairs of nodes whose values must be equal, before and after; they include inputs, which may be written in place."""
        return [*self._uses(), *((name, name) for name in (*self.around, *self.inputs))]

    @property
    def returned(self) -> list[tuple[str, str]]:
        """The pairs of `outputs` that the graph returns."""
        return [
            (read.old, read.new) for read in sorted({*self._reads()}) if self._nodes[read.user].op == "output"
        ]

    @property
    def rounds(self) -> bool:
        """Tell whether the site has new weights and not only float64 values, or whether a node names another dtype than float64."""
        weights = [w for value in self.put.values() for w in weights_of(value)]
        if weights:
            weights += tensors([graph.value_of(self._nodes[name]) for name in (*self.before, *self.inputs)])
        dtypes = [w.dtype for w in weights if w.is_floating_point()]
        states = (*self.before.values(), *self.after.values())
        dtypes += [v for state in states for v in graph.leaf_arguments(state) if isinstance(v, torch.dtype)]
        return any(dtype != torch.float64 for dtype in dtypes)

    @property
    def constants(self) -> list[int | float]:
        """The numbers among the arguments of the nodes before the changes."""
        return graph.numbers_in(self.before.values())

    @property
    def reads(self) -> list[Read]:
        """The uses of the piece by other nodes, if the piece may write in place: the value read may be overwritten at its end."""
        nodes = [self._nodes[name] for name in self.after]
        if all(effects.written_by(node, self._called(node)) == () for node in nodes):
            return []
        around = (Read(user.name, n, n) for n in self.around for user in self._nodes[n].users)
        return sorted({read for read in (*self._reads(), *around) if read.user not in self.after})

    def read_before(self, after: bool) -> dict[str, list[Read]]:
        """Group the `reads` whose user comes before a node of the piece, by the first such node."""
        side, place = self.after if after else self.before, self._places[after]
        found = collections.defaultdict[str, list[Read]](list)
        for read in self.reads:
            behind = (name for name in side if place[name] > place.get(read.user, len(place)))
            if first := next(behind, None):
                found[first].append(read)
        return found

    def leave_out(self, name: str) -> None:
        """Remove a node around the core from the piece, so that it becomes an input."""
        del self.before[name], self.after[name]

    def _uses(self) -> list[tuple[str, str]]:
        """For each use of the core by another node, the used node before and after the changes."""
        pairs = {(name, name) for name in self._core & {*self.after} if self._nodes[name].op == "output"}
        return sorted(pairs | {(read.old, read.new) for read in self._reads()})

    def _reads(self) -> Iterator[Read]:
        users = {user.name for name in self._core & {*self.after} for user in self._nodes[name].users}
        for name in (users - self._core) | self._redirected:
            now = NodeState.of(self._nodes[name])
            old_names = self._then.state(name).references()
            for old, new in zip(old_names, now.references(), strict=True):
                if old in self._core or new in self._core or old != new:
                    yield Read(name, old, new)

    def _between(self, order: Sequence[str]) -> set[str]:
        """The untouched nodes through which values flow from the core back into the core."""
        inputs = {name: {source.name for source in self._nodes[name].all_input_nodes} for name in order}
        for name in self._places[0]:
            inputs.setdefault(name, set()).update(self._then.state(name).references())
        users = collections.defaultdict[str, set[str]](set)
        for name, sources in inputs.items():
            for source in sources:
                users[source].add(name)
        behind = set(graph.reached(self._core, lambda name: users.get(name, ())))
        ahead = set(graph.reached(self._core, lambda name: inputs.get(name, ())))
        between = (behind & ahead) - self._core
        if not between or len(between) > AROUND or any(self._jumps(self._nodes[name]) for name in between):
            return set()
        own = [i for i, name in enumerate(order) if name in between | self._core]
        others = (self._nodes[name] for name in order[own[0] : own[-1]] if name not in between | self._core)
        # Such a write would change values between, but the piece does not run it.
        writes = any(effects.written_by(node, self._called(node)) != () for node in others)
        return set() if writes else between

    def _around(self, core: Sequence[Node], *orders: Sequence[str]) -> set[str]:
        """The nodes that follow the core, and those before its end that read the inputs of the core."""
        ends = (max((i for i, name in enumerate(order) if name in self._core), default=0) for order in orders)
        earlier = {name for order, end in zip(orders, ends, strict=True) for name in order[:end]}
        states = [NodeState.of(node) for node in core]
        states += [self._then.state(name) for name in self._core if name in self._places[0]]
        inputs = {name for state in states for name in state.references()} - self._core
        pending = collections.deque((node, True) for node in dict.fromkeys((*core, *self._stands_in)))
        pending += [(self._nodes[name], False) for name in sorted(inputs)]
        found = set[str]()
        while pending and len(found) < AROUND:
            value, behind = pending.popleft()
            for user in value.users:
                if user.name in self._core | found or not (behind or user.name in earlier):
                    continue
                if not self._shows(user, behind):
                    continue
                found.add(user.name)
                pending.append((user, behind))
                for target in effects.written_by(user, self._called(user)) or ():
                    pending.append((target, behind))
                    while target.name not in self._core and Fact.VIEW in self._facts(target):
                        found.add(target.name)  # a write into a view is a write into its base
                        target = target.all_input_nodes[0]
                        pending.append((target, behind))
        return found

    def _shows(self, node: Node, behind: bool) -> bool:
        """Tell whether a node is cheap, and may enlarge a difference or cause one by a write."""
        called, facts = self._called(node), self._facts(node)
        if not node.op.startswith("call") or Fact.RANDOM in facts or effects.written_by(node, called) is None:
            return False
        if Fact.DESCRIBES in facts and Fact.LAYOUT not in facts:
            return False
        if self._is_mixture(node):
            return not behind and called is None  # it may return a view
        # After a mixture only smooth nodes: others may enlarge its rounding errors.
        smooth = _is_inexact(node) and bool(facts & (Fact.SMOOTH | Fact.LAYOUT))
        return not (behind and self.mixes) or smooth

    def _jumps(self, node: Node) -> bool:
        """Tell whether a node may return equal values for inputs that differ a little, as a step function does."""
        smooth = Fact.SMOOTH | Fact.SMOOTH_IN_FIRST | Fact.MIXES
        return not (_is_inexact(node) and self._facts(node) & smooth)

    def _is_mixture(self, node: Node) -> bool:
        weights = next(weights_of(self._called(node)), None)
        return weights is not None or bool(self._facts(node) & (Fact.MIXES | Fact.STATISTICS))

    def _facts(self, node: Node) -> Fact:
        return operators.facts_of(node, self._called(node))

    def _called(self, node: Node) -> nn.Module | None:
        if node.op != "call_module":
            return None
        try:
            return self._graph_module.get_submodule(str(node.target))
        except AttributeError:  # a wrong change has removed the module
            return None


def _is_inexact(node: Node) -> bool:
    dtype = graph.dtype_of(node)
    return dtype is None or dtype.is_floating_point or dtype.is_complex
