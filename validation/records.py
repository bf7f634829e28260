"""A case and what came of it: the two value types that everything else passes around."""

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
"""The checks whose cases have their machine to themselves."""

STAGES = (
    *("load", "run the model", "capture", "transform", "run the graph", "compare", "verify"),
    *("reverse", "usable", "time", "optimize"),
)
"""The stages of a case, in order; a record says where it ended."""


class Outcome(enum.StrEnum):
    """How a case ended, the worst first: what several cases come to together is the first of these that any had.

    Only `PASS` says that something was compared and found right.
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
"""Outcomes that are neither right nor failures: pytest calls these cases xfailed."""


def counted(number: int, noun: str) -> str:
    """So many of something, as in a message.

    Example:
        >>> counted(1, "model"), counted(1200, "case")
        ('1 model', '1,200 cases')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def one_line(text: object) -> str:
    """A text, such as that of an error, on one line."""
    return " ".join(str(text).split())


UNTRIED = "this model is not tried for its other cases: it has hung or died in"
"""How the reason begins that cases were skipped for; the cases that hung or died follow."""

AGAIN = "fxopt validate --model {model} -k {case}"
"""The command that runs one case alone: no id is a part of another one of the same model."""


LACKING = "Left out for want of a package: "
"""The words before the models that a run left out, each with the package."""


@dataclasses.dataclass(frozen=True, order=True)
class Case:
    """One model, one pipeline of passes, one device, one check.

    `pipeline` is empty for what is checked before any pass (parity).
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
        """True of a case that has to have its machine to itself."""
        return self.check in TIMED


@dataclasses.dataclass(frozen=True)
class Record:
    """The result of a case.

    `stage` is where it ended (`load`, `capture`, `transform`, `compare`, ...), `reason` says in one sentence
    why the outcome is not `pass`, `measurements` holds numbers and `facts` words under the names that become
    columns of the report, `refusals` the sites that a pass refused, each as (pass, node, reason), `content` a
    digest of what the case is made of, `repro` the text of a script that shows a failure.
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
        # Errors print in colours, and may hold whatever a model reads: the reason is shown on terminals.
        object.__setattr__(self, "reason", re.sub(r"[\0-\x08\x0b-\x1f\x7f-\x9f]", "", self.reason))


@dataclasses.dataclass(frozen=True)
class Finding:
    """A check's say about its case; the runner makes a `Record` of it."""

    outcome: Outcome = Outcome.PASS
    reason: str = ""
    measurements: dict[str, float | int] = dataclasses.field(default_factory=dict)
    refusals: tuple[tuple[str, str, str], ...] = ()


NOTHING = Finding(Outcome.NO_OP, "nothing to rewrite")
"""The finding of every check, but for that of the effect, for a pipeline without sites."""
