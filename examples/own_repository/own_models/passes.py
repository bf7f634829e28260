"""A pass of one's own. The guide of fxopt (docs/guide.md) says what `match` and `apply` may do."""

import dataclasses
from collections.abc import Iterator

from torch import nn
from torch.fx import GraphModule, Node

from fxopt import Refusal, ReversibleRewrite, Rewriter


@dataclasses.dataclass(frozen=True)
class RemoveRepeatedReLU(ReversibleRewrite[Node]):
    """Removes an `nn.ReLU` behind another one: it changes nothing."""

    preserves_computation = True

    def match(self, graph_module: GraphModule) -> Iterator[Node | Refusal]:
        for node in graph_module.graph.nodes:
            if is_relu(graph_module, node) and is_relu(graph_module, node.all_input_nodes[0]):
                hooked = graph_module.get_submodule(node.target)._forward_hooks
                yield Refusal(node, "it has hooks") if hooked else node

    def apply(self, rewriter: Rewriter, site: Node) -> None:
        rewriter.replace_uses(site, site.all_input_nodes[0])
        rewriter.erase(site)


def is_relu(graph_module: GraphModule, node: Node) -> bool:
    return node.op == "call_module" and type(graph_module.get_submodule(node.target)) is nn.ReLU
