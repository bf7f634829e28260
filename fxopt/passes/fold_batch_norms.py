"""A batch normalization beside a linear layer or a convolution: the layer can scale and shift its channels, too."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

from torch import nn
from torch.fx import GraphModule, Node

from fxopt import graph
from fxopt.graph_index import GraphIndex
from fxopt.obstacles import batch_norm
from fxopt.obstacles.foldable import Fold, Scaling
from fxopt.passes.folding import Folding

Kinds = tuple[type[nn.Module], ...]


class FoldBatchNorms(Folding):
    """Folds batch normalizations in eval mode into the layer before them, or else into the layers behind.

    The layers are `torch.nn.Linear`, convolutions and transposed convolutions of one to three dimensions. Nothing else
    may use the value between; behind a linear layer, that may be seen as one of other sizes first, as by
    `norm(linear(x).flatten(0, 1))`. New layers take the place of the old ones, which stay as they are; they have
    biases, also where the old ones had none. They require gradients where the old ones did: fine-tuning a normalization
    beside a frozen layer ends here.

    Undoing gives the old weights back bit for bit: the record keeps copies of the layers and of the normalization,
    beside the graph and outside of `state_dict`, at the cost of their memory. After `.to()`, `.half()` and such it
    gives what these make of the old weights. Folded weights that were trained, loaded or rounded to a lower dtype and
    back cannot be taken apart, so undoing raises `UndoError` then.

    Args:
        reversible: `False` keeps no copies; then the pass cannot be undone.

    Source: Jacob et al., Quantization and Training of Neural Networks, 2017, arXiv:1712.05877, section 3.2.

    Example:
        >>> import fxopt, torch
        >>> layers = torch.nn.Sequential(torch.nn.ConvTranspose1d(3, 4, 2), torch.nn.BatchNorm1d(4)).eval()
        >>> folded = FoldBatchNorms()(fxopt.trace(layers, (torch.ones(1, 3, 5),)))
        >>> [name for name, _ in folded.named_parameters()]
        ['0.weight', '0.bias']
    """

    layers: ClassVar[Mapping[type[nn.Module], Kinds]] = {
        nn.BatchNorm1d: (nn.Linear, nn.Conv1d, nn.ConvTranspose1d),
        nn.BatchNorm2d: (nn.Conv2d, nn.ConvTranspose2d),
        nn.BatchNorm3d: (nn.Conv3d, nn.ConvTranspose3d),
    }
    """The layers that each kind of normalization is folded into."""

    def scalings(self, index: GraphIndex) -> Iterator[Scaling]:
        """Yield the normalizations; they go where nothing else needs them."""
        for kind, layers in self.layers.items():
            for norm in index.calls_like(kind):
                module = index.module(norm)
                needed = len(index.call_sites(module)) > 1 or not index.removable(norm)
                yield Scaling(
                    norm,
                    graph.input_of(norm, module),
                    layers,
                    functools.partial(batch_norm.scale_and_shift, module),
                    functools.partial(_obstacle, index, norm, kind),
                    {str(norm.target): module if needed else None},
                )

    def opens_sites(self, graph_module: GraphModule, sites: Sequence[Fold]) -> bool:
        """A normalization may follow one that was folded, or come before it."""
        return True


def _obstacle(
    index: GraphIndex, norm: Node, kind: type[nn.Module], layer: Node, path: Sequence[Node]
) -> str | None:
    """Why a normalization cannot become a part of a layer; None if it can."""
    module, beside = index.module(norm), index.module(layer)
    if graph.input_of(norm, module) is None:
        return "it does not take one value alone"
    return (
        _rank_obstacle(index, norm, kind, beside)
        or index.inexact(norm, kind)
        or batch_norm.statistics_obstacle(beside, module, behind=layer is path[0])
        or index.removing_obstacle(norm)
        or batch_norm.weights_obstacle(module)
    )


def _rank_obstacle(index: GraphIndex, norm: Node, kind: type[nn.Module], layer: nn.Module) -> str | None:
    """Why a normalization may work on other channels than a layer; None if it does not."""
    if kind is not nn.BatchNorm1d:
        return None  # it takes batches alone, and raises an error otherwise
    rank, needed = graph.rank_of(norm), 2 if isinstance(layer, nn.Linear) else 3
    if rank is None or index.guard is None:
        return "the number of dimensions is unknown, or nobody checks it: trace the model with fxopt.trace"
    if rank != needed:
        return f"the values have {rank} dimensions: BatchNorm1d normalises dimension 1, not the channels of the layer"
    return None
