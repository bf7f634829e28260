"""The sweep: every model type of a source, such as transformers, as an entry of a zoo."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import Any, ClassVar, Protocol, cast

from pydantic import Field
from torch import Tensor, nn

from .entry import Entry, Input
from .passes import ZooError
from .records import Record

SOURCES = {
    "transformers": f"{__package__}.architectures",
    "libraries": f"{__package__}.libraries",
}
"""The zoos that are built in: the name for `--fx-zoo`, and the module that makes the models."""

SOURCE = "source"
"""The fact that each record of a sweep has: where its model comes from."""

FREE, NONE, FIXED, FIXED_BY_MODEL = "free", "none", "fixed at capture", "fixed by the model"
"""The fate of a size, besides what guards forbid: it is free, the inputs do not have it, no capture left it free, or the
model itself takes no other.
"""


class Source(Protocol):
    """The maker of the models of a sweep; a module with these functions is one."""

    def model_types(self) -> list[str]:
        """The names of all models, sorted."""

    def build(self, model_type: str) -> nn.Module:
        """A small model in float32 on the CPU, in evaluation mode, with random weights and statistics."""

    def example_inputs(self, model: nn.Module, batch: int = ..., sequence: int = ...) -> dict[str, Tensor]:
        """Inputs for it at these sizes, floating ones in the dtype of the model."""


class Architecture(Entry):
    """One model of a sweep: an entry whose model and inputs a source makes.

    Nobody has said of it that it runs, or how it is captured. Where it does not run it is skipped; it is captured in
    the first of several ways, and what no way takes is refused; where it mixes dtypes it is judged in its own.

    Attributes:
        source: the module that makes it, by its name, so that workers get it.
        peer: whether `torch.export` is run beside fxopt.
    """

    given: ClassVar[bool] = False
    name: str
    inputs: dict[str, Input] = Field(default={})
    source: str
    peer: bool = False

    def make(self) -> Source:
        """The module that makes the model."""
        return cast(Source, importlib.import_module(self.source))


def architectures(zoo: str, peer: bool = False) -> list[Architecture]:
    """Every model of a built-in zoo, sorted by name. Raises `ZooError` when the package it needs is missing."""
    try:
        source: Any = importlib.import_module(SOURCES[zoo])
    except ImportError as error:
        raise ZooError(f"{zoo} cannot be swept: {error}") from error
    made = functools.partial(Architecture, source=source.__name__, peer=peer, tags=())
    return [made(name=name, model=name) for name in source.model_types()]


def marked(entry: Entry, record: Record) -> Record:
    """A record with the source of its model, if a sweep has one: it tells the runs of sweeps from others."""
    if not isinstance(entry, Architecture):
        return record
    return dataclasses.replace(record, facts={**record.facts, SOURCE: entry.source.rpartition(".")[2]})
