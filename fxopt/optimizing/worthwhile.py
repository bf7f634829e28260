"""The folds and merges of `optimize`: where they pay, by measurement or because few weights are copied, and in little memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node

from fxopt import graph
from fxopt.passes.fold_batch_norms import FoldBatchNorms
from fxopt.passes.fold_scale_and_shift import FoldScaleAndShift
from fxopt.passes.folding import Fold
from fxopt.passes.merge_linears import MergeLinears
from fxopt.passes.merging import LayerGroup
from fxopt.rewriting.explanation import Refusal
from fxopt.rewriting.rewriter import Rewriter
from fxopt.tuning import MARGIN, merged_time


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


@dataclasses.dataclass(frozen=True)
class MergeFasterLinears(MergeLinears):
    """Merges layers where the merged one is measured to take less time than they do together."""

    def match(self, graph_module: GraphModule) -> Iterator[LayerGroup | Refusal]:
        """Yield the groups that are faster as one layer."""
        for found in super().match(graph_module):
            reason = _slower(graph_module, found) if isinstance(found, LayerGroup) else None
            yield Refusal(found.node, reason) if reason else found


def _slower(graph_module: GraphModule, site: LayerGroup) -> str | None:
    """Why a group is to stay as it is; None if it is faster as one layer."""
    layers: list[Any] = [graph_module.get_submodule(str(call.target)) for call in site.calls]
    weight, shape = layers[0].weight, graph.shape_of(site.value)
    if shape is None or weight.device.type != "cpu" or not weight.is_floating_point():
        return "its time cannot be measured: it is not on the CPU, or its shape is unknown"
    biased = any(layer.bias is not None for layer in layers)
    width = sum(layer.out_features for layer in layers)
    merged = nn.Linear(weight.shape[1], width, biased, dtype=weight.dtype)
    ratio = merged_time(layers, merged, shape)
    return f"merged, the layers take {ratio:.2f} of their time" if ratio > MARGIN else None
