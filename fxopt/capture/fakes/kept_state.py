"""All that calls of a forward leave in a model for later ones, and what a later one may do with it."""

from __future__ import annotations

import contextvars
import dataclasses
from collections.abc import Mapping
from typing import Any

from fxopt.errors import TraceError

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

    `known` are the values of tensors and sizes in it, by identity. Of a number that is `Counted` the next call may only
    make others.
    """

    changes: Changes = dataclasses.field(default_factory=dict)
    known: Mapping[int, Any] = dataclasses.field(default_factory=dict)
    hooks: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    variables: Mapping[contextvars.ContextVar[Any], Any] = dataclasses.field(default_factory=dict)


def refused_change(change: tuple[str, str]) -> TraceError:
    """The error for state that a later call would read."""
    return TraceError(
        f"the forward assigns to {'.'.join(change).lstrip('.')!r}: state that is replaced from call to call cannot live in "
        "a graph. Write into a buffer with `.copy_()`, or make the module that does this a leaf."
    )
