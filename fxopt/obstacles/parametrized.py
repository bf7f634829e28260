"""Layers whose weights torch computes in each call, as by `weight_norm`, and the equivalent plain layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.nn.utils import parametrize

from fxopt import effects, submodules
from fxopt.constants import is_watched
from fxopt.graph_index import GraphIndex
from fxopt.obstacles.scaling import LAYERS
from fxopt.operators import hooks_of, is_torch_module
from fxopt.torch_internals import PARAMETERS, parameters_of


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
    backward = any("backward" in name for name in hooks_of(layer))
    if backward or any(map(hooks_of, own)) or effects.has_forward_hooks(layer) or not is_torch_module(layer):
        return "it has hooks, or a parametrization that is not torch's own"
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
    trained = any(parameter.requires_grad for parameter in layer.parameters())
    computing, tensors = type(layer).__new__(type(layer)), dict[str, Tensor | None]()
    vars(computing).update(vars(layer))  # hooks write their results into the layer
    with torch.no_grad():
        for hook in effects.weight_hooks_of(layer):
            hook(computing, ())
        for name in ("weight", "bias"):
            value, held = getattr(computing, name), parameters_of(layer).get(name)
            tensors[name] = held if value is held else nn.Parameter(value.clone(), trained)
    kind = _kind(layer)
    plain = kind.__new__(kind)
    nn.Module.__init__(plain)
    options = {name: value for name, value in vars(layer).items() if name not in {*vars(plain), *tensors}}
    vars(plain).update({**options, PARAMETERS: tensors, "training": False})
    return plain
