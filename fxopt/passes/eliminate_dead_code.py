"""Removes nodes whose value is not used."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from torch.fx import GraphModule, Node

from fxopt.graph_index import GraphIndex
from fxopt.rewriting.rewrite import ReversibleRewrite
from fxopt.rewriting.rewriter import Rewriter


@dataclasses.dataclass(frozen=True)
class EliminateDeadCode(ReversibleRewrite[Node]):
    """Erases nodes whose value is not used.

    Nodes stay if they may write into memory, draw random numbers, change a mode or assert a condition. So do calls of
    unknown functions, and of modules with hooks. Inputs of the graph stay. Modules stay in the graph module, even if no node
    calls them any longer.

    Example:
        >>> import torch
        >>> class Unused(torch.nn.Module):
        ...     def forward(self, x):
        ...         torch.exp(x).sum()
        ...         return -x
        >>> print(EliminateDeadCode()(torch.fx.symbolic_trace(Unused())).code.strip())
        def forward(self, x):
            neg = -x;  x = None
            return neg
    """

    preserves_computation = True

    def match(self, graph_module: GraphModule) -> Iterator[Node]:
        """Yield the nodes that are not needed, the last one first."""
        index, dead = GraphIndex(graph_module), set[Node]()
        for node in reversed(index.nodes):
            needless = index.memory.is_pure(node) and dead.issuperset(node.users)
            if needless and not index.removing_obstacle(node):
                dead.add(node)
                yield node

    def apply(self, rewriter: Rewriter, site: Node) -> None:
        """Erase the node."""
        rewriter.erase(site)
