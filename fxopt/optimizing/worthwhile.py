"""The folds of `optimize`: only those that copy few weights."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import GraphModule

from fxopt.passes import fold_scale_and_shift
from fxopt.passes.folding import Fold
from fxopt.rewriting.explanation import Refusal


class FoldScaleAndShift(fold_scale_and_shift.FoldScaleAndShift):
    """Folds only what is behind a layer: before several, the weights of all would be copied to save one product."""

    def match(self, graph_module: GraphModule) -> Iterator[Fold | Refusal]:
        """Yield what is behind a layer."""
        for found in super().match(graph_module):
            before = isinstance(found, Fold) and not found.behind
            yield Refusal(found.node, "it would copy the weights of the layers behind") if before else found
