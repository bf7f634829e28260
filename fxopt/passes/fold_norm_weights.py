"""Folds the weight and bias of a LayerNorm or RMSNorm into the linear layers after it."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.fx import Node

from fxopt import graph, submodules
from fxopt.graph_index import GraphIndex
from fxopt.obstacles.foldable import Scaling
from fxopt.obstacles.scaling import mismatch, wide_dtype
from fxopt.passes.folding import Folding
from fxopt.torch_internals import parameters_of

NORMS = (nn.LayerNorm, nn.RMSNorm)


class FoldNormWeights(Folding):
    """Folds the weight and bias of `torch.nn.LayerNorm` and `torch.nn.RMSNorm` into the linear layers after them.

    The normalization stays, without a weight. All users of its output must be `torch.nn.Linear` layers. New layers replace
    them, with a bias if the normalization has one; the old layers are not changed. A weight that is folded into a frozen
    layer can no longer be trained. For a normalization that a model computes without a layer, see `FoldScaleAndShift`.
    Undo restores the weights bit for bit from copies, or raises `UndoError` if the folded weights were changed.

    Args:
        reversible: `False` keeps no copies; then the pass cannot be undone.

    Source: Ashkboos et al., SliceGPT, 2024, arXiv:2401.15024, section 3.1.

    Example:
        >>> import torch
        >>> layers = torch.nn.Sequential(torch.nn.RMSNorm(4), torch.nn.Linear(4, 2))
        >>> FoldNormWeights()(torch.fx.symbolic_trace(layers)).get_submodule("0")
        RMSNorm((4,), eps=None, elementwise_affine=False)
    """

    def scalings(self, index: GraphIndex) -> Iterator[Scaling]:
        """Yield the normalizations that have a weight, each with a copy without the weight."""
        for kind in NORMS:
            for node in index.calls_like(kind):
                norm = index.module(node)
                if getattr(norm, "weight", None) is not None:
                    bare: Any = submodules.without_tensors(norm)
                    bare.elementwise_affine = False
                    yield Scaling(
                        node,
                        value=None,
                        kinds=(nn.Linear,),
                        scale_and_shift=functools.partial(_weight_and_bias, norm),
                        obstacle=functools.partial(_obstacle, index, node, kind),
                        sources={str(node.target): bare},
                    )


def _weight_and_bias(norm: nn.Module) -> tuple[Tensor, Tensor | None]:
    weight, bias = norm.get_parameter("weight"), parameters_of(norm).get("bias")
    wide = wide_dtype(weight)
    return weight.detach().to(wide), None if bias is None else bias.detach().to(wide)


def _obstacle(
    index: GraphIndex, node: Node, kind: type[nn.Module], layer: Node, path: Sequence[Node]
) -> str | None:
    """Return why the weight of a normalization cannot be folded into a layer after it; None if it can."""
    norm: Any = index.module(node)
    reason = index.replacing_obstacle(node, kind)
    if reason or graph.input_of(node, norm) is None:
        return reason or "it does not take one value alone"
    if len(norm.normalized_shape) != 1:
        return f"it normalises the last {len(norm.normalized_shape)} dimensions together"
    weight = submodules.weight_of(index.module(layer))
    if weight.shape[1:] != norm.weight.shape:
        return (
            f"{layer.name} takes {weight.shape[1]} features, and the normalization gives {len(norm.weight)}"
        )
    return mismatch("its weight", norm.weight, index.module(layer))
