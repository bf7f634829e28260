"""Layers whose weights torch computes in each call, as by `weight_norm`, and the equivalent plain layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.nn.utils import parametrize

from fxopt import effects, submodules
from fxopt.constants import is_watched
from fxopt.graph_index import GraphIndex
from fxopt.obstacles.scaling import LAYERS
from fxopt.operators import hooks_of, is_torch_module
from fxopt.torch_internals import BUFFERS, PARAMETERS, buffers_of, parameters_of


def computes_weights(layer: nn.Module) -> bool:
    """Tell whether torch computes weights of a layer in each call, by a parametrization or a hook of `torch.nn.utils`."""
    return parametrize.is_parametrized(layer) or bool(effects.weight_hooks_of(layer))


def _kind(layer: nn.Module) -> type[nn.Module]:
    """The type of a layer; for a parametrized layer, the type before the parametrization."""
    return type(layer).__bases__[0] if parametrize.is_parametrized(layer) else type(layer)


def plain_obstacle(index: GraphIndex, node: Node) -> str | None:
    """Return why a layer that computes its weights cannot become a plain one; None if it can."""
    layer = index.module(node)
    own = [part for part in layer.modules() if part is not layer]
    if _kind(layer) not in LAYERS:
        return "it is no linear layer or convolution of torch"
    if not is_torch_module(layer) or any(map(hooks_of, own)) or effects.has_forward_hooks(layer):
        return "it has hooks, or a parametrization that is not torch's own"
    if any("backward" in name for name in hooks_of(layer)):
        return "it has backward hooks"
    if any(part.training for part in layer.modules()):
        return "it is in training mode"
    writer = index.memory.writer_of(layer)
    if writer:
        return f"{writer.name} may write into its weights"
    if not is_watched(layer):
        return "a weight was made under inference_mode: nobody notices what is written into it"
    reason = index.place_obstacle(node)
    if reason is None and not submodules.is_plain(with_computed_weights(layer)):
        return "its weight and bias do not have the shapes that the layer tells"
    return reason


def with_computed_weights(layer: nn.Module) -> nn.Module:
    """Make a plain layer with the weights that a layer computes."""
    parametrized, clean, kind = [*getattr(layer, "parametrizations", ())], vars(nn.Module()), _kind(layer)
    plain: Any = kind.__new__(kind)
    own = {name: value for name, value in vars(layer).items() if name not in clean}
    held = {PARAMETERS: dict(parameters_of(layer)), BUFFERS: dict(buffers_of(layer))}
    vars(plain).update(clean | own | held, training=False)
    trained = any(parameter.requires_grad for parameter in layer.parameters())
    with torch.no_grad():
        for hook in effects.weight_hooks_of(layer):
            hook(plain, ())
        computed = {name: value for name, value in vars(plain).items() if isinstance(value, Tensor)}
        computed |= {name: getattr(layer, name) for name in parametrized}
        tensors: dict[str, Any] = {name: parameters_of(layer).get(name) for name in ("weight", "bias")}
        tensors |= {name: nn.Parameter(value.clone(), trained) for name, value in computed.items()}
    for name in computed:
        vars(plain).pop(name, None)
    vars(plain).update({PARAMETERS: tensors, BUFFERS: {}})
    return plain  # type: ignore[no-any-return]
