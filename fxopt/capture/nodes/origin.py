"""The origin of a tensor in a graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from fxopt.errors import TraceError


@dataclasses.dataclass
class Origin:
    """Where a tensor comes from: a node, written when first needed, and the way from its result to the tensor."""

    source: torch.fx.Node | Callable[[], torch.fx.Node]
    path: tuple[tuple[str, Any], ...] = ()

    @property
    def node(self) -> torch.fx.Node:
        return self.source if isinstance(self.source, torch.fx.Node) else self.source()


class OutOfSightError(TraceError):
    """A tensor is used that no recorded call has made."""
