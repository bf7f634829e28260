"""A case and its result: the two value types that all other modules exchange."""

from __future__ import annotations

import dataclasses
import enum
import re


class Check(enum.StrEnum):
    """The kinds of cases, by what they measure."""

    PARITY = "parity"
    EQUIVALENCE = "equivalence"
    ROUND_TRIP = "round-trip"
    EFFECT = "effect"
    ACCURACY = "accuracy"
    LATENCY = "latency"
    OPTIMIZE = "optimize"
    USABLE = "usable"
    PEER = "peer"


TIMED = (Check.LATENCY, Check.OPTIMIZE)
"""The checks whose cases must run alone on their machine."""

STAGES = (
    *("load", "run the model", "capture", "transform", "run the graph", "compare", "verify"),
    *("reverse", "usable", "time", "optimize"),
)
"""The stages of a case, in order; a record has the stage in which the case ended."""


class Outcome(enum.StrEnum):
    """How a case ended, worst first: several cases together have the worst outcome of any of them.

    Only `PASS` means that something was compared and found right.
    """

    CRASH = "crash"
    MEMORY = "out-of-memory"
    TIMEOUT = "timeout"
    ERROR = "error"
    FAIL = "fail"
    EXPECTED = "expected"
    REFUSED = "refused"
    UNJUDGED = "unjudged"
    NO_OP = "no-op"
    PASS = "pass"
    SKIP = "skip"


MEANING = {
    Outcome.PASS: "the case compared something and found it right",
    Outcome.NO_OP: "the pipeline found nothing to rewrite, so there was nothing to compare",
    Outcome.EXPECTED: "the case failed as `known_failures` of the zoo says",
    Outcome.REFUSED: "fxopt says that it cannot capture the model, and why (in a sweep)",
    Outcome.UNJUDGED: "the outputs moved, and neither the pass nor the zoo states by how much they may",
    Outcome.SKIP: "the case did not run, with a reason",
    Outcome.FAIL: "the comparison found a difference",
    Outcome.ERROR: "an exception outside of the comparison",
    Outcome.TIMEOUT: "the case took longer than `timeout`",
    Outcome.MEMORY: "the case ran out of memory",
    Outcome.CRASH: "the process of the case died",
}
"""The meaning of each outcome."""

WORST_FIRST = tuple(map(str, Outcome))
FAILING = frozenset({Outcome.CRASH, Outcome.MEMORY, Outcome.TIMEOUT, Outcome.ERROR, Outcome.FAIL})
EXCUSED = (Outcome.EXPECTED, Outcome.REFUSED, Outcome.UNJUDGED)
"""Outcomes that are neither right nor failures: pytest reports these cases as xfailed."""


def counted(number: int, noun: str) -> str:
    """A number with its noun, for messages.

    Example:
        >>> counted(1, "model"), counted(1200, "case")
        ('1 model', '1,200 cases')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def one_line(text: object) -> str:
    """A text, such as that of an error, on one line."""
    return " ".join(str(text).split())


UNTRIED = "this model is not tried for its other cases: it has hung or died in"
"""The start of the reason for cases that were skipped; the cases that hung or died follow."""

AGAIN = "fxopt validate --model {model} -k {case}"
"""The command that runs only one case: no id is a part of the id of another case of the same model."""


LACKING = "Left out for want of a package: "
"""The words before the list of models that a run left out, each with its missing package."""


@dataclasses.dataclass(frozen=True, order=True)
class Case:
    """One model, one pipeline of passes, one device, one check.

    `pipeline` is empty for checks of the graph before any pass (parity).
    """

    model: str
    pipeline: tuple[str, ...]
    device: str
    check: Check

    @property
    def id(self) -> str:
        """A stable, readable identifier: `bert-base-MergeLinears-cpu-equivalence`."""
        return "-".join([self.model, "+".join(self.pipeline) or "eager", self.device, self.check])

    @property
    def timed(self) -> bool:
        """True if the case must run alone on its machine."""
        return self.check in TIMED


@dataclasses.dataclass(frozen=True)
class Record:
    """The result of a case.

    `stage` is where the case ended (`load`, `capture`, `transform`, `compare`, ...). `reason` explains in one sentence why
    the outcome is not `pass`. `measurements` has numbers and `facts` has texts; their names become columns of the report.
    `refusals` has the refused sites, each as (pass, node, reason). `content` is a digest of the definition of the case,
    `repro` the text of a script that reproduces a failure.
    """

    case: Case
    outcome: Outcome
    stage: str = ""
    reason: str = ""
    seconds: float = 0.0
    dtype: str = ""
    measurements: dict[str, float | int] = dataclasses.field(default_factory=dict)
    refusals: tuple[tuple[str, str, str], ...] = ()
    facts: dict[str, str] = dataclasses.field(default_factory=dict)
    content: str = ""
    repro: str = ""

    def __post_init__(self) -> None:
        # Error texts may contain color codes, and any text that a model reads; the reason is shown on terminals.
        object.__setattr__(self, "reason", re.sub(r"[\0-\x08\x0b-\x1f\x7f-\x9f]", "", self.reason))


@dataclasses.dataclass(frozen=True)
class Finding:
    """The verdict of a check on its case; the runner makes a `Record` from it."""

    outcome: Outcome = Outcome.PASS
    reason: str = ""
    measurements: dict[str, float | int] = dataclasses.field(default_factory=dict)
    refusals: tuple[tuple[str, str, str], ...] = ()


NOTHING = Finding(Outcome.NO_OP, "nothing to rewrite")
"""The finding for a pipeline without sites, in every check except effect."""
