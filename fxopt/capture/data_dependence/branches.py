"""Data-dependent branches, and scripts of their outcomes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from fxopt.errors import TraceError, error_text


class DataDependentBranch(TraceError):
    """The forward decides on a value, at `where`, and nothing says how; `line` is the source line in whichever module.

    `on_state` says whether the value depends on nothing but parameters and buffers.
    """

    def __init__(self, message: str, kind: type, where: str, line: str, on_state: bool) -> None:
        super().__init__(message)
        self.kind, self.where, self.line, self.on_state = kind, where, line, on_state

    def because(self, reason: str) -> DataDependentBranch:
        """This error, with the reason why the branch could not be settled."""
        message = f"{self} That it makes no difference could not be shown: {reason}."
        return type(self)(message, self.kind, self.where, self.line, self.on_state)


class DataDependentLoop(DataDependentBranch):
    """The forward loops over the places where a mask is true: is there one?"""


class DataDependentWhile(DataDependentBranch):
    """The forward repeats the body of a `while` until a value says otherwise: the same question may come again without an end."""


class NumberBranch(DataDependentBranch):
    """The forward compares numbers that are known only when the graph runs, as sizes are, for which guards are put."""


class PlaceError(TraceError):
    """The body of a loop raises an error of the model's at a place: `error`, as for an index that is out of range."""

    def __init__(self, message: str, line: str, position: int, error: Exception) -> None:
        super().__init__(message)
        self.line, self.position, self.error = line, position, error_text(error)


class DataDependentText(DataDependentBranch):
    """The forward makes a text of a value, and may decide on it, as in `experts[f"expert_{number}"]`."""


class SizeAsKeyError(TypeError):
    """A free size is hashed, to be the key of a dict, and the forward does not go on without."""


MOST_ROUNDS = 8  # of a `while` that only a value ends


@dataclasses.dataclass
class Outcome:
    """The outcome of a branch, the error of the model to which the other one leads, and whether a run came to the branch."""

    answer: bool
    otherwise: str = ""
    asked: bool = False


@dataclasses.dataclass(frozen=True)
class Outcomes:
    """A script: the outcomes of all branches at some lines, and of the first branches elsewhere, in the order of the run."""

    at_lines: Mapping[str, tuple[bool, bool]] = dataclasses.field(default_factory=dict)  # two, in turn
    settled: tuple[Outcome, ...] = ()
    # Where the graph holds both sides of branches, what is known of the branch that follows each row of outcomes.
    both: dict[tuple[bool, ...], Outcome | None] | None = None
    # Loops that start at one of these lines end before a place, at which the model would raise an error.
    ends: Mapping[str, tuple[int, str]] = dataclasses.field(default_factory=dict)

    def and_then(self, settled: Outcome) -> Outcomes:
        return dataclasses.replace(self, settled=(*self.settled, settled))

    def with_line(self, line: str, answers: tuple[bool, bool]) -> Outcomes:
        return dataclasses.replace(self, at_lines={**self.at_lines, line: answers})

    def with_end(self, failure: PlaceError) -> Outcomes:
        return dataclasses.replace(self, ends={**self.ends, failure.line: (failure.position, failure.error)})


ALWAYS, NEVER = (True, True), (False, False)
