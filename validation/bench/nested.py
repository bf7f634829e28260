"""The tensors in the nested inputs and outputs of a model, for engines that take and give tensors alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fxopt.objects import tensors_in
from fxopt.testing.differences import mapped


def tensors(value: Any) -> list[Tensor]:
    """Every tensor in nested containers and caches, in order; a list may hold arrays of numpy, which are not copied."""
    if isinstance(value, list):
        value = [torch.from_numpy(each) if isinstance(each, np.ndarray) else each for each in value]
    return list(tensors_in(value))


def with_tensors(inputs: Mapping[str, Any], leaves: Iterator[Tensor]) -> dict[str, Any]:
    """The same inputs by name with other tensors; a cache is a new one, so that a run leaves the old one as it was."""
    return mapped(dict(inputs), lambda tensor: next(leaves))  # type: ignore[no-any-return]


def fresh(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The same inputs for one more run, which may add to a cache: no tensor is copied."""
    return with_tensors(inputs, tensors_in(inputs))


def cast(inputs: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The same inputs with floating-point tensors in another dtype."""
    leaves = (tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in tensors_in(inputs))
    return with_tensors(inputs, leaves)


class Flat(nn.Module):
    """A model that takes its tensors one by one and gives a tuple of tensors: what exporters understand."""

    def __init__(self, model: nn.Module, inputs: Mapping[str, Any]) -> None:
        super().__init__()
        self.model, self.inputs = model, inputs
        self.eval()

    def forward(self, *leaves: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensors(self.model(**with_tensors(self.inputs, iter(leaves)))))
