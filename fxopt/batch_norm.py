"""Batch normalization in eval mode is a scale and a shift of each channel: which, and when."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fxopt import graph

_BatchNorm = nn.modules.batchnorm._BatchNorm


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


def norm_obstacle(index: graph.GraphIndex, node: Node, weight: Tensor, channels: int) -> str | None:
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
    writer = index.writer_of(norm)
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
    fused = graph.without_tensors(layer)
    bias_gradient = (old_weight if old_bias is None else old_bias).requires_grad
    fused._parameters["weight"] = nn.Parameter(new_weight, old_weight.requires_grad)
    fused._parameters["bias"] = nn.Parameter(new_bias, bias_gradient)
    return fused


def drop_norm(graph_module: GraphModule, node: Node, removable: bool) -> None:
    """Erase a call of a normalization, and the module where `removable` and nothing else calls it."""
    path = str(node.target)
    graph_module.graph.erase_node(node)
    if removable and not graph_module.graph.find_nodes(op="call_module", target=path):
        graph.remove_module(graph_module, path)
