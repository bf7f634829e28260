"""The state of a model beside its modules' tensors: settings of layers, and all that calls of a forward leave for later ones."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fxopt.errors import TraceError

_PLAIN = (bool, int, float, str, torch.dtype)

# Module and attribute -> what is there: a number or string, the name of a tensor of the model, MADE, or a Snapshot.
Changes = dict[tuple[str, str], Any]
# Stands, in what a call starts from, for an attribute that is not there, and that the call may not read.
UNREAD = object()


@dataclasses.dataclass(frozen=True)
class Counted:
    """Stands, in what a call starts from, for a number of a kind that the call may only make others of."""

    kind: type


@dataclasses.dataclass(frozen=True, eq=False)
class KeptState:
    """All that earlier calls have left in a model: what they changed of its state, and the hooks of each module.

    `known` are the values of tensors and sizes in it, by identity. What is `UNREAD` in the changes the next call may not
    read, and a number that is `Counted` it may only make others of.
    """

    changes: Changes = dataclasses.field(default_factory=dict)
    known: Mapping[int, Any] = dataclasses.field(default_factory=dict)
    hooks: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def refused_change(change: tuple[str, str]) -> TraceError:
    """The error for state that a later call would read."""
    return TraceError(
        f"the forward assigns to {'.'.join(change).lstrip('.')!r}: state that is replaced from call to call cannot live in "
        "a graph. Write into a buffer with `.copy_()`, or make the module that does this a leaf."
    )


def settings_of(module: torch.nn.Module) -> dict[str, Any]:
    """All that decides how a layer computes: numbers, flags, and the tensors it holds, in a form that can be compared."""
    held = dict(module._parameters) | dict(module._buffers) | module.__dict__
    return {
        key: tuple(map(_setting, value)) if isinstance(value, (tuple, list)) else _setting(value)
        for key, value in held.items()
        if isinstance(value, (*_PLAIN, tuple, list, torch.Tensor, type(None)))
    }


def _setting(value: Any) -> Any:
    return value if isinstance(value, _PLAIN) else _Identity(value)


@dataclasses.dataclass(frozen=True, eq=False)
class _Identity:
    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def set_on(tensor: torch.Tensor) -> dict[str, Any]:
    """Attributes that code has set on a tensor, or on the fake of one (`weight.seen = x.shape`); torch sets others."""
    return {name: value for name, value in vars(tensor).items() if name not in _of_torch()}


@functools.cache
def _of_torch() -> set[str]:
    fake = FakeTensorMode().from_tensor(torch.empty(()), static_shapes=True)
    return {*vars(fake), "_is_param"}
