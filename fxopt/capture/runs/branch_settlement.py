"""Explores data-dependent branches: takes the side that does not raise, merges sides with equal graphs, else joins both sides."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from fxopt.capture.data_dependence.branches import (
    ALWAYS,
    MOST_ROUNDS,
    NEVER,
    DataDependentBranch,
    DataDependentLoop,
    DataDependentWhile,
    LoopPositionError,
    NumberBranch,
    Outcome,
    Outcomes,
)
from fxopt.capture.data_dependence.operator_checks import is_model_error
from fxopt.capture.runs.both_sides import join
from fxopt.capture.runs.equivalence import equivalent
from fxopt.capture.runs.if_conversion import if_convert
from fxopt.capture.runs.run_result import RunResult, UnprovedError
from fxopt.errors import TraceError

# A branch that is settled by trying both sides costs two runs.
_MOST_SETTLED = 50
# Lines whose outcomes make no difference cost a run for each combination of outcomes.
_MOST_LINES = 3
# A graph with both sides of branches costs a run for each combination of outcomes: the most runs, and the most nodes in all.
_MOST_JOINED, _MOST_NODES = 32, 12_000


def explore_branches(capture: Callable[[Outcomes], RunResult], like: Outcomes | None = None) -> RunResult:
    """Run the forward until no data-dependent branch is open; raise TraceError if one cannot be settled.

    A branch is open if its outcome is not in the script. `capture(script)` runs the forward, and raises DataDependentBranch at
    the first open branch. `like` is the script of another run: branches are settled as there, so that its graph may fit here.
    """
    if like is not None and like.both is not None:
        return _BothSides(capture, like.both).settled(Outcomes(both=like.both))
    try:
        return _without_branches(capture, like)
    except TraceError as refused:
        if like is not None or not isinstance(refused, DataDependentBranch):
            raise
        known: dict[tuple[bool, ...], Outcome | None] = {}
        try:
            return _BothSides(capture, known).settled(Outcomes(both=known))
        except TraceError:
            raise refused from None


class KeptRuns:
    """A cache of runs and errors by script, because each way of settling branches repeats scripts of the previous one.

    Args:
        capture: runs the forward with a script.
    """

    def __init__(self, capture: Callable[[Outcomes], RunResult]) -> None:
        self._capture = capture
        self._found: dict[Any, tuple[RunResult | TraceError, list[bool]]] = {}

    def clear(self) -> None:
        """Forget all runs, because the request has changed."""
        self._found.clear()

    def __call__(self, script: Outcomes) -> RunResult:
        """Return the run with a script, or raise its TraceError."""
        settled = tuple((outcome.answer, outcome.otherwise) for outcome in script.settled)
        key = settled, tuple(script.at_lines.items()), tuple(script.ends.items())
        if key not in self._found:
            try:
                found: RunResult | TraceError = self._capture(script)
            except TraceError as error:
                found = error
            self._found[key] = found, [outcome.asked for outcome in script.settled]
        found, asked = self._found[key]
        for outcome, each in zip(script.settled, asked, strict=True):
            outcome.asked = each
        if isinstance(found, TraceError):
            raise found
        return dataclasses.replace(found, request=dataclasses.replace(found.request, answers=script))


def _without_branches(capture: Callable[[Outcomes], RunResult], like: Outcomes | None) -> RunResult:
    """Return a run whose graph is valid for all outcomes, or checks for the outcome that does not raise."""
    path = _open_path(capture, like)
    variants = _Variants(capture, path)
    try:
        return _of_any_outcome(variants) or _of_most(variants, alternating=like is None)
    except UnprovedError as error:
        raise (path.pending.because(str(error)) if path.pending else error) from None
    except TraceError as error:
        raise (path.pending or error) from None


@dataclasses.dataclass(frozen=True)
class _Path:
    """A script that completes the forward, its run, and the first branch not yet proved to make no difference."""

    script: Outcomes
    run: RunResult
    pending: DataDependentBranch | None


def _open_path(capture: Callable[[Outcomes], RunResult], like: Outcomes | None) -> _Path:
    """Find a script: at each branch the side that does not raise; if neither side raises, the body always runs."""
    script, pending = Outcomes(dict.fromkeys(like.at_lines if like else (), ALWAYS)), None
    most_settled = _MOST_SETTLED if like is None else len(like.settled)
    branch: DataDependentBranch | None = None
    asked = collections.Counter[str]()
    while True:
        if branch is None:
            try:
                return _Path(script, capture(script), pending)
            except DataDependentBranch as met:
                branch = met
            except LoopPositionError as failure:
                script = script.with_end(failure)
                continue
            except TraceError:
                if pending is None:
                    raise
                raise pending from None
        asked[branch.line] += isinstance(branch, DataDependentWhile)
        endless = asked[branch.line] > MOST_ROUNDS
        if (
            endless
            or branch.kind is not bool
            or branch.line in script.at_lines
            or len(script.settled) == most_settled
        ):
            raise branch
        no, yes = _sides(capture, script, branch)
        if (yes.error is None) != (no.error is None):
            taken, left = (yes, no) if yes.error is None else (no, yes)
            script = script.and_then(Outcome(taken is yes, left.error or ""))
            if taken.made is not None and (taken is yes or not left.error):  # its check has the error text
                return _Path(script, taken.made, pending)
            branch = taken.branch  # a run with this script would stop at this branch
        elif like is None and len(script.at_lines) < _MOST_LINES:
            pending = pending or branch
            script = script.with_line(branch.line, ALWAYS)
            branch = None
        else:
            raise branch


class _Variants:
    """Runs that differ only in the outcomes at the lines of a script."""

    def __init__(self, capture: Callable[[Outcomes], RunResult], path: _Path) -> None:
        self._capture = capture
        self._script = path.script
        self.lines = list(path.script.at_lines)
        self._runs = {tuple(path.script.at_lines.values()): path.run}

    def run(self, outcomes: Sequence[tuple[bool, bool]]) -> RunResult:
        """Return a run with these outcomes; at a line where the run met no branch, the outcome may differ."""
        key = tuple(outcomes)
        for given, run in self._runs.items():
            pairs = zip(self.lines, given, key, strict=True)
            if all(was == wanted or not run.branches.get(line) for line, was, wanted in pairs):
                return run
        at_lines = dict(zip(self.lines, key, strict=True))
        self._runs[key] = self._capture(dataclasses.replace(self._script, at_lines=at_lines))
        return self._runs[key]


def _of_any_outcome(variants: _Variants) -> RunResult | None:
    """Return a run whose graph is valid for every combination of outcomes at the lines; None if there is none."""
    runs = [
        variants.run(outcomes) for outcomes in itertools.product((ALWAYS, NEVER), repeat=len(variants.lines))
    ]
    for candidate in runs:
        if all(candidate is other or equivalent(candidate, other) for other in runs):
            return candidate
    return None


def _of_most(variants: _Variants, alternating: bool) -> RunResult:
    """Return the run with the larger body at each line, if skipping these bodies makes no difference; else UnprovedError.

    With `alternating`, a run that skips every other body must agree too, because one body may lead to another.
    """
    run, lines = variants.run, variants.lines
    most = [ALWAYS] * len(lines)

    def replaced(outcomes: Sequence[tuple[bool, bool]], position: int, given: tuple[bool, bool]) -> RunResult:
        return run([*outcomes[:position], given, *outcomes[position + 1 :]])

    for position, line in reversed(list(enumerate(lines))):
        try:
            if_convert(run(most), replaced(most, position, NEVER), line)
        except UnprovedError:
            most[position] = NEVER
    made = run(most)
    for position, line in enumerate(lines):
        always = most[position][0]
        fewer, every_other = (not always, not always), (not always, always)
        # For all combinations of outcomes at the other lines.
        others = [(ALWAYS, NEVER) if other != position else (most[position],) for other in range(len(lines))]
        pairs = [
            (made if list(outcomes) == most else run(outcomes), replaced(outcomes, position, fewer))
            for outcomes in itertools.product(*others)
        ]
        if alternating:
            pairs.append((made, replaced(most, position, every_other)))
        for more, less in pairs:
            try:
                shown = if_convert(more, less, line)
            except UnprovedError as error:
                raise UnprovedError(f"{error}: {line}") from None
            made = shown if more is made else made
    return made


@dataclasses.dataclass(frozen=True)
class _Side:
    """The result of one outcome of a branch: an `error`, the next `branch`, or a complete run in `made`.

    The error is the text of the model's own error, or "" if this side cannot be captured.
    """

    error: str | None = None
    branch: DataDependentBranch | None = None
    made: RunResult | None = None


def _sides(
    capture: Callable[[Outcomes], RunResult], script: Outcomes, branch: DataDependentBranch
) -> tuple[_Side, _Side]:
    """Try the outcomes False and True of a branch; a loop is not tried, because its body may always run."""
    if isinstance(branch, DataDependentLoop):
        return _Side(), _Side()
    no = _side(capture, script, branch, Outcome(False))
    return no, _side(capture, script, branch, Outcome(True, no.error or ""))


def _side(
    capture: Callable[[Outcomes], RunResult], script: Outcomes, branch: DataDependentBranch, last: Outcome
) -> _Side:
    """Try `last`, an outcome of `branch`, after the outcomes of the script."""
    try:
        return _Side(made=capture(script.and_then(last)))
    except DataDependentBranch as following:
        return _Side(branch=following)
    except TraceError as failure:
        if (error := _model_error(failure, last)) is not None:
            return _Side(error)
        if last.asked and isinstance(branch, NumberBranch):
            return _Side("")  # a check excludes this side
    return _Side()


def _model_error(failure: TraceError, last: Outcome) -> str | None:
    """Return the text of the model's own error after the outcome `last`; None for another error, or an earlier one."""
    error = failure.__cause__
    of_model = error is not None and last.asked and is_model_error(error)
    return f"{type(error).__name__}: {error}" if of_model else None


class _BothSides:
    """Makes a run for each outcome of each branch, and joins the runs into one graph."""

    def __init__(
        self,
        capture: Callable[[Outcomes], RunResult],
        known: dict[tuple[bool, ...], Outcome | None],
    ) -> None:
        self._capture = capture
        # By sequence of outcomes, the only outcome of the next branch that does not raise; None if neither raises.
        self._known = known
        self._left = _MOST_JOINED

    def settled(self, script: Outcomes) -> RunResult:
        """Return one graph for all that follows the outcomes of a script. Use it once: `join` writes into its graphs."""
        before = tuple(outcome.answer for outcome in script.settled)
        if before not in self._known:
            self._left -= 1
            if self._left < 0:
                raise UnprovedError("the forward has too many branches")
            try:
                made = self._capture(script)
                self._left = min(self._left, _MOST_NODES // len(made.graph.nodes))
                return made
            except DataDependentBranch as branch:
                endless = isinstance(branch, DataDependentWhile) and len(before) > MOST_ROUNDS
                if endless or branch.kind is not bool or isinstance(branch, DataDependentLoop):
                    raise
            no = self._side(script, Outcome(False))
            yes = self._side(script, Outcome(True, no if isinstance(no, str) else ""))
            if isinstance(yes, RunResult):
                self._known[before] = None if isinstance(no, RunResult) else Outcome(True, no)
                return join(yes, no) if isinstance(no, RunResult) else yes
            self._known[before] = Outcome(False, yes)
        only = self._known[before]
        if only is not None:
            return self.settled(script.and_then(dataclasses.replace(only)))
        yes, no = (self.settled(script.and_then(Outcome(answer))) for answer in (True, False))
        return join(yes, no)

    def _side(self, script: Outcomes, last: Outcome) -> RunResult | str:
        """Return the graph of one side of a branch, or the error that the model raises there."""
        try:
            return self.settled(script.and_then(last))
        except TraceError as failure:
            if (error := _model_error(failure, last)) is None:
                raise
            return error
