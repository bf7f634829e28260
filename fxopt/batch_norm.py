"""Batch normalization in eval mode is a scale and a shift of each channel: which, when, and how to fold it."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fxopt import graph, submodules
from fxopt.errors import UndoError
from fxopt.graph_index import GraphIndex
from fxopt.record import MARKS, ROLES, marks_of
from fxopt.rewrite import Change, ReversibleRewrite, leave_trace, traces

_BatchNorm = nn.modules.batchnorm._BatchNorm


@dataclasses.dataclass(frozen=True)
class Fold:
    """A batch normalization beside a linear layer or convolution, and the layer that stands for both."""

    layer: Node
    node: Node
    fused: nn.Module
    removable: bool

    @property
    def dimension(self) -> int:
        """Which dimension of the weight is scaled: the outputs, or the inputs of a layer behind the norm."""
        return 0 if self.layer in self.node.all_input_nodes else 1


@dataclasses.dataclass(frozen=True)
class Unfolded:
    """What undo needs of a fold: copies of both modules, and what the erased node was."""

    path: str
    layer: nn.Module
    norm_path: str
    norm: _BatchNorm
    dimension: int
    bias: Tensor  # of the folded layer: a sum, which another machine may round differently
    name: str
    previous: str  # the name of the node before
    keyword: str | None
    marks: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class FuseBatchNorm(ReversibleRewrite[Fold]):
    """What the passes share that fold a batch normalization into another layer: all but `match`."""

    reversible: bool = True

    preserves_computation = True

    def apply(self, graph_module: GraphModule, site: Fold) -> Change:
        """Put the fused layer in the place of the old one and drop the normalization."""
        layer, norm = site.layer, site.node
        path, norm_path = str(layer.target), str(norm.target)
        data = _unfolded(graph_module, site) if self.reversible else None
        if self.reversible:
            layer.meta[_ERASED] = (*layer.meta.get(_ERASED, ()), _description(norm))
            leave_trace(site.fused, self, [graph_module.get_submodule(path)])
        submodules.set_module(graph_module, path, site.fused)
        (value,) = norm.all_input_nodes
        norm.replace_all_uses_with(value)
        drop_norm(graph_module, norm, site.removable)
        return Change((layer,), {"layer": layer}, (path, norm_path), data)

    def revert(self, graph_module: GraphModule, nodes: dict[str, Node], data: Unfolded) -> None:
        """Put both modules back as they were, and call the normalization again."""
        node = nodes["layer"]
        fused = graph_module.get_submodule(data.path)
        if not (
            node.target == data.path
            and type(fused) is type(data.layer)
            and self.signature in traces(fused)
            and len(node.all_input_nodes) == 1
        ):
            raise self.changed(node, data.path)
        if not _is_as_folded(fused, data):
            raise UndoError(
                f"{self!r} cannot be undone: the folded weights of {data.path} have changed since (by training, "
                "load_state_dict, or a lower dtype and back), and undoing would lose that. Put the weights back, "
                "or keep the model folded"
            )
        layer, norm = _restored(fused, data)
        present = (
            graph_module.get_submodule(data.norm_path)
            if submodules.has_module(graph_module, data.norm_path)
            else None
        )
        if present is not None and not _same_values(present, norm):
            raise self.changed(node, f"{data.norm_path}, which was folded into {data.path},")
        submodules.set_module(graph_module, data.path, layer)
        if present is None:
            submodules.set_module(graph_module, data.norm_path, norm)
        _insert_norm(node, data)

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        """Undo all folds; UndoError where `reversible` is off, or where the folded weights have changed."""
        if not self.reversible:
            raise UndoError(
                f"{self!r} cannot be undone, because it keeps no copy of the weights: fold with reversible=True"
            )
        return super().reverse(graph_module)


_ERASED = "fxopt_folded_norms"
"""The key of `node.meta` that keeps the metadata of the normalizations that were folded into a layer."""


def scale_and_shift(norm: _BatchNorm) -> tuple[Tensor, Tensor]:
    """The vectors `a`, `b` with `norm(x) = a * x + b`, in float64 (float32 on devices that lack it).

    Example:
        >>> import torch
        >>> scale_and_shift(torch.nn.BatchNorm1d(1, eps=0.0).eval())
        (tensor([1.], dtype=torch.float64), tensor([0.], dtype=torch.float64))
    """
    assert norm.running_mean is not None
    assert norm.running_var is not None
    dtype = wide_dtype(norm.running_mean)
    scale = torch.rsqrt(norm.running_var.to(dtype) + norm.eps)
    if norm.weight is not None:
        scale = scale * norm.weight.detach().to(dtype)
    shift = -norm.running_mean.to(dtype) * scale
    if norm.bias is not None:
        shift = shift + norm.bias.detach().to(dtype)
    return scale, shift


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype to fold weights in, so that they are rounded once."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64


def other_users(first: Node, last: Node) -> str | None:
    """Why `first` and `last` cannot become one: what else uses the value of `first`; `None` if nothing does."""
    if set(first.users) != {last}:
        return f"{first.name} is also used by {', '.join(u.name for u in first.users if u is not last)}"
    return None


def norm_obstacle(index: GraphIndex, node: Node, weight: Tensor, channels: int) -> str | None:
    """Why the normalization that `node` calls cannot be folded into `weight`; `None` if it can."""
    norm = index.module(node)
    assert isinstance(norm, _BatchNorm)
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
    reason = index.reading_obstacle(node)
    writer = index.memory.writer_of(norm)
    if reason is None and writer is not None:
        return f"{writer.name} may write into the statistics or parameters of the {kind}"
    return reason


def layer_with(layer: nn.Module, weight: Tensor, bias: Tensor) -> nn.Module | str:
    """A layer like `layer` with these weights, rounded to its dtype, or why there is none."""
    old_weight, old_bias = layer._parameters["weight"], layer._parameters["bias"]
    assert old_weight is not None
    new_weight, new_bias = weight.to(old_weight.dtype), bias.to(old_weight.dtype)
    if not weight.is_meta and not (new_weight.isfinite().all() and new_bias.isfinite().all()):
        return f"the folded weights are not finite in {old_weight.dtype}"
    fused = submodules.without_tensors(layer)
    bias_gradient = (old_weight if old_bias is None else old_bias).requires_grad
    fused._parameters["weight"] = nn.Parameter(new_weight, old_weight.requires_grad)
    fused._parameters["bias"] = nn.Parameter(new_bias, bias_gradient)
    return fused


def bias_of(layer: nn.Module, dtype: torch.dtype) -> Tensor:
    """The bias of a layer in this dtype; zeros, one for each of its outputs, where it has none."""
    weight, bias = layer._parameters["weight"], layer._parameters["bias"]
    assert weight is not None
    return weight.new_zeros(len(weight), dtype=dtype) if bias is None else bias.detach().to(dtype)


def scaled(weight: Tensor, scale: Tensor, dimension: int) -> Tensor:
    """`weight` with one dimension scaled, in the dtype of `scale`."""
    shape = [-1 if axis == dimension else 1 for axis in range(weight.ndim)]
    return weight.detach().to(scale.dtype) * scale.reshape(shape)


def drop_norm(graph_module: GraphModule, node: Node, removable: bool) -> None:
    """Erase a call of a normalization, and the module where `removable` and nothing else calls it."""
    path = str(node.target)
    graph.erase(node)
    if removable and not graph_module.graph.find_nodes(op="call_module", target=path):
        submodules.remove_module(graph_module, path)


_Module = TypeVar("_Module", bound=nn.Module)


def _unfolded(graph_module: GraphModule, site: Fold) -> Unfolded:
    layer, norm = site.layer, site.node
    path, norm_path = str(layer.target), str(norm.target)
    normalization: Any = graph_module.get_submodule(norm_path)
    bias: Any = site.fused._parameters["bias"]
    return Unfolded(
        path=path,
        layer=_copy(graph_module.get_submodule(path)),
        norm_path=norm_path,
        norm=_copy(normalization),
        dimension=site.dimension,
        bias=bias.detach().clone(),
        name=norm.name,
        previous=norm.prev.name,
        keyword=next(iter(norm.kwargs), None),
        marks=marks_of(norm),
    )


def _copy(module: _Module) -> _Module:
    """A copy with its own tensors, without gradients."""
    tensors = (*module.parameters(), *module.buffers())
    memo: dict[int, Any] = {id(t): submodules.with_values(t, t.detach().clone()) for t in tensors}
    return copy.deepcopy(module, memo)


def _description(norm: Node) -> dict[str, Any]:
    """The metadata of a node, but for its value, which has the shape of its input, and for its marks."""
    return {k: v for k, v in norm.meta.items() if k not in ("val", "tensor_meta", MARKS, ROLES)}


def _is_as_folded(fused: nn.Module, data: Unfolded) -> bool:
    """Whether the weights are still what folding made of the old ones; a change of dtype is no change."""
    scale, _ = scale_and_shift(data.norm)
    old: Any = data.layer._parameters["weight"]
    for name, made in (("weight", scaled(old, scale, data.dimension).to(old.dtype)), ("bias", data.bias)):
        now = fused._parameters.get(name)
        if now is None or now.shape != made.shape or (made.is_meta and not now.is_meta):
            return False
        if not now.is_meta and not torch.equal(made.to(now.dtype).to(now.device), now.detach()):
            return False
    return True


def _restored(fused: nn.Module, data: Unfolded) -> tuple[nn.Module, nn.Module]:
    """Copies of the saved modules, on the device and in the dtype that the folded layer has now.

    They have their old flags; where the folded layer was frozen, or switched to another mode, theirs follow.
    """
    weight, bias = fused._parameters["weight"], fused._parameters["bias"]
    assert weight is not None
    assert bias is not None
    layer, norm = (copy.deepcopy(m).to(weight.device, weight.dtype) for m in (data.layer, data.norm))
    old_weight, old_bias = layer._parameters["weight"], layer._parameters["bias"]
    assert old_weight is not None
    left = (old_weight.requires_grad, (old_weight if old_bias is None else old_bias).requires_grad)
    if left != (weight.requires_grad, bias.requires_grad):
        old_weight.requires_grad_(weight.requires_grad)
        norm.requires_grad_(weight.requires_grad)
        if old_bias is not None:
            old_bias.requires_grad_(bias.requires_grad)
    if layer.training != fused.training:
        layer.train(fused.training)
        norm.train(fused.training)
    return layer, norm


def _same_values(left: nn.Module, right: nn.Module) -> bool:
    own, other = left.state_dict(), right.state_dict()
    return (
        type(left) is type(right)
        and own.keys() == other.keys()
        and all(value.is_meta or torch.equal(value, other[name]) for name, value in own.items())
    )


def _insert_norm(layer: Node, data: Unfolded) -> None:
    """Call the normalization behind the layer, or before it, where it was called."""
    behind = data.dimension == 0
    value = layer if behind else layer.all_input_nodes[0]
    users = list(value.users) if behind else [layer]
    previous = graph.node_between(value, data.previous, users)
    with layer.graph.inserting_after(previous):
        norm = layer.graph.create_node("call_module", data.norm_path, (value,), name=data.name)
    if data.keyword:
        norm.args, norm.kwargs = (), {data.keyword: value}
    for user in users:
        user.replace_input_with(value, norm)
    erased = layer.meta.get(_ERASED, ())
    norm.meta = {**(erased[-1] if erased else {}), **data.marks}
    described = value.meta.get("val")
    if isinstance(described, Tensor):
        norm.meta["val"] = described.new_empty(described.shape)
    if erased[:-1]:
        layer.meta[_ERASED] = erased[:-1]
    else:
        layer.meta.pop(_ERASED, None)
