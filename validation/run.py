"""One case to one record: whatever a model or a pass does short of ending the process is a row, not an error."""

from __future__ import annotations

import gc
import re
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from fxopt.rewriting.transformation import Transformation
from validation import checks
from validation.records import FAILING, Case, Finding, Outcome, Record
from validation.subject import Staged, Subject
from validation.sweep import Architecture
from validation.zoo import Entry, why_missing

ROOT = Path(__file__).resolve().parent.parent


class Runner:
    """Runs cases, and keeps the model of the last one for the next.

    Args:
        zoo: the entries that cases may name: of a zoo file, or of a sweep.
        passes: the passes that pipelines may name, ready to be applied.
        entered: is told each stage that a case enters, so that it is known even when the process dies.
    """

    def __init__(
        self,
        zoo: Sequence[Entry | Architecture],
        passes: Mapping[str, Transformation],
        entered: Callable[[Case, str], None] = lambda case, stage: None,
    ) -> None:
        self._zoo = {entry.name: entry for entry in zoo}
        self._passes = passes
        self._checks = checks.available()
        self._entered = entered
        self._subject: Subject | Staged[Architecture] | None = None
        self._case: Case | None = None
        self._started = 0.0

    def run(self, case: Case) -> Record:
        """What came of `case`. Raises only what is no `Exception`: a time-out, an interrupt."""
        self._case, self._started = case, time.perf_counter()
        subject = self._subject_of(case)
        subject.measurements, subject.facts = {}, {}
        if missing := _missing_package(subject.entry):
            subject.enter("load")
            return self._record(Finding(Outcome.SKIP, missing), subject)
        subject.enter("start")
        try:
            finding = self._checks[case.check](subject, case.pipeline)
        except Exception as error:  # the boundary: models and passes under test may raise anything
            finding = _finding_of(error, subject.stage)
            self.forget()
        else:
            if subject.stage == "start":  # else the check has named the stage that it ended in
                subject.enter("compare" if finding.outcome in FAILING else "")
        return self._record(finding, subject)

    def interrupted(self, case: Case, outcome: Outcome, reason: str) -> Record:
        """The record of a case that `run` was thrown out of, for example by a time-out."""
        subject = self._subject_of(case)
        self.forget()
        return self._record(Finding(outcome, reason), subject)

    def forget(self) -> None:
        """Lets go of the model: after a failure it may be half made, and its memory is needed."""
        self._subject = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _subject_of(self, case: Case) -> Subject | Staged[Architecture]:
        if self._subject is None or (self._subject.entry.name, self._subject.device) != (
            case.model,
            case.device,
        ):
            self.forget()
            gc.freeze()  # what is left, imports and caches of torch, grows with each model: collect it no more
            entry = self._zoo[case.model]
            if isinstance(entry, Architecture):
                self._subject = Staged(entry, case.device, self._passes, self._enter)
            else:
                self._subject = Subject(entry, case.device, self._passes, self._enter)
        return self._subject

    def _enter(self, stage: str) -> None:
        assert self._case is not None
        self._entered(self._case, stage)

    def _record(self, finding: Finding, subject: Subject | Staged[Architecture]) -> Record:
        assert self._case is not None
        failures = subject.entry.known_failures if isinstance(subject.entry, Entry) else ()
        known = [failure for failure in failures if failure.covers(self._case)]
        if known and finding.outcome is not Outcome.SKIP:
            finding = _with_expectation(finding, known[0].reason)
        return Record(
            case=self._case,
            outcome=finding.outcome,
            stage=subject.stage,
            reason=_portable(finding.reason),
            seconds=time.perf_counter() - self._started,
            dtype=subject.dtype,
            measurements=subject.measurements | finding.measurements,
            refusals=finding.refusals,
            facts={name: _portable(text) for name, text in subject.facts.items()},
        )


def _missing_package(entry: Entry | Architecture) -> str:
    return why_missing(entry.requires) if isinstance(entry, Entry) and entry.requires else ""


def _portable(text: str) -> str:
    """The text with the paths of files as they are on every machine: below the package index, or the checkout."""
    return re.sub(rf"(/[^\s:'\"]+)?/site-packages/|{re.escape(str(ROOT))}/", "", text)


def _with_expectation(finding: Finding, reason: str) -> Finding:
    if finding.outcome in FAILING:
        text = f"{reason} ({finding.outcome}: {finding.reason})"
        return Finding(Outcome.EXPECTED, text, finding.measurements, finding.refusals)
    text = f"model_zoo.yaml expects a failure ({reason}), but there was none: take it out of known_failures"
    return Finding(Outcome.FAIL, text, finding.measurements, finding.refusals)


def _finding_of(error: Exception, stage: str) -> Finding:
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return Finding(Outcome.MEMORY, text)
    if isinstance(error, AssertionError) and stage == "compare":
        return Finding(Outcome.FAIL, str(error))
    frame = traceback.extract_tb(error.__traceback__)[-1]
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return Finding(Outcome.ERROR, f"{text}{notes}, at {Path(frame.filename).name}:{frame.lineno}")
