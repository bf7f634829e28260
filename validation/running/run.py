"""Runs one case to one record: any error of a model or pass becomes a record, unless it ends the process."""

from __future__ import annotations

import dataclasses
import functools
import gc
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from fxopt.errors import TraceError, error_text
from fxopt.rewriting.transformation import Transformation

from .. import checks
from ..judging import repro
from ..judging.repro import portable
from ..judging.subject import TIMING, Subject
from ..records import FAILING, Case, Check, Finding, Outcome, Record, one_line
from ..zoo.entry import Entry, judged
from ..zoo.sources import SOURCE, Architecture

BEFORE_PASSES = ("load", "run the model", "capture")
"""The stages before there is anything to check, for which no pass is to blame."""


@dataclasses.dataclass(eq=False)
class Runner:
    """Runs cases, and keeps the model of the last case for the next one."""

    zoo: Sequence[Entry]  # the entries that cases may name, from a zoo file or a sweep
    passes: Mapping[str, Transformation]  # the passes that pipelines may name, ready to be applied
    # Called with each stage, in case the process dies.
    entered: Callable[[Case, str], None] = lambda case, stage: None
    timing: float = TIMING  # the seconds after which the timing of one model ends

    def __post_init__(self) -> None:
        self._entries = {entry.name: entry for entry in self.zoo}
        self._checks = checks.available()
        self._subject: Subject | None = None
        self._lost: tuple[str, str] | None = None

    def run(self, case: Case) -> Record:
        """Run a case and return its record. Raises only `KeyboardInterrupt`."""
        started, subject = time.perf_counter(), self._subject_of(case)
        entry = subject.entry
        source = {SOURCE: entry.source.rpartition(".")[2]} if isinstance(entry, Architecture) else {}
        subject.measurements, subject.facts = {}, source
        subject.entered = functools.partial(self.entered, case)
        finding = self._finding(case, subject)
        record = Record(
            case=case,
            outcome=finding.outcome,
            stage=subject.stage,
            reason=portable(finding.reason),
            seconds=time.perf_counter() - started,
            dtype=subject.dtype,
            measurements=subject.measurements | finding.measurements,
            refusals=finding.refusals,
            facts={name: portable(text) for name, text in subject.facts.items()},
            repro=_script(case, finding, subject),
        )
        return judged(entry.known_failures, record)

    def _finding(self, case: Case, subject: Subject) -> Finding:
        if self._lost and not (case.check is Check.PEER and self._lost[0] == "capture"):
            stage, reason = self._lost
            subject.enter(stage)
            return Finding(Outcome.SKIP, reason)
        subject.enter("start")
        try:
            finding = self._checks[case.check](subject, case.pipeline)
        except (Exception, SystemExit) as error:  # models and passes may raise anything
            finding = _finding_of(error, subject.stage)
            if not subject.entry.given and subject.stage in BEFORE_PASSES:  # all its cases end there
                self._lost = subject.stage, _text(error)
                finding = _lost(error, finding, subject.stage, case.check)
            subject.forget()
            _collect()
            return finding
        if subject.stage == "start":  # otherwise the check has set its last stage
            subject.enter("compare" if finding.outcome in FAILING else "")
        return finding

    def _subject_of(self, case: Case) -> Subject:
        subject = self._subject
        if subject is None or (subject.entry.name, subject.device) != (case.model, case.device):
            subject = self._subject = self._lost = None  # so that the old subject can be collected
            _collect()
            gc.freeze()  # the rest (imports and caches of torch) grows with each model: no longer collect it
            entry = self._entries[case.model]
            subject = self._subject = Subject(entry, case.device, self.passes, timing=self.timing)
        return subject


def _collect() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _script(case: Case, finding: Finding, subject: Subject) -> str:
    """A script that reproduces a failure without the harness; empty in a sweep, which has hundreds of failures."""
    if finding.outcome not in (Outcome.FAIL, Outcome.ERROR) or not subject.entry.given:
        return ""
    passes = subject.members(case.pipeline)
    limit = subject.most_error(case.pipeline, subject.own)
    return repro.script(case, portable(finding.reason), subject.entry, passes, limit)


def in_worker(
    zoo: Sequence[Entry],
    passes: Mapping[str, Transformation],
    timing: float,
    entered: Callable[[Case, str], None],
) -> Callable[[Case], Record]:
    """Prepare the function that runs the cases in a process of a pool."""
    # Many workers share the machine, and results must not depend on their number; timing sets its own threads.
    torch.set_num_threads(1)
    gc.freeze()  # collecting garbage of models is much faster without the imported objects
    return Runner(zoo, passes, entered, timing).run


def _lost(error: BaseException, finding: Finding, stage: str, check: Check) -> Finding:
    """The finding for a model of a sweep without a graph: a model that does not run proves nothing about fxopt."""
    if stage != "capture" or check is not Check.PARITY:  # only parity reports it
        return Finding(Outcome.SKIP, _text(error))
    return Finding(Outcome.REFUSED, _text(error)) if isinstance(error, TraceError) else finding


def _text(error: BaseException) -> str:
    """A refusal unchanged, any other error with its type, on one line."""
    return one_line(error if isinstance(error, TraceError) else error_text(error))


def _finding_of(error: BaseException, stage: str) -> Finding:
    text = error_text(error)
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return Finding(Outcome.MEMORY, text)
    if isinstance(error, AssertionError) and stage == "compare":
        return Finding(Outcome.FAIL, str(error))
    frame = traceback.extract_tb(error.__traceback__)[-1]
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return Finding(Outcome.ERROR, f"{text}{notes}, at {Path(frame.filename).name}:{frame.lineno}")
