"""The settings of a layer: numbers, flags and the tensors that it holds, in a form that can be compared."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

_PLAIN = (bool, int, float, str, torch.dtype)


def settings_of(module: torch.nn.Module) -> dict[str, Any]:
    """All that decides how a layer computes: numbers, flags, the tensors it holds, and hooks."""
    held = dict(module._parameters) | dict(module._buffers) | module.__dict__
    hooks = {key: tuple(held[key]) for key in ("_forward_hooks", "_forward_pre_hooks")}
    return hooks | {
        key: tuple(map(_setting, value)) if isinstance(value, (tuple, list)) else _setting(value)
        for key, value in held.items()
        if isinstance(value, (*_PLAIN, tuple, list, torch.Tensor, type(None))) or key == "forward"
    }


def _setting(value: Any) -> Any:
    """A constant as itself, and of anything else, which is the object itself, a form that can be compared."""
    return value if isinstance(value, _PLAIN) else _Identity(value)


@dataclasses.dataclass(frozen=True, eq=False)
class _Identity:
    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)
