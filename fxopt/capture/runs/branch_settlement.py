"""Explores data-dependent branches: takes the side that does not raise, merges sides with equal graphs, else refuses."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from fxopt.capture.data_dependence.branches import (
    ALWAYS,
    NEVER,
    DataDependentBranch,
    DataDependentLoop,
    Outcome,
    Outcomes,
    PlaceError,
)
from fxopt.capture.data_dependence.operator_checks import is_model_error
from fxopt.capture.runs.run_result import RunResult, Unproved
from fxopt.errors import TraceError

# Each question that is settled by looking at both sides costs two captures.
_MOST_QUESTIONS = 50
# Lines whose answers make no difference cost a capture for each combination of answers.
_MOST_LINES = 3


def explore_branches(
    capture: Callable[[Outcomes], RunResult],
    agree: Callable[[RunResult, RunResult], bool],
    leave_out: Callable[[RunResult, RunResult, str], RunResult | Unproved],
    like: Outcomes | None = None,
) -> RunResult:
    """What `capture` returns, with each question settled of which one side raises or that makes no difference.

    `capture(answers)` raises DataDependentBranch at the first question that `answers` do not answer. `agree(one, other)` says
    whether the graph of one capture holds where another capture was made with other answers; `leave_out(one, other, line)`
    gives it with checks that what the other one leaves out, after questions at a line, writes nothing, if that can be shown.
    `like` are the answers of another capture, for a graph that is to hold here as well. It has checks of those answers and
    no others: at its lines nothing is asked, and a question beyond those that it settled is raised.
    """
    answers, pending = Outcomes(dict.fromkeys(like.at_lines if like else (), ALWAYS)), None
    most_questions = _MOST_QUESTIONS if like is None else len(like.settled)
    question: DataDependentBranch | None = None
    while True:
        if question is None:
            try:
                made = capture(answers)
                break
            except DataDependentBranch as asked:
                question = asked
            except PlaceError as failure:
                answers = answers.with_end(failure)
                continue
            except TraceError:
                if pending is None:
                    raise
                raise pending from None
        known = question.line in answers.at_lines
        if question.kind is not bool or known or len(answers.settled) == most_questions:
            raise question
        no, yes = _Side(), _Side()
        if not isinstance(question, DataDependentLoop):
            no = _side(capture, answers, Outcome(False))
            yes = _side(capture, answers, Outcome(True, no.error or ""))
        if (yes.error is None) != (no.error is None):
            last = Outcome(False, yes.error) if yes.error else Outcome(True, no.error or "")
            answers = answers.and_then(last)
            question = no.question if yes.error else yes.question  # a capture with these answers would ask it
            if yes.made is not None:
                made = yes.made
                break
        elif like is None and len(answers.at_lines) < _MOST_LINES:
            pending = pending or question
            answers = answers.with_line(question.line, ALWAYS)
            question = None
        else:
            raise question
    variants = {tuple(answers.at_lines.values()): made}

    def variant(of_lines: Sequence[tuple[bool, bool]]) -> RunResult:
        """The run with these answers at the lines, or one that has another answer only where it asks nothing."""
        key = tuple(of_lines)
        for given, run in variants.items():
            pairs = zip(answers.at_lines, given, key, strict=True)
            if all(was == wanted or not run.branches.get(line) for line, was, wanted in pairs):
                return run
        at_lines = dict(zip(answers.at_lines, key, strict=True))
        variants[key] = capture(dataclasses.replace(answers, at_lines=at_lines))
        return variants[key]

    try:
        lines = list(answers.at_lines)
        of_any = _of_any_answers(variant, agree, lines)
        return of_any or _of_most(variant, leave_out, lines, alternating=like is None)
    except NotSettledError as error:
        raise (pending.because(str(error)) if pending else error) from None
    except TraceError as error:
        raise (pending or error) from None


def _of_any_answers(
    capture: Callable[[Sequence[tuple[bool, bool]]], RunResult],
    agree: Callable[[RunResult, RunResult], bool],
    lines: Sequence[str],
) -> RunResult | None:
    """One of the captures with all combinations of answers at the lines, whose graph holds for all of them, if any does."""
    variants = [capture(answers) for answers in itertools.product((ALWAYS, NEVER), repeat=len(lines))]
    for candidate in variants:
        if all(candidate is other or agree(candidate, other) for other in variants):
            return candidate
    return None


class NotSettledError(TraceError):
    """It could not be shown that a branch makes no difference."""


def _of_most(
    capture: Callable[[Sequence[tuple[bool, bool]]], RunResult],
    leave_out: Callable[[RunResult, RunResult, str], RunResult | Unproved],
    lines: Sequence[str],
    alternating: bool,
) -> RunResult:
    """The capture that does most after the questions at each line, if leaving that out makes no difference.

    Raises NotSettledError where it does. With `alternating`, a capture that does it every other time must agree, too, as
    one part may lead to another. At sizes of 1 that need not be shown again: the variables of Python are the same.
    """
    most = [ALWAYS] * len(lines)

    def replaced(answers: Sequence[tuple[bool, bool]], position: int, given: tuple[bool, bool]) -> RunResult:
        return capture([*answers[:position], given, *answers[position + 1 :]])

    for position, line in reversed(list(enumerate(lines))):
        if isinstance(leave_out(capture(most), replaced(most, position, NEVER), line), Unproved):
            most[position] = NEVER
    made = capture(most)
    for position, line in enumerate(lines):
        always = most[position][0]
        fewer, every_other = (not always, not always), (not always, always)
        # Whatever the answers at the other lines are.
        others = [(ALWAYS, NEVER) if other != position else (most[position],) for other in range(len(lines))]
        pairs = [
            (made if list(answers) == most else capture(answers), replaced(answers, position, fewer))
            for answers in itertools.product(*others)
        ]
        if alternating:
            pairs.append((made, replaced(most, position, every_other)))
        for more, less in pairs:
            shown = leave_out(more, less, line)
            if isinstance(shown, Unproved):
                raise NotSettledError(f"{shown.reason}: {line}")
            if more is made:
                made = shown
    return made


@dataclasses.dataclass(frozen=True)
class _Side:
    """Where an answer leads: to an error of the model's own before anything else is asked, to the next question, or through."""

    error: str | None = None
    question: DataDependentBranch | None = None
    made: Any = None


def _side(capture: Callable[[Outcomes], Any], answers: Outcomes, last: Outcome) -> _Side:
    """Where `last`, the answer to the question after `answers`, leads."""
    try:
        return _Side(made=capture(answers.and_then(last)))
    except DataDependentBranch as question:
        return _Side(question=question)
    except TraceError as failure:
        error = failure.__cause__
        if error is not None and last.asked and is_model_error(error):
            return _Side(f"{type(error).__name__}: {error}")
    return _Side()
