"""A verdict: how closely a module agrees with another, and where the error is largest."""

from __future__ import annotations

import dataclasses
import enum

from fxopt.compare import Difference


class Grade(enum.StrEnum):
    """Grades of agreement between a module and another one, the best first.

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
        """True unless the module is wrong, or the original does not repeat its results."""
        return self not in (Grade.WRONG, Grade.UNSTABLE)


NOTHING = Difference(0, 0, float("inf"), float("inf"), "")
"""The difference to report if outputs cannot be compared."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The judgement of the oracle on a candidate.

    Attributes:
        grade: the agreement with the original: `bit-exact` (on each input, in the own dtype),
            `within n ULP` (each number of each output), `as accurate as the original` (compared with float64),
            `within tolerance` (a given one), `wrong`, or `unstable` (the original does not repeat its results).
        error: the error of the candidate, relative to the largest value of a tensor. If the candidate is wrong in float64,
            its difference from the original there; otherwise, in its own dtype, its difference from the float64 output; with
            grade `within tolerance`, the larger of both.
        limit: the limit of `error`.
        where: the path of the tensor with this error, such as `output.logits`.
        reason: why the candidate is wrong or has no better grade, or a remark on a candidate that is right; may be empty.
        ulps: the largest difference from the output of the original, in units in the last place.
        probes: the names of the inputs on which the candidate was judged.
        float64: the largest difference of candidate and original, both in float64.
        own_limit: the limit of the error in `own`.
        own: the largest difference of the candidate, in its own dtype, from the original in float64.
        baseline: the difference of the original, in its own dtype, from itself in float64, on the inputs of `own`.
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
