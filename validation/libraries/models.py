"""One model of a library: how it is made, and the inputs that it takes."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Inputs = Callable[[int], tuple[Tensor, ...] | dict[str, Tensor]]
"""Inputs for so many examples, in the order or by the names of the forward's parameters."""


@dataclasses.dataclass(frozen=True)
class LibraryModel:
    """A model of a library.

    Attributes:
        name: the library and the model's own name.
        make: makes the model, importing the library.
        inputs: what its forward takes.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Inputs


def imported(path: str) -> Any:
    """Import the object that a dotted path names: `"monai.networks.nets.UNet"`."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError:  # a method of a class
        return getattr(imported(module), name)


def model(path: str, inputs: Inputs, *args: Any, name: str = "", **options: Any) -> LibraryModel:
    """The model that the class or function at `path` makes of these arguments; functions among them make parts of it."""
    library, _, own = path.partition(".")

    def make() -> nn.Module:
        given = [arg() if callable(arg) else arg for arg in args]
        parts = {key: value() if callable(value) else value for key, value in options.items()}
        made: nn.Module = imported(path)(*given, **parts)
        return made

    return LibraryModel(f"{library}.{name or own.rpartition('.')[2]}", make, inputs)


def noise(*shape: int) -> Inputs:
    """One tensor of noise with this shape behind the batch."""
    return lambda batch: (torch.randn(batch, *shape),)


def image(size: int = 32, channels: int = 3) -> Inputs:
    """Square images."""
    return noise(channels, size, size)


def tokens(length: int = 12, vocabulary: int = 50) -> Inputs:
    """Numbers of tokens."""
    return lambda batch: (torch.randint(0, vocabulary, (batch, length)),)
