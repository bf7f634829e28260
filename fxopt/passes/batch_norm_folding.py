"""A batch normalization in eval mode is a scale and a shift of each channel: a layer beside it can do that, too."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn.modules.batchnorm import _BatchNorm

from fxopt import graph
from fxopt.batch_norm import folded, folding_obstacle
from fxopt.errors import UndoError
from fxopt.graph_index import GraphIndex
from fxopt.rewriting.explanation import Refusal
from fxopt.rewriting.rewrite import ReversibleRewrite
from fxopt.rewriting.rewriter import Rewriter
from fxopt.rewriting.weights import Left, copied


@dataclasses.dataclass(frozen=True)
class Fold:
    """Calls of a batch normalization and of the layer that takes it over.

    Attributes:
        layer: the call of the layer.
        node: the call of the normalization, which goes.
        behind: whether the normalization is behind the layer, and not before it.
        removable: whether the module of the normalization goes, too, when nothing calls it any more.
    """

    layer: Node
    node: Node
    behind: bool
    removable: bool


@dataclasses.dataclass(frozen=True)
class FoldBatchNorm(ReversibleRewrite[Fold]):
    """A pass that folds batch normalizations into layers; its `match` says which.

    Args:
        reversible: `False` keeps no copies; then the pass cannot be undone.
    """

    reversible: bool = True

    preserves_computation = True

    def opens_sites(self, graph_module: GraphModule, sites: Sequence[Fold]) -> bool:
        """Tell whether another normalization follows, or comes before, one that was folded."""
        beside = {node for site in sites for node in (*site.layer.users, *site.layer.all_input_nodes)}
        calls = [str(node.target) for node in beside if node.op == "call_module"]
        return any(isinstance(graph_module.get_submodule(call), _BatchNorm) for call in calls)

    def apply(self, rewriter: Rewriter, site: Fold) -> Node:
        """Put the fused layer in the place of the old one and drop the normalization."""
        path, norm_path = str(site.layer.target), str(site.node.target)
        layer, norm = (rewriter.graph_module.get_submodule(each) for each in (path, norm_path))
        (value,) = site.node.all_input_nodes
        calls = rewriter.graph.find_nodes(op="call_module", target=norm_path)
        gone = [norm_path] if site.removable and calls == [site.node] else []
        fused, restore = folded(layer, norm, site.behind), None
        if self.reversible:
            kept = copied({path: layer, norm_path: norm})
            bias = fused.get_parameter("bias").detach().clone()
            restore = functools.partial(_unfolded, kept, bias, site.behind)
        rewriter.swap({path: fused} | ({} if gone else {norm_path: norm}), gone, restore)
        rewriter.replace_uses(site.node, value)
        rewriter.erase(site.node)
        return site.layer


def fold(
    index: GraphIndex, layer: Node, norm: Node, kind: type[nn.Module], norm_kind: type[_BatchNorm]
) -> Fold | Refusal:
    """The fold of a normalization into a layer beside it, or why there is none."""
    behind = layer in norm.all_input_nodes
    first, last = (layer, norm) if behind else (norm, layer)
    value = None if behind else norm.all_input_nodes[0]  # a layer behind reads it later than the norm did
    reason = (
        index.obstacle(layer, kind)
        or index.inexact(norm, norm_kind)
        or folding_obstacle(index.module(layer), index.module(norm), behind)
        or index.reading_obstacle(norm)
        or index.joining_obstacle(first, last, value)
    )
    before, after = graph.dtype_of(norm), graph.dtype_of(layer)
    if reason is None and not behind and before != after:
        # A folded layer would round what is not yet centred: nothing might be left of it.
        reason = f"{norm.name} gives {before}, {layer.name} works in {after}, as in an autocast block"
    if reason:
        return Refusal(norm, reason)
    return Fold(layer, norm, behind, index.removable(norm))


def _unfolded(
    kept: Mapping[str, nn.Module],
    bias: Tensor,
    behind: bool,
    now: Mapping[str, Any],
    left: Mapping[str, Left],
) -> dict[str, nn.Module]:
    """Copies of the layer and the normalization, as long as the folded weights are what folding made of them."""
    (path, layer), (norm_path, norm) = kept.items()
    fused, made = now[path], folded(layer, norm, behind)
    # The bias is a sum, which another machine may round differently.
    for tensor, current in ((made.get_parameter("weight"), fused.weight), (bias, fused.bias)):
        if not current.is_meta and (
            tensor.is_meta
            or not torch.equal(tensor.detach().to(current.device, current.dtype), current.detach())
        ):
            raise UndoError(
                f"the folded weights of {path} have changed since (by training, load_state_dict, or a lower dtype "
                "and back), and undoing would lose that. Put the weights back, or keep the model folded"
            )
    if norm_path in now and not _same_values(now[norm_path], norm):
        raise UndoError(f"{norm_path}, which was folded into {path}, was changed since")
    restored = {p: left[path].follow(m, fused) for p, m in copied(kept).items() if p not in now or p == path}
    return restored | {p: now[p] for p in now if p not in restored}


def _same_values(one: nn.Module, other: nn.Module) -> bool:
    values = other.state_dict()
    return all(v.is_meta or torch.equal(v, values[n].to(v.dtype)) for n, v in one.state_dict().items())
