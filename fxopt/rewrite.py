"""Match, apply, revert: the skeleton of fxopt's own passes.

`match` reads only and yields sites and refusals; `apply` rewrites one site and says what undo needs; `revert`
is its inverse. What undo needs is kept as data in the `PassRecord` of the graph module. Every rewritten node
also carries its role in `node.meta`, and every new module a trace of the pass: if these are there and the
record is not, the record was lost, and undoing raises.
"""

from __future__ import annotations

import abc
import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from torch import nn
from torch.fx import GraphModule, Node

from fxopt import graph, submodules
from fxopt.errors import PassError, UndoError
from fxopt.record import MARKS, ROLES, Step, find_record, make_record
from fxopt.transformation import ReversibleTransformation, Transformation, check_graph_module, steps_of

TRACE = "fxopt_rewritten_by"
"""The attribute of a module that a pass made: the signatures of the passes that made it what it is."""


class Site(Protocol):
    """A place that a pass can rewrite; `node` stands for it in tables."""

    @property
    def node(self) -> Node: ...


S = TypeVar("S", bound=Site)


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A place that looks like a site and is left alone, with the reason."""

    node: Node
    reason: str


@dataclasses.dataclass(frozen=True)
class Change:
    """What `apply` did.

    Attributes:
        transformed: the nodes that now stand for the site; they are marked as transformed.
        nodes: the nodes that `revert` needs, by role.
        modules: the paths of the modules that were replaced, added or removed.
        data: what else `revert` needs; it is deep-copied and pickled with the graph module.
    """

    transformed: tuple[Node, ...]
    nodes: Mapping[str, Node] = dataclasses.field(default_factory=dict)
    modules: tuple[str, ...] = ()
    data: Any = None


@dataclasses.dataclass(frozen=True)
class Entry:
    """A change as the record keeps it; nodes carry `(site, role)` in their metadata."""

    site: int
    signature: str
    name: str
    roles: tuple[str, ...]
    modules: tuple[str, ...]
    data: Any


class Row(NamedTuple):
    """A site (`reason` is `None`) or a refusal.

    Attributes:
        node: the name of the node.
        module: the module that it calls or belongs to; empty where the trace does not tell.
        reason: why it is left alone.
        source: `file:line` of the model's code; empty where the trace does not tell.
    """

    node: str
    module: str
    reason: str | None
    source: str = ""


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What a pass would do to a graph: `str()` gives a table.

    Attributes:
        name: the pass.
        rows: the sites and refusals, in the order of matching.
    """

    name: str
    rows: tuple[Row, ...]

    @property
    def sites(self) -> tuple[tuple[str, str], ...]:
        """Node and module of what would be rewritten."""
        return tuple((row.node, row.module) for row in self.rows if row.reason is None)

    @property
    def refusals(self) -> tuple[tuple[str, str, str], ...]:
        """Node, module and reason of what would be left alone."""
        return tuple((row.node, row.module, row.reason) for row in self.rows if row.reason is not None)

    def __str__(self) -> str:
        head = f"{self.name}: {len(self.sites)} sites, {len(self.refusals)} refused"
        cells = [(r.node, r.module, os.path.basename(r.source), r.reason or "rewritten") for r in self.rows]
        columns = [column for column in zip(*cells, strict=True) if any(column)]
        widths = [max(map(len, column)) for column in columns]
        lines = [
            "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in zip(*columns, strict=True)
        ]
        return "\n  ".join([head, *lines])

    __repr__ = __str__


class Rewrite(Transformation, Generic[S]):
    """A transformation written as `match` and `apply`."""

    @abc.abstractmethod
    def match(self, graph_module: GraphModule) -> Iterator[S | Refusal]:
        """Yield the sites that can be rewritten, and a refusal for each place that only looks like one.

        Reads only. Sites of one call must not overlap: `apply` of one leaves the others as they are.
        """

    @abc.abstractmethod
    def apply(self, graph_module: GraphModule, site: S) -> Change:
        """Rewrite `site`."""

    def explain(self, graph_module: GraphModule) -> Explanation:
        """What the pass would rewrite in `graph_module`, and what it would not, and why.

        Example:
            >>> import torch
            >>> from fxopt import FuseBatchNorm2dInConv2d
            >>> layers = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.BatchNorm2d(4))
            >>> FuseBatchNorm2dInConv2d().explain(torch.fx.symbolic_trace(layers))
            FuseBatchNorm2dInConv2d: 0 sites, 1 refused
              _1  1  the BatchNorm2d is in training mode: it normalises by batch statistics
        """
        check_graph_module(self, graph_module)
        rows = []
        for found in self.match(graph_module):
            node, reason = found.node, found.reason if isinstance(found, Refusal) else None
            rows.append(Row(node.name, graph.module_path(node), reason, graph.source_line(node)))
        return Explanation(type(self).__name__, tuple(rows))

    def transform(self, graph_module: GraphModule) -> GraphModule:
        """Rewrite all sites, and those that this opens up (two BatchNorms in a row), until there is none.

        Raises:
            PassError: there is no end to it: the pass matches what it makes.
        """
        rounds = 0
        limit = 1 + len(graph_module.graph.nodes)
        while sites := [found for found in self.match(graph_module) if not isinstance(found, Refusal)]:
            rounds += 1
            if rounds > limit:
                raise PassError(
                    f"{self!r} does not come to an end: it still matches {sites[0].node.name} after {limit} "
                    "rounds; match must not yield what apply made"
                )
            for site in sites:
                change = self._apply(graph_module, site)
                for node in change.transformed:
                    self.mark_as_transformed(node)
                self._keep(graph_module, change)
        return graph_module

    def _apply(self, graph_module: GraphModule, site: S) -> Change:
        where = graph.place(site.node)
        try:
            return self.apply(graph_module, site)
        except Exception as error:
            error.add_note(f"{type(self).__name__} was rewriting {where}")
            raise

    def _keep(self, graph_module: GraphModule, change: Change) -> None:
        """A pass that is not reversible keeps nothing."""


class ReversibleRewrite(Rewrite[S], ReversibleTransformation):
    """A rewrite with `revert`, the inverse of `apply`."""

    @abc.abstractmethod
    def revert(self, graph_module: GraphModule, nodes: dict[str, Node], data: Any) -> None:
        """Undo one change, given its nodes by role and its data.

        Raises:
            UndoError: the site is not as `apply` left it, so that undoing would not be exact.
        """

    def changed(self, node: Node, what: str) -> UndoError:
        """The error to raise where `what`, at `node`, is not as `apply` left it."""
        return UndoError(
            f"{self!r} cannot be undone: {what} was changed since, at {graph.place(node)}. Undo that change "
            "first, or take a copy from before it"
        )

    def transform(self, graph_module: GraphModule) -> GraphModule:
        """As `Rewrite.transform`; the order of children is recorded where it does not stay."""
        before = submodules.child_names(graph_module)
        graph_module = super().transform(graph_module)
        record = find_record(graph_module)
        if record is not None and record.entries:
            after = submodules.child_names(graph_module)
            changed = {path: names for path, names in before.items() if after.get(path) != names}
            record.orders = record.orders | {
                path: submodules.merged_order(record.orders.get(path, []), names)
                for path, names in changed.items()
            }
        return graph_module

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        """Undo all changes of this pass, the last one first.

        A graph module that the pass never changed is returned as it is.

        Raises:
            UndoError: the record is gone, or something else has changed what the pass made since.
        """
        record = find_record(graph_module)
        own = [entry for entry in record.entries if entry.signature == self.signature] if record else []
        if not own:
            self._check_no_trace(graph_module)
        return self._revert_all(graph_module, own)

    def reverse_steps(self, graph_module: GraphModule, steps: Sequence[Step]) -> GraphModule:
        """Undo some applications: the record tells which sites are theirs, and what has changed there since."""
        if len(steps) == len(steps_of(self, graph_module)):
            return self.reverse(graph_module)
        record = find_record(graph_module)
        assert record is not None
        sites = frozenset[int]().union(*(step.sites for step in steps))
        return self._revert_all(graph_module, [entry for entry in record.entries if entry.site in sites])

    def _revert_all(self, graph_module: GraphModule, own: list[Entry]) -> GraphModule:
        record = find_record(graph_module)
        if record is None or not own:
            return graph_module
        found, standing = _nodes_by_site(graph_module), {entry.site: entry for entry in record.entries}
        by_module = _entries_by_module(record.entries)
        for entry in reversed(own):
            marked = found.get(entry.site, [])
            sites = {site for _, node in marked for site, _ in node.meta.get(ROLES, ())}
            sites.update(other.site for path in entry.modules for other in by_module[path])
            self._check_order([standing[s] for s in sorted(sites) if s > entry.site and s in standing])
            nodes = self._nodes_of(entry, marked)
            self.revert(graph_module, nodes, entry.data)
            del standing[entry.site]
            for node in nodes.values():
                self._forget(node, entry.site, standing)
        record.entries = list(standing.values())
        present = submodules.child_names(graph_module)
        for path in record.orders.keys() & present.keys():
            submodules.order_children(graph_module, path, record.orders[path])
        if not record.entries:
            record.orders = {}
        return graph_module

    def _keep(self, graph_module: GraphModule, change: Change) -> None:
        if not self.reversible:
            return
        entries = make_record(graph_module).entries
        # Roles of a record that was lost may still be on the nodes: their numbers are not given again.
        site = 1 + (entries[-1].site if entries else max(_nodes_by_site(graph_module), default=0))
        for role, node in change.nodes.items():
            node.meta[ROLES] = (*node.meta.get(ROLES, ()), (site, role))
        entries.append(
            Entry(site, self.signature, repr(self), tuple(change.nodes), change.modules, change.data)
        )

    def _nodes_of(self, entry: Entry, marked: list[tuple[str, Node]]) -> dict[str, Node]:
        found = dict(marked)
        if len(found) != len(marked):
            raise UndoError(
                f"{self!r} cannot be undone: several of the nodes {', '.join(n.name for _, n in marked)} stand "
                "for the same rewritten node; undo the pass before copying its nodes"
            )
        missing = [role for role in entry.roles if role not in found]
        if missing:
            raise UndoError(
                f"{self!r} cannot be undone: nodes that it made are gone from the graph ({', '.join(missing)}). "
                "Undo it before dead code elimination, and before pickling a graph that was edited by hand"
            )
        return found

    def _check_order(self, later: Iterable[Entry]) -> None:
        names = dict.fromkeys(entry.name for entry in reversed(list(later)))
        if names:
            raise UndoError(
                f"{self!r} cannot be undone yet: the same place was rewritten since. "
                f"Undo {', then '.join(names)} first"
            )

    def _forget(self, node: Node, site: int, standing: Mapping[int, Entry]) -> None:
        """Take a node out of a site, and its mark off where no other site of this pass holds it."""
        roles = tuple(pair for pair in node.meta[ROLES] if pair[0] != site)
        node.meta[ROLES] = roles
        if not roles:
            del node.meta[ROLES]
        others = {standing[other].signature for other, _ in roles if other in standing}
        if self.signature in node.meta.get(MARKS, ()) and self.signature not in others:
            self.mark_as_restored(node)

    def _check_no_trace(self, graph_module: GraphModule) -> None:
        nodes = [node.name for node in graph_module.graph.nodes if self.signature in node.meta.get(MARKS, ())]
        modules = [n for n, module in graph_module.named_modules() if self.signature in traces(module)]
        if nodes or modules:
            raise UndoError(
                f"{self!r} cannot be undone: it rewrote {', '.join([*nodes, *modules])}, but the record of how "
                "is gone. It is a child module of the graph module, which delete_all_unused_submodules, "
                "copy.copy, retracing and GraphModule(module, graph) lose; undo the pass before these"
            )


def _entries_by_module(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        for path in entry.modules:
            found.setdefault(path, []).append(entry)
    return found


def _nodes_by_site(graph_module: GraphModule) -> dict[int, list[tuple[str, Node]]]:
    found: dict[int, list[tuple[str, Node]]] = {}
    for node in graph_module.graph.nodes:
        for site, role in node.meta.get(ROLES, ()):
            found.setdefault(site, []).append((role, node))
    return found


def traces(module: nn.Module) -> tuple[str, ...]:
    """The signatures of the passes that made `module`."""
    found: tuple[str, ...] = module.__dict__.get(TRACE, ())
    return found


def leave_trace(module: nn.Module, pass_: Transformation, before: Iterable[nn.Module] = ()) -> None:
    """Write on a new module that `pass_` made it, and what had made the modules `before` it."""
    earlier = [signature for old in before for signature in traces(old)]
    module.__dict__[TRACE] = tuple(dict.fromkeys([*earlier, pass_.signature]))
