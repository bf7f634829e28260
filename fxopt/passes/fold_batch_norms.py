"""Folds batch normalizations into adjacent linear layers and convolutions, which can scale and shift their channels."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fxopt import graph
from fxopt.graph_index import GraphIndex
from fxopt.obstacles.foldable import Fold, Scaling
from fxopt.obstacles.scaling import channels, mismatch, wide_dtype
from fxopt.passes.folding import Folding
from fxopt.torch_internals import buffers_of, parameters_of

Kinds = tuple[type[nn.Module], ...]


class FoldBatchNorms(Folding):
    """Folds batch normalizations in eval mode into the layer before them, otherwise into the layers after them.

    The layers are `torch.nn.Linear`, convolutions and transposed convolutions of one to three dimensions. No other node may
    use the value between layer and normalization. After a linear layer, a reshape may come first, as in
    `norm(linear(x).flatten(0, 1))`. New layers replace the old ones, which are not changed. The new layers have biases, even
    if the old ones had none, and require gradients if the old ones did. So a normalization next to a frozen layer can no
    longer be trained.

    Undo restores the old weights bit for bit: the record keeps copies of the layers and of the normalization, outside of
    `state_dict`. After `.to()`, `.half()` and the like, undo converts the old weights accordingly. If the folded weights were
    trained, loaded, or rounded to a lower dtype and back, undo raises `UndoError`.

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
        """Yield the normalizations, whose modules are removed."""
        for kind, layers in self.layers.items():
            for norm in index.calls_like(kind):
                module = index.module(norm)
                yield Scaling(
                    norm,
                    graph.input_of(norm, module),
                    layers,
                    functools.partial(scale_and_shift, module),
                    functools.partial(_obstacle, index, norm, kind),
                    {str(norm.target): None},
                )

    def opens_sites(self, graph_module: GraphModule, sites: Sequence[Fold]) -> bool:
        """Return True: another normalization may come before or after a folded one."""
        return True


def scale_and_shift(norm: Any) -> tuple[Tensor, Tensor]:
    """Compute the vectors `a`, `b` with `norm(x) = a * x + b`, in a wide dtype."""
    weight, bias = parameters_of(norm)["weight"], parameters_of(norm)["bias"]
    mean, variance = buffers_of(norm)["running_mean"], buffers_of(norm)["running_var"]
    assert mean is not None
    assert variance is not None
    wide = wide_dtype(mean)
    scale = torch.rsqrt(variance.to(wide) + norm.eps)
    if weight is not None:
        scale = scale * weight.detach().to(wide)
    shift = -mean.to(wide) * scale
    return scale, shift if bias is None else shift + bias.detach().to(wide)


def _obstacle(
    index: GraphIndex, norm: Node, kind: type[nn.Module], layer: Node, path: Sequence[Node]
) -> str | None:
    """Return why a normalization cannot be folded into a layer; None if it can."""
    module, beside = index.module(norm), index.module(layer)
    if graph.input_of(norm, module) is None:
        return "it does not take one value alone"
    reason = (
        _rank_obstacle(index, norm, kind, beside)
        or index.inexact(norm, kind)
        or _statistics_obstacle(beside, module, behind=layer is path[0])
        or index.removing_obstacle(norm)
        or index.place_obstacle(norm)
    )
    if reason is None and not {"weight", "bias"} <= parameters_of(module).keys():
        reason = f"the {kind.__name__} holds its weights otherwise than as parameters"
    return reason


def _rank_obstacle(index: GraphIndex, norm: Node, kind: type[nn.Module], layer: nn.Module) -> str | None:
    """Return why a normalization may work on other channels than a layer; None if it does not."""
    if kind is not nn.BatchNorm1d:
        return None  # other kinds accept only batches, with the channels in dimension 1
    rank, needed = graph.rank_of(norm), 2 if isinstance(layer, nn.Linear) else 3
    if rank is None or index.guard is None:
        return "the number of dimensions is unknown, or nobody checks it: trace the model with fxopt.trace"
    if rank != needed:
        return f"the values have {rank} dimensions: BatchNorm1d normalises dimension 1, not the channels of the layer"
    return None


def _statistics_obstacle(layer: nn.Module, norm: Any, behind: bool) -> str | None:
    """Return why `norm` does not scale and shift the output or input channels of `layer`; None if it does."""
    kind = type(norm).__name__
    if norm.training:
        return f"the {kind} is in training mode: it normalises by batch statistics"
    mean, variance = buffers_of(norm).get("running_mean"), buffers_of(norm).get("running_var")
    if mean is None or variance is None:
        return f"the {kind} has no running statistics: it normalises by batch statistics"
    if norm.num_features != channels(layer, behind):
        return f"the {kind} has {norm.num_features} features, the layer has {channels(layer, behind)}"
    tensors = (each for each in (*parameters_of(norm).values(), mean, variance) if each is not None)
    return next(filter(None, (mismatch(f"the {kind}", tensor, layer) for tensor in tensors)), None)
