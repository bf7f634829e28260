"""The state of a model besides its tensors: settings of layers, and everything that one call leaves for later calls."""

from __future__ import annotations

import contextvars
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fxopt.errors import TraceError
from fxopt.torch_internals import FORWARD_HOOKS, FakeTensorMode, buffers_of, parameters_of

_PLAIN = (bool, int, float, str, torch.dtype)

# Module and attribute -> value: a number, a string, or a Snapshot (whose parts are MADE or names of the model's tensors);
# None if the attribute no longer exists.
Changes = dict[tuple[str, str], Any]


@dataclasses.dataclass(frozen=True)
class Counted:
    """Represents a counter in the state that a call starts from: the call may only derive new numbers from it."""

    kind: type


@dataclasses.dataclass(frozen=True, eq=False)
class KeptState:
    """Everything that earlier calls left in a model: changed state, hooks of each module, and context variables.

    `known` has the values of tensors and sizes in this state, by identity. The `computed` tensors may have other values at
    each call. From a `Counted` number, the next call may only derive new numbers. `assigned` lists the attributes that
    calls assigned.
    """

    changes: Changes = dataclasses.field(default_factory=dict)
    known: Mapping[int, Any] = dataclasses.field(default_factory=dict)
    hooks: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    variables: Mapping[contextvars.ContextVar[Any], Any] = dataclasses.field(default_factory=dict)
    computed: Sequence[torch.Tensor] = ()
    assigned: Sequence[tuple[str, str]] = ()


def refused_change(change: tuple[str, str]) -> TraceError:
    """The error for state that a later call would read."""
    return TraceError(
        f"the forward assigns to {'.'.join(change).lstrip('.')!r}: state that is replaced from call to call cannot live in "
        "a graph. Write into a buffer with `.copy_()`, or make the module that does this a leaf."
    )


def settings_of(module: torch.nn.Module) -> dict[str, Any]:
    """Everything that determines what a layer computes: numbers, flags, tensors and hooks, in a comparable form."""
    held = dict(parameters_of(module)) | dict(buffers_of(module)) | module.__dict__
    hooks = {key: tuple(held[key]) for key in FORWARD_HOOKS}
    return hooks | {
        key: tuple(map(_setting, value)) if isinstance(value, (tuple, list)) else _setting(value)
        for key, value in held.items()
        if isinstance(value, (*_PLAIN, tuple, list, torch.Tensor, type(None))) or key == "forward"
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
    """Attributes that code set on a tensor or its fake (`weight.seen = x.shape`), without those that torch sets."""
    return {name: value for name, value in vars(tensor).items() if name not in _of_torch()}


@functools.cache
def _of_torch() -> set[str]:
    fake = FakeTensorMode().from_tensor(torch.empty(()), static_shapes=True)
    return {*vars(fake), "_is_param"}
