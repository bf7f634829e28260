"""Latency: the times of a model, of its graph, and of what each pipeline makes of it, all in one random interleaving."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping

import numpy as np
import torch

from fxopt.errors import error_text
from fxopt.submodules import sharing_copy

from ..judging.rewritten import differ
from ..judging.subject import Subject
from ..records import NOTHING, Check, Finding, Outcome
from ..regressions.metric import BUSY
from ..timing import Ratio, Times, in_random_order, peak_mb, ratio, seconds_of, synchronise, timing
from ..zoo.plan import checks, pipelines

FEWEST, MOST = 7, 200
"""Rounds of one model continue until each interval is `NARROW`, or the seconds or the maximum of rounds are used up."""

NARROW = 0.02
SHORT = 0.02
"""A run of fewer seconds is timed after an untimed run, which brings its weights back into the caches."""

EAGER, CAPTURED, AGAIN = "eager", "captured", "captured, again"
"""The arms of every model. The last is the A/A arm, a copy of the graph that shares its weights, as rewritten graphs do:
it shows how far two equal arms seem apart.
"""


@dataclasses.dataclass(frozen=True)
class Measured:
    """The measurements of one model: for each arm by name, the seconds of each round, memory and failures."""

    times: Times
    memory: Mapping[str, float]  # the peak of the tensors that a run allocates, in MB
    failed: Mapping[str, tuple[str, str]]  # the stage in which an arm failed, and the error
    busy: float = 0.0  # the number of cores that other processes used during the rounds

    def beside(self, arm: str, other: str) -> Ratio:
        """The ratio of the times of an arm and another arm in the same round."""
        return ratio(self.times[arm], self.times[other])


def check(subject: Subject, pipeline: tuple[str, ...]) -> Finding:
    """Compare the times of a pipeline with those of the graph and the model; without a pipeline, the graph with the model.

    The first case of a model times all arms, so that all arms are in the same rounds.
    """
    measured: Measured = subject.timed or measure(subject)
    subject.timed = measured
    arm = "+".join(pipeline) or CAPTURED
    if arm in measured.failed:
        stage, error = measured.failed[arm]
        subject.enter(stage)
        return Finding(Outcome.ERROR, error)
    if arm not in measured.times:
        return NOTHING
    baseline = CAPTURED if pipeline else EAGER
    found, same = measured.beside(arm, baseline), measured.beside(AGAIN, CAPTURED)
    values = {
        "latency_transformed_ms": 1e3 * float(np.median(measured.times[arm])),
        "latency_baseline_ms": 1e3 * float(np.median(measured.times[baseline])),
        "latency_ratio": found.median,
        "latency_ratio_low": found.low,
        "latency_ratio_high": found.high,
        "latency_ratio_eager": measured.beside(arm, EAGER).median,
        "latency_ratio_floor": max(abs(same.low - 1), abs(same.high - 1)),
        "latency_pairs": len(measured.times[arm]),
        BUSY: 100 * measured.busy,
        "memory_peak_mb": measured.memory[arm],
    }
    return Finding(measurements=values)


def narrow(times: Times) -> bool:
    """True if the interval of the ratio of each arm to the graph is narrow enough."""
    return all(ratio(seconds, times[CAPTURED]).width < NARROW for seconds in times.values())


def measure(subject: Subject) -> Measured:
    """Prepare every arm of a model, and time the arms in turn; an arm that fails is left out with its error."""
    wait = synchronise(subject.device)
    runs: dict[str, Callable[[], object]] = {}
    memory: dict[str, float] = {}
    failed: dict[str, tuple[str, str]] = {}
    with timing() as others:
        for arm, make in _arms(subject).items():
            stage = subject.stage
            try:
                subject.enter("prepare")
                run = make()  # with gradients: some models are trained in construction
                if run is not None:
                    subject.enter("run the model" if arm == EAGER else f"time {arm}")
                    with torch.no_grad():
                        run()
                        runs[arm], memory[arm] = run, peak_mb(run, subject.device)
            except Exception as error:  # a pass may raise anything
                if arm in (EAGER, CAPTURED, AGAIN) or isinstance(error, MemoryError | torch.OutOfMemoryError):
                    raise
                failed[arm] = subject.stage.replace(f"transform {arm}", "transform"), error_text(error)
            subject.enter(stage)
        with subject.entering("time"), torch.no_grad():
            turns = {arm: _turn(run, wait) for arm, run in runs.items()}
            others.begin()
            times = in_random_order(
                turns, FEWEST, subject.timing, np.random.default_rng(0), enough=narrow, most=MOST
            )
        return Measured(times, memory, failed, others.cores())


def _arms(subject: Subject) -> dict[str, Callable[[], Callable[[], object] | None]]:
    """The functions that prepare each arm; they return None if the pipeline finds nothing to rewrite."""
    dtype = subject.own
    inputs = subject.inputs(dtype)

    def of(module: torch.nn.Module) -> Callable[[], object]:
        return lambda: module(**inputs)

    def rewritten(pipeline: tuple[str, ...]) -> Callable[[], object] | None:
        module = sharing_copy(subject.traced(dtype))
        for pass_ in subject.members(pipeline):
            subject.enter(f"transform {'+'.join(pipeline)}")
            module = pass_(module)
        return of(module) if differ(subject.traced(dtype), module) else None

    timed = [
        pipeline
        for pipeline in pipelines(subject.entry, subject.passes)
        if Check.LATENCY in checks(subject.entry, pipeline, subject.passes)
    ]
    return {
        EAGER: lambda: of(subject.model(dtype)),
        CAPTURED: lambda: of(subject.traced(dtype)),
        AGAIN: lambda: of(sharing_copy(subject.traced(dtype))),
        **{"+".join(pipeline): functools.partial(rewritten, pipeline) for pipeline in timed},
    }


def _turn(run: Callable[[], object], wait: Callable[[], object]) -> Callable[[], float]:
    short = seconds_of(run, wait) < SHORT

    def turn() -> float:
        if short:
            run()
        return seconds_of(run, wait)

    return turn
