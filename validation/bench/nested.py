"""The tensors in the nested inputs and outputs of a model, for engines that take and give tensors alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache


def tensors(value: Any) -> list[Tensor]:
    """Every tensor in mappings, sequences and caches, in order; arrays of numpy become tensors without a copy."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, np.ndarray):
        return [torch.from_numpy(value)]
    if isinstance(value, Cache):
        return [tensor for layer in value.layers for tensor in (layer.keys, layer.values)]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [tensor for item in value for tensor in tensors(item)] if isinstance(value, list | tuple) else []


def with_tensors(inputs: Mapping[str, Any], leaves: Iterator[Tensor]) -> dict[str, Any]:
    """The same inputs by name with other tensors; a cache is a new one, so that a run leaves the old one as it was."""
    return {name: _rebuilt(value, leaves) for name, value in inputs.items()}


def mapped(inputs: Mapping[str, Any], change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """The same inputs with every tensor changed."""
    return with_tensors(inputs, iter([change(tensor) for tensor in tensors(inputs)]))


def fresh(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The same inputs for one more run, which may add to a cache: no tensor is copied."""
    return mapped(inputs, lambda tensor: tensor)


def cast(inputs: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The same inputs with floating-point tensors in another dtype."""
    return mapped(inputs, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


class Flat(nn.Module):
    """A model that takes its tensors one by one and gives a tuple of tensors: what exporters understand."""

    def __init__(self, model: nn.Module, inputs: Mapping[str, Any]) -> None:
        super().__init__()
        self.model, self.inputs = model, inputs
        self.eval()

    def forward(self, *leaves: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensors(self.model(**with_tensors(self.inputs, iter(leaves)))))


def _rebuilt(value: Any, leaves: Iterator[Tensor]) -> Any:
    if isinstance(value, Tensor):
        return next(leaves)
    if isinstance(value, Cache):
        cache = copy.copy(value)
        cache.layers = [copy.copy(layer) for layer in value.layers]
        for layer in cache.layers:
            layer.keys, layer.values = next(leaves), next(leaves)
        return cache
    return value
