"""A pass written as `match` and `apply`; undo, marks and history follow from the log of the rewriter."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from torch.fx import GraphModule, Node

from fxopt import graph, submodules
from fxopt.errors import PassError, UndoError, VerificationWarning, warn
from fxopt.rewriting import undoing
from fxopt.rewriting.attempt import Applied, Attempt, check_log, found_by, nodes_of
from fxopt.rewriting.edits import as_data
from fxopt.rewriting.explanation import Explanation, Refusal, Row, Site, node_of
from fxopt.rewriting.record import mark
from fxopt.rewriting.rewriter import Rewriter
from fxopt.rewriting.snapshot import Snapshot, Writes, refuse_writes
from fxopt.rewriting.transformation import ReversibleTransformation, Transformation
from fxopt.rewriting.verification import Verifier, Verify
from fxopt.torch_internals import is_erased

S = TypeVar("S", bound=Site | Node)


class Rewrite(Transformation, Generic[S]):
    """A transformation written as `match` and `apply`.

    Example:
        >>> import torch
        >>> class ReluToSilu(Rewrite):
        ...     def match(self, graph_module):
        ...         yield from graph_module.graph.find_nodes(op="call_function", target=torch.relu)
        ...     def apply(self, rewriter, node):
        ...         rewriter.set(node, target=torch.nn.functional.silu)
        >>> ReluToSilu()(torch.fx.symbolic_trace(lambda x: torch.relu(x))).code.strip().splitlines()[1].strip()
        'relu = torch.nn.functional.silu(x);  x = None'
    """

    @abc.abstractmethod
    def match(self, graph_module: GraphModule) -> Iterator[S | Refusal]:
        """Yield the sites that can be rewritten, and a `Refusal` for each place that only looks like a site.

        `match` must not change the graph module. Sites of one call must not overlap: `apply` must not change another site.
        """

    @abc.abstractmethod
    def apply(self, rewriter: Rewriter, site: S) -> Node | Iterable[Node] | None:
        """Rewrite `site` through `rewriter` only; return the new node or nodes, which are then marked as transformed."""

    def opens_sites(self, graph_module: GraphModule, sites: Sequence[S]) -> bool:
        """Tell whether the rewrites of these sites may have created new sites, so that `match` has to run again."""
        return False

    def explain(self, graph_module: GraphModule, verify: Verify = False) -> Explanation:
        """List the sites that the pass would rewrite in `graph_module`, and its refusals with their reasons.

        Args:
            graph_module: the module, which stays unchanged. A pass that opens new sites rewrites a copy, to list these as well.
            verify: verify each rewrite on a copy, as a call of the pass does; a site that fails is listed as a refusal.

        Example:
            >>> import torch
            >>> from fxopt import FuseBatchNorm2dInConv2d
            >>> layers = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.BatchNorm2d(4))
            >>> FuseBatchNorm2dInConv2d().explain(torch.fx.symbolic_trace(layers))
            FuseBatchNorm2dInConv2d: 0 sites, 1 refused
              _1  1  the BatchNorm2d is in training mode: it normalises by batch statistics
        """
        graph.check_graph_module(graph_module, f"{self!r} rewrites")
        with graph.suppressing_guards(graph_module):
            found = found_by(self, graph_module)
        at_once = type(self).opens_sites is Rewrite.opens_sites or all(isinstance(e, Refusal) for e in found)
        if verify is False and at_once:
            return Explanation(type(self).__name__, tuple(map(Row.of, found)))
        copied = submodules.sharing_copy(graph_module)
        return self._rewrite_sites(Rewriter(copied), Snapshot(copied), verify)[0]

    def commit(self, graph_module: GraphModule) -> Explanation:
        """Rewrite all sites without a record, and list them; this rewrite cannot be undone.

        `commit` neither lints nor recompiles: call `recompile` before the graph module runs. Earlier passes stay in the
        history. Undo of an earlier pass keeps this rewrite, or raises `UndoError` if this rewrite erased nodes of that pass.

        Example:
            >>> import torch, fxopt
            >>> traced = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Identity()))
            >>> fxopt.RemoveIdentity().commit(traced)
            RemoveIdentity: 1 sites, 0 refused
              _1  1  site
            >>> fxopt.history(traced)
            0 applied
        """
        graph.check_graph_module(graph_module, f"{self!r} rewrites")
        snapshot = Snapshot(graph_module)
        try:
            return self._rewrite_sites(Rewriter(graph_module), snapshot, False)[0]
        except BaseException:
            snapshot.roll_back()
            raise

    def transform(self, graph_module: GraphModule) -> GraphModule:
        """Rewrite all sites, and the new sites that this opens, until no site is left.

        Raises:
            PassError: the rewriting does not end, because the pass matches its own results.
        """
        return self._rewrite(graph_module, False)[0]

    def _applied(self, graph_module: GraphModule, verify: Verify) -> Applied:
        if type(self).transform is Rewrite.transform:
            return self._rewrite(graph_module, verify)
        return super()._applied(graph_module, verify)

    def _rewrite(self, graph_module: GraphModule, verify: Verify) -> Applied:
        with Attempt(self, graph_module) as attempt:
            rewriter = Rewriter(graph_module, self.signature)
            explanation, nodes = self._rewrite_sites(rewriter, attempt.snapshot, verify)
            attempt.check(graph_module)
            if self.reversible and (names := attempt.snapshot.broken_ties()):
                raise PassError(
                    f"apply of {self!r} unties {' and '.join(names)}, which were one tensor: replace all of them by one new tensor, "
                    "or refuse layers with shared weights, as GraphIndex.obstacle does"
                )
            marked = [node for node in dict.fromkeys(nodes) if not is_erased(node)]
            for node in marked:
                mark(node, self.signature)
            edits = [as_data(edit, self.reversible) for edit in rewriter.log]
            orders = rewriter.orders_before(attempt.snapshot.orders)
            sites = len(explanation.sites)
            attempt.note(graph_module, edits, marked, orders=orders, sites=sites, by_hand=False)
        return graph_module, attempt.roll_back

    def _rewrite_sites(
        self, rewriter: Rewriter, snapshot: Snapshot, verify: Verify
    ) -> tuple[Explanation, list[Node]]:
        """Rewrite all sites; returns the rewritten and refused sites, and the nodes to mark."""
        graph_module, marked = rewriter.graph_module, list[Node]()
        rows, settled = dict[str, Row](), set[str]()  # settled: rewritten, or rolled back
        with graph.suppressing_guards(graph_module):
            verifier, writes = Verifier(self, graph_module, verify), refuse_writes(self, snapshot)
            rounds, limit = 0, 8 + len(graph_module.graph.nodes)
            while rounds < limit:
                found = found_by(self, graph_module)
                rows |= {row.node: row for row in map(Row.of, found) if row.node not in settled}
                sites = [e for e in found if not isinstance(e, Refusal) and not rows[node_of(e).name].reason]
                for site in sites:
                    row = rows[node_of(site).name]
                    settled.add(row.node)
                    before = snapshot if verify is False else Snapshot(graph_module)
                    nodes, reason = self._verified(rewriter, site, row, before, verifier, writes)
                    if reason:
                        rows[row.node] = row._replace(reason=reason)
                        rounds += site is not sites[0]  # earlier sites of this round stay rewritten
                        break  # the roll back may have replaced nodes of other sites by copies: match again
                    marked += nodes
                else:
                    rounds += 1
                    if not sites or not self.opens_sites(graph_module, sites):
                        break
            else:
                raise PassError(
                    f"{self!r} does not terminate: it still matches after {limit} rounds. match must not yield nodes "
                    "that apply made; a Pattern has to refuse them in `refuses`"
                )
        check_log(self, snapshot, rewriter.log)
        verifier.report()
        return Explanation(type(self).__name__, tuple(rows.values())), marked

    def _verified(
        self, rewriter: Rewriter, site: S, row: Row, before: Snapshot, verifier: Verifier, writes: Writes
    ) -> tuple[list[Node], str | None]:
        """Rewrite and verify a site; returns the nodes to mark, and why the site was rolled back, None if it was not."""
        start = len(rewriter.log)
        try:
            with writes:
                nodes = nodes_of(self, self.apply(rewriter, site))
        except Exception as error:
            error.add_note(f"{type(self).__name__} was rewriting {row.place}")
            raise
        edits = rewriter.log[start:]
        if verifier.verifies:
            check_log(self, before, edits)
        reason = verifier.difference(edits, before, rewriter.made)
        if reason:
            before.roll_back()
            del rewriter.log[start:]
            warn(f"{self!r} rolled back its rewrite of {row.place}: {reason}", VerificationWarning)
        return nodes, reason


class ReversibleRewrite(Rewrite[S], ReversibleTransformation):
    """A rewrite that is undone by inverting the log of its rewriter.

    Example:
        >>> import torch
        >>> class ReluToSilu(ReversibleRewrite):
        ...     def match(self, graph_module):
        ...         yield from graph_module.graph.find_nodes(op="call_module", target="0")
        ...     def apply(self, rewriter, node):
        ...         rewriter.replace_module("0", torch.nn.SiLU())
        >>> traced = ReluToSilu()(torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.ReLU())))
        >>> ReluToSilu()(traced, reverse=True).get_submodule("0")
        ReLU()
    """

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        """Undo all applications of this pass; a graph module that the pass never changed is returned unchanged.

        Raises:
            UndoError: the record is gone, or the results of the pass were changed since.
        """
        return self._reversed(graph_module)[0]

    def _reversed(self, graph_module: GraphModule) -> Applied:
        if not self.reversible:
            raise UndoError(
                f"{self!r} cannot be undone, because it keeps no copy of the weights. Make it with reversible=True"
            )
        own = undoing.own_steps(self, graph_module)
        if not own:
            undoing.check_no_trace(self, graph_module)
        return undoing.undo_steps(graph_module, own)
