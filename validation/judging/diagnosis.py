"""Where a failing case is wrong: the passes and the sites to blame, the node that parts, and a script that shows it."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable

import torch
from torch.fx import GraphModule

from fxopt.errors import UndoError
from fxopt.rewriting.history import history, undo
from fxopt.rewriting.transformation import Transformation
from fxopt.testing import Culprit, Oracle, assert_round_trip, find_culprit
from fxopt.testing.assertions import place_of_error

from ..records import Case, Check, Finding, Outcome
from . import repro
from .subject import Subject

MOST_SECONDS = 60.0
"""The most that a diagnosis may take, and no more than a third of what is left to its case."""

ALL_SECONDS = 300.0
"""The most that those of a process may take together: where everything is wrong, the first ones say why."""

BEFORE_PASSES = ("load", "run the model", "capture")
"""The stages before there is anything to check, of which no pass is to blame."""


class Diagnoses:
    """Says where failing cases are wrong, as long as there is time.

    A culprit that was found in a model is not looked for again in other pipelines that hold its passes.
    """

    def __init__(self) -> None:
        self._left = ALL_SECONDS
        self._known: dict[tuple[str, str, Check], list[tuple[Case, Culprit, torch.dtype]]] = {}

    def of(self, subject: Subject, case: Case, finding: Finding, used: float) -> tuple[Finding, str]:
        """A finding that also says where, and a script that shows it; both as they are where nothing can be said.

        `used` are the seconds that the case has taken.
        """
        if case.check not in repro.NEEDED:
            return finding, ""
        seconds = min(MOST_SECONDS, self._left, (subject.entry.timeout - used) / 3)
        started, stage = time.monotonic(), subject.stage
        found = _Found()
        try:
            if stage not in BEFORE_PASSES:
                with subject.entering("diagnose"):
                    found = self._found(subject, case, seconds)
        except (Exception, SystemExit) as error:  # of a model or a pass, which fails in any case
            text = f"{type(error).__name__}: {error}"
            found = _Found("" if text in finding.reason else f"it cannot be said where: {text}")
            subject.enter(stage)
        self._left -= time.monotonic() - started
        reason = repro.portable("\n".join(filter(None, [finding.reason, found.where])))
        passes = found.passes or tuple(pass_ for _, pass_ in subject.members(case.pipeline))
        verify = not found.passes and case.check is Check.EQUIVALENCE and finding.outcome is Outcome.FAIL
        dtype = str(found.dtype or subject.dtypes[0]).removeprefix("torch.")
        limit = subject.most_error(case.pipeline, getattr(torch, dtype))
        text = repro.script(case, reason, subject.entry, dtype, passes, verify, limit)
        return dataclasses.replace(finding, reason=reason), text

    def _found(self, subject: Subject, case: Case, seconds: float) -> _Found:
        passes = [pass_ for _, pass_ in subject.members(case.pipeline)]
        key = case.model, case.device, case.check
        for other, known, dtype in self._known.get(key, ()):
            if _holds(passes, known.passes):
                return _Found(f"{known} (as in {other.id})", dtype, known.steps)
        end = time.monotonic() + seconds
        for dtype in subject.dtypes:
            oracle, graph, wide = subject.oracle(dtype), subject.traced(dtype), subject.traced(torch.float64)
            if not passes:
                models = subject.model(torch.float64), wide
                if where := place_of_error(oracle, subject.model(dtype), graph, models):
                    return _Found(where, dtype)
                continue
            culprit = find_culprit(
                oracle,
                graph,
                passes,
                float64=wide,
                judge=_judge(case.check, oracle, graph),
                tolerance=subject.entry.tolerance(case.pipeline),
                seconds=end - time.monotonic(),
            )
            if culprit:
                self._known.setdefault(key, []).append((case, culprit, dtype))
                return _Found(str(culprit), dtype, culprit.steps)
        return _Found()


@dataclasses.dataclass(frozen=True)
class _Found:
    """Where a case is wrong, in words, the dtype in which it is, and the passes that it takes."""

    where: str = ""
    dtype: torch.dtype | None = None
    passes: tuple[Transformation, ...] = ()


def _judge(
    check: Check, oracle: Oracle, graph: GraphModule
) -> Callable[[GraphModule, GraphModule], str] | None:
    """Says why what passes made is wrong, where that is not what the oracle says of it."""

    def form(own: GraphModule, wide: GraphModule) -> str:
        return oracle.fault(oracle.observe(own))

    def undone(own: GraphModule, wide: GraphModule) -> str:
        try:
            restored = undo(copy.deepcopy(own), len(history(own))) if history(own) else own
            assert_round_trip(graph, restored)
        except (AssertionError, UndoError) as error:
            return str(error)
        return ""

    return {Check.ACCURACY: form, Check.ROUND_TRIP: undone}.get(check)


def _holds(passes: list[Transformation], some: tuple[Transformation, ...]) -> bool:
    """Tell whether passes come one after the other, perhaps with others between, in a list."""
    rest = iter(passes)
    return all(any(each is other for other in rest) for each in some)
