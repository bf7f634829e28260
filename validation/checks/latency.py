"""Latency: a model, its graph, what each pipeline makes of it and other engines, all in one random interleaving."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping

import numpy as np
import torch

from fxopt.submodules import sharing_copy

from ..bench import engines
from ..bench.engines import Unavailable, quiet, reason
from ..judging import steps
from ..judging.rewritten import differ
from ..judging.subject import TIMING, Subject
from ..records import Check, Finding, Outcome
from ..regressions.metric import BUSY
from ..timing import (
    Others,
    Ratio,
    Times,
    floor_of,
    in_random_order,
    peak_mb,
    ratio,
    seconds_of,
    synchronise,
    timing_threads,
)
from ..zoo.plan import checks, members, pipelines

FEWEST, MOST = 7, 200
"""Rounds of one model go on until each interval is `NARROW`, or its seconds or the most rounds are spent."""

NARROW = 0.02
SHORT = 0.02
"""A run of fewer seconds is timed after one that is not: that brings its weights back into the caches."""

EAGER, CAPTURED, AGAIN = "eager", "captured", "captured, again"
"""The arms that every model has. The last is a copy of the graph that shares its weights, as rewritten graphs do: the A/A
arm, which shows by how much two arms seem apart that are the same.
"""
ENGINES = {"torch.compile": "compiled", "onnxruntime": "onnxruntime"}
"""Other engines, and the functions of `bench.engines` that make a model ready for them."""

EFFECTS = {-1: "faster", 0: "none above the A/A floor", 1: "slower"}


@dataclasses.dataclass(frozen=True)
class Measured:
    """The times of the arms of one model: by the name of the arm the seconds of each round, and what else there is of it."""

    times: Times
    threads: int  # of each run
    memory: Mapping[str, float]  # the peak of the tensors that a run allocates, in MB
    failed: Mapping[str, tuple[str, str]]  # the stage in which an arm failed, and the error
    seconds: float = TIMING  # after which the rounds ended
    busy: float = 0.0  # the cores that other processes used meanwhile

    @functools.cached_property
    def floor(self) -> float:
        """The least effect that can be told."""
        return floor_of(ratio(self.times[AGAIN], self.times[CAPTURED]))

    def beside(self, arm: str, other: str) -> Ratio:
        """The time of an arm by that of another one in the same round."""
        return ratio(self.times[arm], self.times[other])

    @functools.cached_property
    def stopped(self) -> str:
        """Why there were no more rounds."""
        if narrow(self.times):
            return f"intervals below {NARROW:.0%}"
        return f"budget spent: {self.seconds:g} s, or {MOST} rounds"


def check(subject: Subject, pipeline: tuple[str, ...]) -> Finding:
    """The times of the arm of a pipeline beside the graph and the model; without a pipeline, of the graph beside the model.

    All arms of a model are timed for its first case, so that each is in the same rounds as all others.
    """
    measured: Measured = subject.timed or measure(subject)
    subject.timed = measured
    arm = "+".join(pipeline) or CAPTURED
    if arm in measured.failed:
        stage, error = measured.failed[arm]
        subject.enter(stage)
        return Finding(Outcome.ERROR, error)
    if arm not in measured.times:
        return Finding(Outcome.NO_OP, "nothing to rewrite")
    baseline = CAPTURED if pipeline else EAGER
    found = measured.beside(arm, baseline)
    subject.facts |= {
        "latency_effect": EFFECTS[found.effect(measured.floor)],
        "latency_stopped": measured.stopped,
    }
    values = {
        "latency_transformed_ms": 1e3 * float(np.median(measured.times[arm])),
        "latency_transformed_p90_ms": 1e3 * float(np.quantile(measured.times[arm], 0.9)),
        "latency_baseline_ms": 1e3 * float(np.median(measured.times[baseline])),
        "latency_baseline_p90_ms": 1e3 * float(np.quantile(measured.times[baseline], 0.9)),
        "latency_eager_ms": 1e3 * float(np.median(measured.times[EAGER])),
        **_interval("latency_ratio", found),
        **_interval("latency_ratio_eager", measured.beside(arm, EAGER)),
        "latency_ratio_floor": measured.floor,
        "latency_pairs": len(measured.times[arm]),
        "timing_threads": measured.threads,
        BUSY.name: 100 * measured.busy,
        "memory_peak_mb": measured.memory[arm],
    }
    steps.note_latency(subject, pipeline, measured.threads)
    return Finding(measurements=values if pipeline else values | _engines(subject, measured))


def narrow(times: Times) -> bool:
    """True if the interval of each arm beside the graph is narrow enough."""
    return all(ratio(seconds, times[CAPTURED]).width < NARROW for seconds in times.values())


def measure(subject: Subject) -> Measured:
    """Make every arm of a model ready, and time them turn by turn; an arm that fails is left out with its error."""
    threads, before = timing_threads(), torch.get_num_threads()
    torch.set_num_threads(threads)
    wait = synchronise(subject.device)
    runs: dict[str, Callable[[], object]] = {}
    memory: dict[str, float] = {}
    failed: dict[str, tuple[str, str]] = {}
    try:
        for arm, make in _arms(subject, threads).items():
            stage = subject.stage
            try:
                subject.enter("prepare")
                run = make()  # with gradients: some models are trained when they are made
                if run is not None:
                    subject.enter(f"time {arm}")
                    with torch.no_grad():
                        run()
                        runs[arm], memory[arm] = run, peak_mb(run, subject.device)
            except Exception as error:  # whatever a pass or an engine makes of a model
                if arm in (EAGER, CAPTURED, AGAIN) or isinstance(error, MemoryError | torch.OutOfMemoryError):
                    raise
                failed[arm] = subject.stage, reason(error)
            subject.enter(stage)
        with subject.entering("time"), torch.no_grad():
            turns = {arm: _turn(run, wait) for arm, run in runs.items()}
            others = Others()
            times = in_random_order(
                turns, FEWEST, subject.timing, np.random.default_rng(0), enough=narrow, most=MOST
            )
    finally:
        torch.set_num_threads(before)
    return Measured(times, threads, memory, failed, subject.timing, others.cores())


def _arms(subject: Subject, threads: int) -> dict[str, Callable[[], Callable[[], object] | None]]:
    """The functions that make the run of each arm; one gives `None` where its pipeline finds nothing to rewrite."""
    dtype = subject.dtypes[0]
    inputs = subject.inputs(dtype)

    def of(module: torch.nn.Module) -> Callable[[], object]:
        return lambda: module(**inputs)

    def rewritten(pipeline: tuple[str, ...]) -> Callable[[], object] | None:
        module = sharing_copy(subject.traced(dtype))
        for name in members(subject.entry, pipeline, subject.passes):
            subject.enter("transform")
            module = subject.passes[name](module)
        return of(module) if differ(subject.traced(dtype), module) else None

    def engine(name: str) -> Callable[[], object]:
        if subject.device != "cpu":
            raise Unavailable("it runs on the CPU alone here")
        with quiet(), torch.no_grad():
            prepared = getattr(engines, ENGINES[name])(subject.model(dtype), inputs, threads)
        feed = prepared.feed(inputs)
        return lambda: prepared.run(feed)

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
        **{name: functools.partial(engine, name) for name in subject.entry.engines},
    }


def _turn(run: Callable[[], object], wait: Callable[[], object]) -> Callable[[], float]:
    short = seconds_of(run, wait) < SHORT

    def turn() -> float:
        if short:
            run()
        return seconds_of(run, wait)

    return turn


def _interval(name: str, found: Ratio) -> dict[str, float]:
    return {name: found.median, f"{name}_low": found.low, f"{name}_high": found.high}


def _engines(subject: Subject, measured: Measured) -> dict[str, float]:
    """The times of the other engines beside the model; one that is left out becomes a fact, with the reason."""
    left_out = [f"{name}: {measured.failed[name][1]}" for name in ENGINES if name in measured.failed]
    if left_out:
        subject.facts["engines_left_out"] = "; ".join(left_out)
    values: dict[str, float] = {}
    for name in ENGINES:
        if name in measured.times:
            column = name.replace(".", "_")
            values[f"latency_{column}_ms"] = 1e3 * float(np.median(measured.times[name]))
            values |= _interval(f"latency_ratio_{column}", measured.beside(name, EAGER))
    return values
