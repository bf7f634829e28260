"""Attributes that code has set on tensors (`weight.seen = x.shape`): state of the model, as are those of its modules."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode


def set_on(tensor: torch.Tensor) -> dict[str, Any]:
    """Attributes of a tensor, or of the fake of one, that torch has not set."""
    return {name: value for name, value in vars(tensor).items() if name not in _of_torch()}


@functools.cache
def _of_torch() -> set[str]:
    fake = FakeTensorMode().from_tensor(torch.empty(()), static_shapes=True)
    return {*vars(fake), "_is_param"}
