"""The later of two equal computations goes."""

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
    """A node, and an earlier one that computes the same."""

    node: Node
    first: Node


@dataclasses.dataclass(frozen=True)
class EliminateCommonSubexpressions(ReversibleRewrite[Duplicate]):
    """Lets the users of a node take the value of an earlier node that computes the same.

    The same is the same operator or module, called with the same values: masks and rotary tables that every layer
    makes again, a projection that is called twice. What draws random numbers is left alone, and so are values
    that something writes into, and values of which the graph returns both.

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
        """Yield the nodes that compute what an earlier one has computed."""
        index, returned = GraphIndex(graph_module), set[Node]()
        first: dict[Hashable, Node] = {}
        for node in index.nodes:
            if node.op in ("placeholder", "output") or not index.memory.is_pure(node):
                continue
            # Arguments by what they read like, as 1 is not 1.0, and the module by what it is, not by its name.
            called = id(index.module(node)) if node.op == "call_module" else node.target
            earlier = first.setdefault((node.op, called, repr(node.args), repr(node.kwargs)), node)
            if earlier is not node:
                reason = _obstacle(index, node, earlier, returned)
                yield Refusal(node, reason) if reason else Duplicate(node, earlier)

    def apply(self, rewriter: Rewriter, site: Duplicate) -> Node:
        """Redirect the users of the later node to the earlier one."""
        rewriter.replace_uses(site.node, site.first)
        rewriter.erase(site.node)
        return site.first

    def opens_sites(self, graph_module: GraphModule, sites: Sequence[Duplicate]) -> bool:
        """Users of two equal values take one of them now, and so may be equal themselves."""
        return True


def _obstacle(index: GraphIndex, node: Node, earlier: Node, returned: set[Node]) -> str | None:
    """Why `node` stays; else `earlier` joins `returned` if the graph returns it in the place of `node`."""
    memory = index.memory
    if reason := index.removing_obstacle(node) or index.removing_obstacle(earlier):
        return reason
    for value in (node, earlier, *node.all_input_nodes):
        writer = memory.written(value)
        if writer:
            return f"{writer.name} may write into {value.name}"
    reason = memory.write_between(earlier, node)
    if reason is None and memory.is_returned(node):
        if earlier in returned or memory.is_returned(earlier):
            return f"the graph returns its value and that of {earlier.name}, which the caller may write into"
        returned.add(earlier)
    return reason
