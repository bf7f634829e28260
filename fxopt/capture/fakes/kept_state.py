"""The state of a model beside its modules' tensors: settings of layers, and all that calls of a forward leave for later ones."""

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

# Module and attribute -> what is there: a number or string, or a Snapshot (whose parts are MADE, or the name of a
# tensor of the model); None where it is no more.
Changes = dict[tuple[str, str], Any]


@dataclasses.dataclass(frozen=True)
class Counted:
    """Stands, in what a call starts from, for a number of a kind that the call may only make others of."""

    kind: type


@dataclasses.dataclass(frozen=True, eq=False)
class KeptState:
    """All that earlier calls have left in a model: what they changed of its state, the hooks of each module, and
    the context variables that they set.

    `known` are the values of tensors and sizes in it, by identity; those that are `computed` may be others at each call. Of a number
    that is `Counted` the next call may only make others. `assigned` are the attributes to which they assigned.
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
    """All that decides how a layer computes: numbers, flags, tensors and hooks, in a form that can be compared."""
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
    """Attributes that code has set on a tensor, or on the fake of one (`weight.seen = x.shape`); torch sets others."""
    return {name: value for name, value in vars(tensor).items() if name not in _of_torch()}


@functools.cache
def _of_torch() -> set[str]:
    fake = FakeTensorMode().from_tensor(torch.empty(()), static_shapes=True)
    return {*vars(fake), "_is_param"}
