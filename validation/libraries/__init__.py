"""Small models of other libraries, with random weights: what fxopt captures besides transformers.

A library that is not installed is left out; the extra `libraries` installs all of them.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from fxopt.testing import randomise

from . import generative, medicine, science, text, vision
from .models import LibraryModel

BATCH, OTHER_BATCH = 2, 3


def model_types() -> list[str]:
    """The names of all models of installed libraries, sorted: `"monai.UNet"`."""
    return sorted(_models())


def build(model_type: str, seed: int = 0) -> nn.Module:
    """A small model in float32 on the CPU, in evaluation mode, with random weights and statistics."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = _models()[model_type].make()
    made.__dict__["library_model"] = model_type
    return randomise(made.float(), seed).eval()


def example_inputs(
    model: nn.Module, batch: int = BATCH, sequence: int = 0, seed: int = 0
) -> dict[str, Tensor]:
    """Inputs of a model of `build` by the names of the forward's parameters, floating ones in the model's dtype."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = _models()[model.__dict__["library_model"]].inputs(batch)
    if not isinstance(made, dict):
        made = dict(zip(inspect.signature(model.forward).parameters, made, strict=False))
    tensors = (*model.parameters(), *model.buffers())
    dtype = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float32)
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in made.items()}


def free_dimensions(model: nn.Module) -> dict[str, dict[int, Any]]:
    """The dimensions that change with the batch, as `dynamic_shapes` of `fxopt.trace` and `torch.export`."""
    few, more = example_inputs(model), example_inputs(model, OTHER_BATCH)
    return {
        name: {dim: Dim.AUTO for dim, size in enumerate(value.shape) if more[name].shape[dim] != size}
        for name, value in few.items()
    }


@functools.cache
def _models() -> dict[str, LibraryModel]:
    models = [*vision.MODELS, *medicine.MODELS, *generative.MODELS, *text.MODELS, *science.MODELS]
    installed = {
        name for name in {model.name.partition(".")[0] for model in models} if importlib.util.find_spec(name)
    }
    found: dict[str, LibraryModel] = {}
    for model in models:
        if model.name.partition(".")[0] in installed:
            assert model.name not in found, model.name
            found[model.name] = model
    return found
