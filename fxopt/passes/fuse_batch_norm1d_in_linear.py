"""A batch normalization beside a linear layer: the layer can scale and shift its features, too."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.fx import GraphModule, Node

from fxopt import graph
from fxopt.graph_index import GraphIndex
from fxopt.passes.batch_norm_folding import Fold, FoldBatchNorm, fold
from fxopt.rewriting.explanation import Refusal


class FuseBatchNorm1dInLinear(FoldBatchNorm):
    """Fuses `torch.nn.BatchNorm1d` in eval mode into the `torch.nn.Linear` before it, or else after it.

    The first of the two must have the second as its only user, and the values between them two dimensions:
    with three, BatchNorm1d normalises dimension 1 and Linear works on the last. The number of dimensions is
    read from the metadata of the trace; where there is none, the place is refused. A new linear layer takes
    the place of the old one, which stays as it is; it has a bias, also where the old one had none.
    It requires gradients where the old one did: fine-tuning a normalization behind a frozen layer ends here.

    Undoing, its memory and what it refuses are as those of `FuseBatchNorm2dInConv2d`.

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

    def match(self, graph_module: GraphModule) -> Iterator[Fold | Refusal]:
        """Yield the pairs of a linear layer and a batch normalization, each layer at most once."""
        index = GraphIndex(graph_module)
        linears, taken = set(index.calls_like(nn.Linear)), set[Node]()
        for norm in index.calls_like(nn.BatchNorm1d):
            value = graph.input_of(norm, index.module(norm))
            reasons: list[str] = []
            for linear in (each for each in (value, *norm.users) if each in linears and each not in taken):
                reason = _obstacle(norm)
                found = (
                    Refusal(norm, reason) if reason else fold(index, linear, norm, nn.Linear, nn.BatchNorm1d)
                )
                if isinstance(found, Fold):
                    taken.add(linear)
                    yield found
                    break
                reasons.append(found.reason)
            else:
                if reasons:
                    yield Refusal(norm, "; ".join(dict.fromkeys(reasons)))


def _obstacle(norm: Node) -> str | None:
    rank = graph.rank_of(norm)
    if rank is None:
        return "the number of dimensions is unknown: the graph has no metadata (trace it with fxopt.trace)"
    if rank != 2:
        return f"the values have {rank} dimensions: BatchNorm1d normalises dimension 1, not the last"
    return None
