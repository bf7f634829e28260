"""Fuses a product and a sum into one call."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.fx import Node

from fxopt import graph
from fxopt.rewriting.pattern import Pattern


@dataclasses.dataclass(frozen=True)
class FuseMultiplyAdd(Pattern):
    """Computes `x + y * z` by `torch.addcmul`, which reads the values once and, in half precision, rounds once.

    Rotary positions, modulated layers of diffusion transformers, and scaled residuals contain such sums.

    Example:
        >>> import torch, fxopt
        >>> class Modulated(torch.nn.Module):
        ...     def forward(self, x, scale, shift):
        ...         return x * scale + shift
        >>> traced = fxopt.trace(Modulated(), (torch.ones(2, 3), torch.ones(3), torch.ones(3)))
        >>> print(*FuseMultiplyAdd()(traced).graph.nodes)
        x scale shift input_guard addcmul output
    """

    def pattern(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        """Add a product."""
        return x + y * z

    def replacement(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        """Multiply and add by one call."""
        return torch.addcmul(x, y, z)

    def refuses(self, x: Node, y: Node, z: Node) -> str | None:
        """Return why one call would not compute the same values."""
        values = [graph.value_of(each) for each in (x, y, z)]
        kinds = {(value.dtype, value.device) for value in values if isinstance(value, Tensor)}
        if len(kinds) > 1 or not all(dtype.is_floating_point for dtype, _ in kinds):
            return "its values are not of one floating-point dtype, on one device"
        return None
