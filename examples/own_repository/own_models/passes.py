"""A pass of one's own. The guide of fxopt (docs/guide.md) says what `match` and `apply` may do."""

import dataclasses
from collections.abc import Iterator

from torch import nn
from torch.fx import GraphModule, Node

from fxopt import GraphIndex, Refusal, ReversibleRewrite, Rewriter


@dataclasses.dataclass(frozen=True)
class RemoveRepeatedReLU(ReversibleRewrite[Node]):
    """Remove an `nn.ReLU` that follows another `nn.ReLU`: it changes nothing."""

    preserves_computation = True

    def match(self, graph_module: GraphModule) -> Iterator[Node | Refusal]:
        index = GraphIndex(graph_module)
        for first, calls in index.calls_by_input(nn.ReLU).items():
            if first not in index.calls_like(nn.ReLU):
                continue
            for second in calls:
                reason = obstacle(index, first, second)
                yield Refusal(second, reason) if reason else second

    def apply(self, rewriter: Rewriter, site: Node) -> None:
        rewriter.replace_uses(site, site.all_input_nodes[0])
        rewriter.erase(site)


def obstacle(index: GraphIndex, first: Node, second: Node) -> str | None:
    """Return the reason against removing `second`, which follows `first`."""
    for call in (first, second):
        reason = index.inexact(call, nn.ReLU) or index.removing_obstacle(call)
        if reason:
            return reason
        if index.memory.writes(call):
            return f"{call.name} works in place"
    return index.joining_obstacle(first, second)
