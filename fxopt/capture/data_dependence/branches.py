"""Data-dependent branches, and scripts of their outcomes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from fxopt.errors import TraceError, error_text


class DataDependentBranch(TraceError):
    """The forward decides on an unknown value, at `where`; `line` is the source line, without the module.

    `on_state` is True if the value depends only on parameters and buffers.
    """

    def __init__(self, message: str, kind: type, where: str, line: str, on_state: bool) -> None:
        super().__init__(message)
        self.kind, self.where, self.line, self.on_state = kind, where, line, on_state

    def because(self, reason: str) -> DataDependentBranch:
        """Return this error with the reason why the branch could not be settled."""
        message = f"{self} fxopt could not show that the branch makes no difference: {reason}."
        return type(self)(message, self.kind, self.where, self.line, self.on_state)


class DataDependentLoop(DataDependentBranch):
    """The forward loops over the positions where a mask is true; the decision is whether there is one."""


class DataDependentWhile(DataDependentBranch):
    """The forward repeats the body of a `while` until a value ends it: the same decision may recur without end."""


class NumberBranch(DataDependentBranch):
    """The forward compares numbers that are known only when the graph runs, such as unbacked sizes."""


class LoopPositionError(TraceError):
    """The body of a loop raises the model's own `error` at a position of a mask, such as an index out of range."""

    def __init__(self, message: str, line: str, position: int, error: Exception) -> None:
        super().__init__(message)
        self.line, self.position, self.error = line, position, error_text(error)


class DataDependentText(DataDependentBranch):
    """The forward makes a text of a value, and may decide on the text, as in `experts[f"expert_{number}"]`."""


class SizeAsKeyError(TypeError):
    """A dynamic size is hashed as the key of a dict, so its value must be known."""


MOST_ROUNDS = 8  # for a `while` that only a value ends


@dataclasses.dataclass
class Outcome:
    """The outcome of a branch, the model's error for the other outcome, and whether a run reached the branch."""

    answer: bool
    otherwise: str = ""
    asked: bool = False


@dataclasses.dataclass(frozen=True)
class Outcomes:
    """A script: the outcomes of all branches at some lines, and of the first branches elsewhere, in the order of the run."""

    at_lines: Mapping[str, tuple[bool, bool]] = dataclasses.field(default_factory=dict)  # two, used in turn
    settled: tuple[Outcome, ...] = ()
    # If the graph contains both sides: by sequence of outcomes, what is known about the branch that follows.
    both: dict[tuple[bool, ...], Outcome | None] | None = None
    # By line of a loop over positions, the position before which the loop ends, and the model's error at that position.
    ends: Mapping[str, tuple[int, str]] = dataclasses.field(default_factory=dict)

    def and_then(self, settled: Outcome) -> Outcomes:
        return dataclasses.replace(self, settled=(*self.settled, settled))

    def with_line(self, line: str, answers: tuple[bool, bool]) -> Outcomes:
        return dataclasses.replace(self, at_lines={**self.at_lines, line: answers})

    def with_end(self, failure: LoopPositionError) -> Outcomes:
        return dataclasses.replace(self, ends={**self.ends, failure.line: (failure.position, failure.error)})


ALWAYS, NEVER = (True, True), (False, False)
