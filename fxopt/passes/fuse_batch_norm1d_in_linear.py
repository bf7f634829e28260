"""A BatchNorm1d in eval mode becomes a part of the Linear before or after it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fxopt import batch_norm, graph, submodules
from fxopt.graph_index import GraphIndex
from fxopt.rewrite import Refusal


@dataclasses.dataclass(frozen=True)
class FuseBatchNorm1dInLinear(batch_norm.FuseBatchNorm):
    """Fuses `torch.nn.BatchNorm1d` in eval mode into the `torch.nn.Linear` before it, or else after it.

    The first of the two must have the second as its only user, and the values between them two dimensions:
    with three, BatchNorm1d normalises dimension 1 and Linear works on the last. The number of dimensions is
    read from the metadata of the trace; where there is none, the place is refused. A new linear layer takes
    the place of the old one, which stays as it is; it has a bias, also where the old one had none.
    It requires gradients where the old one did: fine-tuning a normalization behind a frozen layer ends here.

    Undoing gives the old weights back bit for bit: the record keeps copies of the layer and of the
    normalization, beside the graph and outside of `state_dict`, at the cost of their memory. After `.to()`,
    `.half()` and such it gives what these make of the old weights. Folded weights that were trained, loaded or
    rounded to a lower dtype and back cannot be taken apart, so undoing raises `UndoError` then.

    Args:
        reversible: `False` keeps no copies; then the pass cannot be undone.

    Source: Jacob et al., Quantization and Training of Neural Networks, 2017, arXiv:1712.05877, section 3.2.

    Example:
        >>> import fxopt, torch
        >>> layers = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)).eval()
        >>> fused = FuseBatchNorm1dInLinear()(fxopt.trace(layers, (torch.ones(3, 4),)))
        >>> [name for name, _ in fused.named_parameters()]
        ['1.weight', '1.bias']
    """

    def match(self, graph_module: GraphModule) -> Iterator[batch_norm.Fold | Refusal]:
        """Yield the pairs of a linear layer and a batch normalization, each layer at most once."""
        index = GraphIndex(graph_module)
        linears = set(index.calls_like(nn.Linear))
        taken: set[Node] = set()
        for node in index.calls_like(nn.BatchNorm1d):
            value = graph.input_of(node, index.module(node))
            candidates = [other for other in (value, *node.users) if other in linears and other not in taken]
            reasons: list[str] = []
            for linear in candidates:
                assert value is not None
                fused = _obstacle(index, linear, node, value) or _fuse(index, linear, node, value)
                if not isinstance(fused, str):
                    taken.add(linear)
                    yield batch_norm.Fold(linear, node, fused, index.removable(node))
                    break
                reasons.append(fused)
            else:
                if reasons:
                    yield Refusal(node, "; ".join(dict.fromkeys(reasons)))


def _obstacle(index: GraphIndex, linear: Node, node: Node, value: Node) -> str | None:
    layer = index.module(linear)
    assert isinstance(layer, nn.Linear)
    inexact = index.inexact(linear, nn.Linear) or index.inexact(node, nn.BatchNorm1d)
    if inexact:
        return inexact
    if graph.input_of(linear, layer) is None:
        return f"the arguments of {linear.name} are not those of a Linear"
    first, last = (linear, node) if linear is value else (node, linear)
    others = batch_norm.other_users(first, last)
    if others:
        return others
    rank = graph.rank_of(node)
    if rank is None:
        return "the number of dimensions is unknown: the graph has no metadata (trace it with fxopt.trace)"
    if rank != 2:
        return f"the values have {rank} dimensions: BatchNorm1d normalises dimension 1, not the last"
    if not submodules.is_plain_linear(layer):
        return "it does not have the weight and bias of a plain Linear"
    channels = layer.out_features if linear is value else layer.in_features
    return (
        index.obstacle(linear)
        or batch_norm.norm_obstacle(index, node, layer.weight, channels)
        # A linear layer after the normalization will read the value later than the normalization did.
        or index.memory.write_between(first, last, None if linear is value else value)
        or (None if linear is value else _rounding_obstacle(node, linear))
    )


def _rounding_obstacle(norm: Node, linear: Node) -> str | None:
    """Whether a folded layer would round what is not yet centred: nothing might be left of it."""
    before, after = graph.dtype_of(norm), graph.dtype_of(linear)
    if before == after:
        return None
    return f"{norm.name} gives {before}, {linear.name} works in {after}, as in an autocast block"


def _fuse(index: GraphIndex, linear: Node, node: Node, value: Node) -> nn.Module | str:
    layer, norm = index.module(linear), index.module(node)
    assert isinstance(layer, nn.Linear)
    assert isinstance(norm, nn.BatchNorm1d)
    scale, shift = batch_norm.scale_and_shift(norm)
    before = linear is not value
    weight: Tensor = layer.weight.detach().to(scale.dtype)
    bias = batch_norm.bias_of(layer, scale.dtype)
    bias = bias + torch.mv(weight, shift) if before else bias * scale + shift
    return batch_norm.layer_with(layer, batch_norm.scaled(weight, scale, 1 if before else 0), bias)
