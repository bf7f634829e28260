"""A verdict: how well a module stands for another, and where it does worst."""

from __future__ import annotations

import dataclasses
import enum

from fxopt.compare import Difference


class Grade(enum.StrEnum):
    """How well a module stands for another; the best first.

    Example:
        >>> Grade.WRONG.passes, Grade.ULP.passes
        (False, True)
    """

    BIT_EXACT = "bit-exact"
    ULP = "within n ULP"
    ACCURATE = "as accurate as the original"
    TOLERANCE = "within tolerance"
    WRONG = "wrong"
    UNSTABLE = "unstable"

    @property
    def passes(self) -> bool:
        """True unless the module is wrong, or the original does not repeat itself."""
        return self not in (Grade.WRONG, Grade.UNSTABLE)


NOTHING = Difference(0, 0, float("inf"), float("inf"), "")
"""The difference of what cannot be compared."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The judgement of the oracle on a candidate.

    Attributes:
        grade: how well the candidate stands for the original: `bit-exact` (on each input, in its own dtype),
            `within n ULP` (each number of each output), `as accurate as the original` (against float64),
            `within tolerance` (one that was given), `wrong`, or `unstable`: the original does not repeat itself.
        error: how far the candidate is from what it is judged against, relative to the largest value of a tensor:
            from the original in float64 where it is wrong there, else in its own dtype from the float64 output.
        limit: of `error`.
        where: the path of the tensor of `error`, such as `output.logits`.
        reason: why it is wrong, or no better, or what to know of it although it is right; empty otherwise.
        ulps: the largest distance from the output of the original, in units in the last place.
        probes: the inputs on which it was judged.
        float64: the candidate against the original, both in float64, where they differ most.
        own_limit: of the error of `own`.
        own: the candidate in its own dtype against the original in float64, where they differ most.
        baseline: the original in its own dtype against itself in float64, on the same inputs.
    """

    grade: Grade
    error: float
    limit: float
    where: str = ""
    reason: str = ""
    ulps: float = float("inf")
    probes: tuple[str, ...] = ()
    own_limit: float = float("inf")
    float64: Difference = NOTHING
    own: Difference = NOTHING
    baseline: Difference = NOTHING

    def __str__(self) -> str:
        grade = f"within {self.ulps:.0f} ULP" if self.grade is Grade.ULP else str(self.grade)
        return f"{grade}: {self.reason}" if self.reason else grade
