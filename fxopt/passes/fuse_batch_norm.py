"""A batch normalization in eval mode is a scale and a shift of each channel: a layer beside it can do that, too."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn.modules.batchnorm import _BatchNorm

from fxopt import graph, submodules
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
        removable: whether the module of the normalization goes, too, when nothing calls it any more.
    """

    layer: Node
    node: Node
    removable: bool


@dataclasses.dataclass(frozen=True)
class _FuseBatchNorm(ReversibleRewrite[Fold]):
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
        fused: Any = folded(layer, norm, behind=site.layer is value)
        calls = rewriter.graph.find_nodes(op="call_module", target=norm_path)
        gone = site.removable and calls == [site.node]
        restore = None
        if self.reversible:
            kept = copied({path: layer, norm_path: norm})
            bias = fused.bias.detach().clone()
            restore = functools.partial(_unfolded, kept, path, norm_path, bias, site.layer is value)
        rewriter.swap(
            {path: fused} | ({} if gone else {norm_path: norm}), [norm_path] if gone else [], restore
        )
        rewriter.replace_uses(site.node, value)
        rewriter.erase(site.node)
        return site.layer


class FuseBatchNorm2dInConv2d(_FuseBatchNorm):
    """Fuses `torch.nn.BatchNorm2d` in eval mode into the `torch.nn.Conv2d` before it.

    The convolution must have the batch normalization as its only user. A new convolution takes the place of
    the old one, which stays as it is; it has a bias, also where the old one had none.
    It requires gradients where the old one did: fine-tuning a normalization behind a frozen layer ends here.

    Undoing gives the old weights back bit for bit: the record keeps copies of the layer and of the
    normalization, beside the graph and outside of `state_dict`, at the cost of their memory. After `.to()`,
    `.half()` and such it gives what these make of the old weights. Folded weights that were trained, loaded or
    rounded to a lower dtype and back cannot be taken apart, so undoing raises `UndoError` then.

    Args:
        reversible: `False` keeps no copies; then the pass cannot be undone.

    Source: Jacob et al., Quantization and Training of Neural Networks, 2017, arXiv:1712.05877, section 3.2.

    Example:
        >>> import torch
        >>> layers = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.BatchNorm2d(4)).eval()
        >>> fused = FuseBatchNorm2dInConv2d()(torch.fx.symbolic_trace(layers))
        >>> [node.target for node in fused.graph.nodes if node.op == "call_module"]
        ['0']
    """

    def match(self, graph_module: GraphModule) -> Iterator[Fold | Refusal]:
        """Yield the convolutions that are followed by a batch normalization."""
        index = GraphIndex(graph_module)
        convs = set(index.calls_like(nn.Conv2d))
        for node in index.calls_like(nn.BatchNorm2d):
            conv = graph.input_of(node, index.module(node))
            if conv in convs:
                reason = _obstacle(index, conv, node, nn.Conv2d, nn.BatchNorm2d)
                yield Refusal(node, reason) if reason else Fold(conv, node, index.removable(node))


class FuseBatchNorm1dInLinear(_FuseBatchNorm):
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
        for node in index.calls_like(nn.BatchNorm1d):
            value = graph.input_of(node, index.module(node))
            reasons: list[str] = []
            for linear in (
                other for other in (value, *node.users) if other in linears and other not in taken
            ):
                reason = _linear_obstacle(index, linear, node) or _obstacle(
                    index, linear, node, nn.Linear, nn.BatchNorm1d
                )
                if reason is None:
                    taken.add(linear)
                    yield Fold(linear, node, index.removable(node))
                    break
                reasons.append(reason)
            else:
                if reasons:
                    yield Refusal(node, "; ".join(dict.fromkeys(reasons)))


def scale_and_shift(norm: nn.Module) -> tuple[Tensor, Tensor]:
    """The vectors `a`, `b` with `norm(x) = a * x + b`, in float64 (float32 on devices that lack it)."""
    assert isinstance(norm, _BatchNorm)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    wide = torch.float32 if norm.running_mean.device.type == "mps" else torch.float64
    scale = torch.rsqrt(norm.running_var.to(wide) + norm.eps)
    if norm.weight is not None:
        scale = scale * norm.weight.detach().to(wide)
    shift = -norm.running_mean.to(wide) * scale
    return scale, shift if norm.bias is None else shift + norm.bias.detach().to(wide)


def folded(layer: nn.Module, norm: nn.Module, behind: bool) -> nn.Module:
    """A layer that computes `norm` behind `layer`, or before it, rounded once to the dtype of `layer`.

    `a (W x + c) + b = (a W) x + (a c + b)`, and `W (a x + b) + c = (W a) x + (W b + c)`.
    """
    weight, bias = layer._parameters["weight"], layer._parameters["bias"]
    assert weight is not None
    scale, shift = scale_and_shift(norm)
    values = weight.detach().to(scale.dtype)
    constant = values.new_zeros(len(values)) if bias is None else bias.detach().to(scale.dtype)
    constant = constant * scale + shift if behind else constant + torch.mv(values, shift)
    values = values * (scale.reshape(-1, *[1] * (values.ndim - 1)) if behind else scale)
    fused = submodules.without_tensors(layer)
    gradients = (weight if bias is None else bias).requires_grad
    fused._parameters["weight"] = nn.Parameter(values.to(weight.dtype), weight.requires_grad)
    fused._parameters["bias"] = nn.Parameter(constant.to(weight.dtype), gradients)
    return fused


def _overflows(layer: nn.Module, norm: nn.Module, behind: bool) -> str | None:
    """Why folded weights might not be finite, by a bound that folds nothing; None if they are."""
    weight, bias = layer._parameters["weight"], layer._parameters["bias"]
    assert weight is not None
    if weight.is_meta:
        return None
    scale, shift = scale_and_shift(norm)
    largest = torch.linalg.vector_norm(weight.detach().flatten(1), torch.inf, dim=1 if behind else 0)
    largest = largest.to(scale.dtype)
    constant = 0 if bias is None else bias.detach().to(scale.dtype)
    bound = constant * scale + shift if behind else largest.max() * shift.abs().sum() + constant
    limit = torch.finfo(weight.dtype).max
    finite = bool(((largest * scale).abs() <= limit).all()) and bool((bound.abs() <= limit).all())
    return None if finite else f"the folded weights are not finite in {weight.dtype}"


def _unfolded(
    kept: Mapping[str, nn.Module],
    path: str,
    norm_path: str,
    bias: Tensor,
    behind: bool,
    now: Mapping[str, Any],
    left: Mapping[str, Left],
) -> dict[str, nn.Module]:
    """Copies of the layer and the normalization, as long as the folded weights are what folding made of them."""
    fused, layer, norm = now[path], kept[path], kept[norm_path]
    made: Any = folded(layer, norm, behind)
    # The bias is a sum, which another machine may round differently.
    for tensor, current in ((made.weight, fused.weight), (bias, fused.bias)):
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


def _obstacle(
    index: GraphIndex, layer: Node, norm: Node, kind: type[nn.Module], norm_kind: type[_BatchNorm]
) -> str | None:
    """Why a normalization cannot be folded into a layer beside it; None if it can."""
    behind = layer in norm.all_input_nodes
    first, last = (layer, norm) if behind else (norm, layer)
    inexact = index.inexact(layer, kind) or index.inexact(norm, norm_kind)
    if inexact:
        return inexact
    if set(first.users) != {last}:
        return f"{first.name} is also used by {', '.join(u.name for u in first.users if u is not last)}"
    module: Any = index.module(layer)
    if set(module._parameters) != {"weight", "bias"} or module._buffers:
        return f"the layer does not have the weight and bias of a plain {kind.__name__}"
    channels = len(module.weight) if behind else module.weight.shape[1]
    value = None if behind else norm.all_input_nodes[0]  # a layer behind reads it later than the norm did
    return (
        index.obstacle(layer)
        or _norm_obstacle(index, norm, module.weight, channels)
        or index.memory.write_between(first, last, value)
        or _overflows(module, index.module(norm), behind)
        or (None if behind else _rounding_obstacle(norm, layer))
    )


def _rounding_obstacle(norm: Node, layer: Node) -> str | None:
    before, after = graph.dtype_of(norm), graph.dtype_of(layer)
    if before == after:
        return None
    # A folded layer would round what is not yet centred: nothing might be left of it.
    return f"{norm.name} gives {before}, {layer.name} works in {after}, as in an autocast block"


def _norm_obstacle(index: GraphIndex, node: Node, weight: Tensor, channels: int) -> str | None:
    norm: Any = index.module(node)
    kind = type(norm).__name__
    if norm.training:
        return f"the {kind} is in training mode: it normalises by batch statistics"
    if norm.running_mean is None or norm.running_var is None:
        return f"the {kind} has no running statistics: it normalises by batch statistics"
    if norm.num_features != channels:
        return f"the {kind} has {norm.num_features} features, the layer has {channels}"
    for tensor in (norm.running_mean, norm.running_var, norm.weight, norm.bias):
        if tensor is not None and (tensor.dtype != weight.dtype or tensor.device != weight.device):
            facts = f"{tensor.dtype} on {tensor.device}, the layer {weight.dtype} on {weight.device}"
            return f"the {kind} is {facts}"
    writer = index.memory.writer_of(norm)
    reason = f"{writer.name} may write into the statistics or parameters of the {kind}" if writer else None
    return index.reading_obstacle(node) or reason


def _linear_obstacle(index: GraphIndex, linear: Node, norm: Node) -> str | None:
    layer = index.module(linear)
    if graph.input_of(linear, layer) is None:
        return f"the arguments of {linear.name} are not those of a Linear"
    rank = graph.rank_of(norm)
    if rank is None:
        return "the number of dimensions is unknown: the graph has no metadata (trace it with fxopt.trace)"
    if rank != 2:
        return f"the values have {rank} dimensions: BatchNorm1d normalises dimension 1, not the last"
    return None
