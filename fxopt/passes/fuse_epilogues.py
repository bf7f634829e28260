"""Fuses an activation or addition after a packed layer into the kernel of the layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.fx import GraphModule, Node

from fxopt import graph
from fxopt.graph_index import GraphIndex
from fxopt.kernels import PackedLayer, PackedLinear, fuses_epilogues
from fxopt.operators import name_of
from fxopt.packed_operators import IN_PLACE
from fxopt.packing import activation_of
from fxopt.rewriting.explanation import Refusal
from fxopt.rewriting.rewrite import ReversibleRewrite
from fxopt.rewriting.rewriter import Rewriter


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """A call of a packed layer, its only user `node`, and the keywords that make the layer compute `node`, too."""

    node: Node
    call: Node
    keywords: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class FuseEpilogues(ReversibleRewrite[Epilogue]):
    """Lets packed layers add a residual and apply an activation before they write their product to memory.

    The layers are those of `PackLinears` and `PackConvs` with a kernel that fuses: `onednn`, `mkl` or `matmul`. A linear
    layer can fuse an addition or an activation. A convolution can fuse an addition, ReLU, both, or another activation.

    Example:
        >>> import torch, fxopt
        >>> layers = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU())
        >>> traced = fxopt.trace(layers, (torch.zeros(1, 3, 16, 16),))
        >>> fused = FuseEpilogues()(fxopt.PackConvs()(traced))
        >>> [dict(node.kwargs) for node in fused.graph.nodes if node.target == "0"]
        [{'activation': 'relu'}]
    """

    preserves_computation = True

    def match(self, graph_module: GraphModule) -> Iterator[Epilogue | Refusal]:
        """Yield the activations and additions after packed layers."""
        index, taken = GraphIndex(graph_module), set[Node]()
        for call in reversed(index.calls_like(PackedLayer)):
            for user in call.users:
                keywords = _keywords(index, call, user)
                written = index.memory.written_by(user)
                if not keywords or user in taken or written not in ((), (call,)):
                    continue
                if written and "other" in keywords and index.guard is None:
                    continue  # an in-place sum keeps its shape and dtype, whatever is added
                taken.add(user)
                reason = index.joining_obstacle(call, user)
                yield Refusal(user, reason) if reason else Epilogue(user, call, {**call.kwargs, **keywords})

    def apply(self, rewriter: Rewriter, site: Epilogue) -> Node:
        """Replace the node after the layer by a call of the layer."""
        call = site.call
        rewriter.set(
            site.node, op="call_module", target=call.target, args=call.args, kwargs=dict(site.keywords)
        )
        rewriter.erase(call)
        return site.node

    def opens_sites(self, graph_module: GraphModule, sites: Sequence[Epilogue]) -> bool:
        """Tell whether an activation may follow an addition that was fused."""
        return any("other" in site.keywords and "activation" not in site.keywords for site in sites)


def _keywords(index: GraphIndex, call: Node, user: Node) -> dict[str, Any]:
    """Arguments with which the layer also computes `user`; empty if its kernel cannot."""
    layer = index.module(call)
    if len(call.args) != 1 or "activation" in call.kwargs or not fuses_epilogues(layer):
        return {}
    activation, convolves = activation_of(index, user), not isinstance(layer, PackedLinear)
    if activation:
        return (
            {} if call.kwargs and not (convolves and activation in IN_PLACE) else {"activation": activation}
        )
    other = _added(call, user)
    return {} if other is None or call.kwargs else {"other": other}


def _added(call: Node, user: Node) -> Node | None:
    """The summand that a node adds to the value of `call`, if both have the same shape and dtype; otherwise None."""
    if name_of(user) != "add" or user.kwargs or len(user.args) != 2 or len(user.all_input_nodes) != 2:
        return None
    first, second = user.args
    other = second if first is call else first
    return other if isinstance(other, Node) and graph.same_kind(call, other) else None
