"""A call of torch, as the recorder sees it."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of torch on fake tensors."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", "")
