"""Activation functions: how each is spelled in a graph, as a module, a function or a method."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node

from fxopt import graph


@dataclasses.dataclass(frozen=True)
class Activation:
    """An activation: its module class, its function, and the options of both."""

    module: type[nn.Module]
    function: Callable[..., Any] | None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def make(self) -> nn.Module:
        """Create a new module."""
        return self.module(**self.options)

    def __call__(self, value: Tensor) -> Tensor:
        """Compute the activation of `value` by the function."""
        assert self.function is not None
        found: Tensor = self.function(value, **self.options)
        return found


ACTIVATIONS: Mapping[str, Activation] = {
    "elu": Activation(nn.ELU, F.elu),
    "gelu": Activation(nn.GELU, F.gelu),
    "gelu_tanh": Activation(nn.GELU, F.gelu, {"approximate": "tanh"}),
    "hardsigmoid": Activation(nn.Hardsigmoid, F.hardsigmoid),
    "hardswish": Activation(nn.Hardswish, F.hardswish),
    "leaky_relu": Activation(nn.LeakyReLU, F.leaky_relu),
    "mish": Activation(nn.Mish, F.mish),
    "relu": Activation(nn.ReLU, F.relu),
    "relu6": Activation(nn.ReLU6, F.relu6),
    "selu": Activation(nn.SELU, F.selu),
    "sigmoid": Activation(nn.Sigmoid, torch.sigmoid),
    "silu": Activation(nn.SiLU, F.silu),
    "softplus": Activation(nn.Softplus, F.softplus),
    "tanh": Activation(nn.Tanh, torch.tanh),
}
"""The activations by operator name, with the default options of their modules; `gelu_tanh` is GELU with its tanh formula."""


def as_module(node: Node) -> nn.Module | None:
    """Make the module equivalent to a node that calls an activation as a function or method; `None` for other nodes.

    Example:
        >>> x = torch.fx.Graph().placeholder("x")
        >>> as_module(x.graph.call_function(F.leaky_relu, (x, 0.2)))
        LeakyReLU(negative_slope=0.2)
    """
    name = graph.function_name(node)
    activation = ACTIVATIONS.get(name)
    if activation is None or len(node.all_input_nodes) != 1:
        return None
    homes = [getattr(home, name, None) for home in (F, torch, Tensor)]
    if not (homes[-1] is not None if node.op == "call_method" else node.target in homes):
        return None
    options = {name: value for name, value in node.kwargs.items() if name != "input"}
    try:  # the module accepts the options of the function, in the same order
        return activation.module(*node.args[1:], **options)
    except TypeError:  # an option that only the function has
        return None


def same_activation(one: nn.Module | None, other: nn.Module | None) -> bool:
    """Tell whether two modules have the same type and the same options, ignoring `inplace`."""
    if type(one) is not type(other):
        return False
    ignored = {"training", "inplace", "forward"}  # a replaced forward is refused elsewhere
    options = {name for name in vars(other) if not name.startswith("_")} - ignored
    return all(vars(one).get(name) == vars(other)[name] for name in options)


def on_grid(function: Callable[[Tensor], Tensor]) -> Tensor:
    """Compute values and gradients of a function on a grid, and values at large numbers, where a formula may overflow.

    Example:
        >>> is_close(on_grid(F.silu), on_grid(lambda x: x * torch.sigmoid(x)))
        True
    """
    with torch.enable_grad():
        fine = (torch.arange(-2400, 2401, device="cpu") / 200).double().requires_grad_()
        values = function(fine * 1)
        (gradients,) = torch.autograd.grad(values.sum(), fine)
    far = torch.tensor([-1e4, -1e2, 1e2, 1e4, torch.nan], device="cpu")
    return torch.cat([values.detach(), gradients, function(far).double()])


def is_close(one: Tensor, other: Tensor) -> bool:
    """Tell whether two results of `on_grid` agree, up to the rounding of the square root of 2 / pi in a formula."""
    return torch.allclose(one, other, rtol=4e-9, atol=4e-9, equal_nan=True)
