"""Random values for the weights of a model, because fresh weights hide faults."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def randomise(module: nn.Module, seed: int = 0) -> nn.Module:
    """Give every bias, affine scale and running statistic of `module` a random value, in place.

    Matrices keep their values. The same seed gives the same values on every machine: they are drawn in
    float64 on the CPU, module by module.

    Args:
        module: the module to change.
        seed: the seed of the random generator.

    Returns:
        `module` itself.

    Example:
        >>> import torch
        >>> randomise(torch.nn.BatchNorm1d(1), seed=1).running_mean
        tensor([-0.2657])
    """
    generator = torch.Generator().manual_seed(seed)
    seen: set[int] = set()

    def fill(tensor: Tensor | None, low: float, high: float) -> None:
        if tensor is None or id(tensor) in seen or not tensor.is_floating_point():
            return
        seen.add(id(tensor))
        values = torch.rand(tensor.shape, generator=generator, dtype=torch.float64) * (high - low) + low
        with torch.no_grad():
            tensor.copy_(values)

    for child in module.modules():
        for name, parameter in child.named_parameters(recurse=False):
            if "bias" in name:
                fill(parameter, -0.5, 0.5)
            elif parameter.ndim == 1:  # an affine scale
                fill(parameter, 0.5, 1.5)
        fill(getattr(child, "running_mean", None), -0.5, 0.5)
        fill(getattr(child, "running_var", None), 0.5, 2.0)
    return module
