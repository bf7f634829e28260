"""The folds of `optimize`: only those that copy few weights, and in little memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from torch.fx import GraphModule, Node

from fxopt.passes.fold_batch_norms import FoldBatchNorms
from fxopt.passes.fold_scale_and_shift import FoldScaleAndShift
from fxopt.passes.folding import Fold
from fxopt.rewriting.explanation import Refusal
from fxopt.rewriting.rewriter import Rewriter


@dataclasses.dataclass(frozen=True)
class FoldBatchNormsOneByOne(FoldBatchNorms):
    """Lets the memory of what a layer was made of go before the next layer.

    Args:
        evict: does so.
    """

    evict: Callable[[], object] = bool

    def apply(self, rewriter: Rewriter, site: Fold) -> tuple[Node, ...]:
        """Fold one normalization."""
        found = super().apply(rewriter, site)
        self.evict()
        return found


class FoldScaleBehindLayers(FoldScaleAndShift):
    """Folds only what is behind a layer: before several, the weights of all would be copied to save one product."""

    def match(self, graph_module: GraphModule) -> Iterator[Fold | Refusal]:
        """Yield what is behind a layer."""
        for found in super().match(graph_module):
            before = isinstance(found, Fold) and not found.behind
            yield Refusal(found.node, "it would copy the weights of the layers behind") if before else found
