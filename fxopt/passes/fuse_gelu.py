"""The tanh form of GELU that is written out becomes one call."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor
from torch.nn import functional

from fxopt.rewriting.pattern import Pattern


@dataclasses.dataclass(frozen=True)
class FuseGelu(Pattern):
    """Computes the tanh form of GELU by one call where a model writes it out, as GPT-2 and ALBERT do.

    One call goes over the values once, and `FuseEpilogues` finds it behind a packed layer.

    Source: Hendrycks and Gimpel, Gaussian Error Linear Units, 2016, arXiv:1606.08415, section 2.

    Example:
        >>> import torch, fxopt
        >>> from transformers.activations import NewGELUActivation
        >>> fused = FuseGelu()(fxopt.trace(NewGELUActivation(), (torch.ones(2),)))
        >>> print(*fused.graph.nodes)
        input_1 input_guard gelu output
    """

    def pattern(self, x: Tensor) -> Tensor:
        """Compute GELU as `NewGELUActivation` of transformers does."""
        inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
        return 0.5 * x * (1.0 + torch.tanh(inner))

    def replacement(self, x: Tensor) -> Tensor:
        """Compute GELU by one call."""
        return functional.gelu(x, approximate="tanh")
