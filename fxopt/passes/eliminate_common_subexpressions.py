"""Removes the later of two equal computations."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Sequence

from torch.fx import GraphModule, Node

from fxopt.graph_index import GraphIndex
from fxopt.rewriting.explanation import Refusal
from fxopt.rewriting.rewrite import ReversibleRewrite
from fxopt.rewriting.rewriter import Rewriter


@dataclasses.dataclass(frozen=True)
class Duplicate:
    """A node, and an earlier node that computes an equal value."""

    node: Node
    first: Node


@dataclasses.dataclass(frozen=True)
class EliminateCommonSubexpressions(ReversibleRewrite[Duplicate]):
    """Replaces a node by an earlier node that computes an equal value.

    Two nodes are equal if they call the same operator or module with the same values: masks and rotary tables that every
    layer computes again, or a projection that is called twice. Nodes that draw random numbers are skipped, and so are values
    that a node writes into, and values that the graph returns.

    Example:
        >>> import torch
        >>> class Twice(torch.nn.Module):
        ...     def forward(self, x):
        ...         return torch.exp(x) + torch.exp(x)
        >>> print(EliminateCommonSubexpressions()(torch.fx.symbolic_trace(Twice())).code.strip())
        def forward(self, x):
            exp = torch.exp(x);  x = None
            add = exp + exp;  exp = None
            return add
    """

    preserves_computation = True

    def match(self, graph_module: GraphModule) -> Iterator[Duplicate | Refusal]:
        """Yield the nodes that compute the value of an earlier node again."""
        index, first = GraphIndex(graph_module), dict[Hashable, Node]()
        for node in index.nodes:
            if node.op in ("placeholder", "output") or not index.memory.is_pure(node):
                continue
            # Compare arguments by `repr`, because 1 == 1.0, and modules by identity, because one may have several names.
            called = id(index.module(node)) if node.op == "call_module" else node.target
            earlier = first.setdefault((node.op, called, repr(node.args), repr(node.kwargs)), node)
            if earlier is not node:
                reason = _obstacle(index, node, earlier)
                yield Refusal(node, reason) if reason else Duplicate(node, earlier)

    def apply(self, rewriter: Rewriter, site: Duplicate) -> Node:
        """Redirect the users of the later node to the earlier one."""
        rewriter.replace_uses(site.node, site.first)
        rewriter.erase(site.node)
        return site.first

    def opens_sites(self, graph_module: GraphModule, sites: Sequence[Duplicate]) -> bool:
        """Return True: users of two equal values now use one value, and so may be equal themselves."""
        return True


def _obstacle(index: GraphIndex, node: Node, earlier: Node) -> str | None:
    """Return why `node` must stay; None if it may go."""
    memory = index.memory
    if reason := index.removing_obstacle(node) or index.removing_obstacle(earlier):
        return reason
    for value in (node, earlier, *node.all_input_nodes):
        writer = memory.written(value)
        if writer:
            return f"{writer.name} may write into {value.name}"
    if memory.is_returned(node):
        return "the graph returns its value, which the caller may write into"
    return memory.write_between(earlier, node)
