"""The sweep: every model type of a source, such as transformers, each as one entry of a zoo."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any, Protocol

from torch import Tensor, nn

from .zoo import ZooError

SOURCES = {
    "transformers": f"{__package__}.architectures",
    "libraries": f"{__package__}.libraries",
}
"""The zoos that are built in: the name for `--fx-zoo`, and the module that makes the models."""

STAGES = ("build", "eager", "capture", "parity", "other sizes", "passes", "usable")
"""What an architecture goes through, in order."""

DEFAULT, SPECIALIZE = "default arguments", "specialize=True"
"""How an architecture was captured."""

FREE, NONE, FIXED = "free", "none", "fixed at capture"
"""What became of a size, besides what forbids it: it is free, the inputs do not have it, or no capture left it free."""


class Source(Protocol):
    """What makes the models of a sweep; a module with these functions is one."""

    def model_types(self) -> list[str]:
        """The names of all models, sorted."""

    def build(self, model_type: str) -> nn.Module:
        """A small model in float32 on the CPU, in evaluation mode, with random weights and statistics."""

    def example_inputs(self, model: nn.Module, batch: int = ..., sequence: int = ...) -> dict[str, Tensor]:
        """Inputs for it at these sizes, floating ones in the dtype of the model."""

    def free_dimensions(self, model: nn.Module) -> dict[str, dict[int, Any]]:
        """Its free dimensions, in the form that `fxopt.trace` takes."""


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One model of a sweep.

    Attributes:
        name: the model type.
        source: makes the model.
        peer: whether `torch.export` is run beside fxopt.
        timeout: seconds that its case may take.
    """

    name: str
    source: Source
    peer: bool = False
    timeout: float = 300.0
    tags: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        """Workers get the module that makes the models by its name."""
        return _restored, ({**vars(self), "source": self.source.__name__},)  # type: ignore[attr-defined]


def _restored(fields: dict[str, Any]) -> Architecture:
    return Architecture(**{**fields, "source": importlib.import_module(fields["source"])})


def architectures(zoo: str, peer: bool = False) -> list[Architecture]:
    """Every model of a built-in zoo, sorted by name. Raises `ZooError` when the package it needs is missing."""
    try:
        source: Any = importlib.import_module(SOURCES[zoo])
    except ImportError as error:
        raise ZooError(f"{zoo} cannot be swept: {error}") from error
    return [Architecture(name, source, peer) for name in source.model_types()]
