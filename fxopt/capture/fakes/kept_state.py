"""All that calls of a forward leave in a model for later ones, and what a later one may do with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from fxopt.errors import TraceError

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
