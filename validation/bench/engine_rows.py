"""One workload on all engines at one precision and number of threads: one row an engine."""

from __future__ import annotations

import copy
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from fxopt.testing import compare as compare_outputs

from ..judging.metrics import cosine
from ..timing import Others, in_random_order, ratio, second_of_two
from .engines import EAGER, Prepare, cast, fresh, quiet, reason, tensors
from .machine import BUSY, cores_of_others, gemm_peak
from .memory import FirstCall
from .workloads import Workload

WARM_UP = 3


@dataclasses.dataclass(frozen=True)
class Row:
    """One engine on one workload. Without a reason why it was left out it ran; numbers that were not measured are NaN.

    `speedup` is the median of the paired ratios of eager's time to its own, with the ends of the 95 % interval, `error_ratio`
    the error to float64 by that of eager float32; `busy_before` the cores that others used in a second of rest before.
    """

    model: str
    precision: str
    threads: int
    engine: str
    reason: str = ""
    rounds: int = 0
    median_ms: float = math.nan
    speedup: float = math.nan
    speedup_low: float = math.nan
    speedup_high: float = math.nan
    gflops: float = math.nan
    gemm_gflops: float = math.nan
    first_call_s: float = math.nan
    resident_mb: float = math.nan
    peak_mb: float = math.nan
    error: float = math.nan
    error_ratio: float = math.nan
    difference: float = math.nan
    cosine: float = math.nan
    idle: bool = True
    busy_before: float = math.nan
    busy_during: float = math.nan


def compare(
    case: tuple[str, str, int],
    workload: Workload,
    engines: Mapping[str, Prepare],
    *,
    rounds: int,
    seconds: float,
    alone: Callable[[str], FirstCall] | None = None,
    say: Callable[[str], object] = print,
) -> list[Row]:
    """Makes every engine ready, then times all of them in rounds; `case` is the model's name, precision and threads.

    `alone` measures the first call of the engine of this name in a process of its own; without it, the first call
    here is timed, and the memory is not known. An engine that fails at anything is left out with its reason.
    """
    model, precision, threads = case
    torch.set_num_threads(threads)
    found = _Found(engines, f"{model}, {precision}, {threads} threads", say)
    if alone:  # before engines hold memory here
        found.take(lambda name: _of_first_call(alone(name)), "first call")
    before = cores_of_others()
    peak, flops, exact = gemm_peak(), workload.flops(), in_float64(workload)
    with torch.no_grad():
        eager = tensors(workload.model(**fresh(workload.inputs)))
    turns: dict[str, Callable[[], float]] = {}

    def ready(name: str) -> dict[str, float]:
        turn, outputs, call = _ready(engines[name], workload, threads)
        agreement = exactness(outputs, eager, exact)
        turns[name] = turn
        return agreement if alone else agreement | _of_first_call(call)

    with torch.no_grad():
        found.take(ready, "first runs")
        say(f"{found.case}, rounds")
        others = Others()
        times = in_random_order(turns, rounds, seconds, np.random.default_rng(0))
        during = others.cores()
    torch._dynamo.reset()  # what it compiled holds the model
    peak, idle = max(peak, gemm_peak()), max(before, during) < BUSY
    for name, measured in times.items():
        values = found.values[name]
        values |= _of_times(measured, times[EAGER], flops, peak)
        own = found.values[EAGER]["error"]
        values["error_ratio"] = values["error"] / own if own else math.nan
    return [
        Row(model, precision, threads, name, idle=idle, busy_before=before, busy_during=during, **values)
        for name, values in found.values.items()
    ]


class _Found:
    """The columns of each engine so far; of one that has failed, the reason and nothing else."""

    def __init__(self, engines: Iterable[str], case: str, say: Callable[[str], object]) -> None:
        self.values: dict[str, dict[str, Any]] = {name: {} for name in engines}
        self.case, self._say = case, say

    def take(self, step: Callable[[str], Mapping[str, Any]], doing: str) -> None:
        """Take a step with each engine that has not failed."""
        for name in [name for name, values in self.values.items() if "reason" not in values]:
            self._say(f"{self.case}, {doing}: {name}")
            try:
                with quiet():
                    self.values[name] |= step(name)
            except Exception as error:  # whatever an engine makes of a model
                if name == EAGER:
                    raise
                self.values[name] = {"reason": reason(error)}


def _ready(
    prepare: Prepare, workload: Workload, threads: int
) -> tuple[Callable[[], float], list[torch.Tensor], FirstCall]:
    """Make an engine ready and warm: its turn, its first outputs, and the time that they took."""
    start = time.perf_counter()
    prepared = prepare(workload.model, workload.inputs, threads)
    outputs = tensors(prepared.run(prepared.feed(workload.inputs)))
    call = FirstCall(time.perf_counter() - start, math.nan, math.nan)
    turn = second_of_two(prepared.run, lambda: prepared.feed(workload.inputs))
    for _ in range(WARM_UP):
        turn()
    return turn, outputs, call


def in_float64(workload: Workload) -> list[torch.Tensor]:
    """The outputs of a copy of the model in float64."""
    with torch.no_grad():
        return tensors(copy.deepcopy(workload.model).double()(**cast(workload.inputs, torch.float64)))


def exactness(
    outputs: list[torch.Tensor], eager: list[torch.Tensor], exact: list[torch.Tensor]
) -> dict[str, float]:
    """The worst output: its error to float64, relative to its largest value, its difference to eager, and its cosine.

    Raises `AssertionError` when they are not of the same number and shapes.
    """
    error = compare_outputs(exact, outputs, dtypes=False).max_rel
    difference = compare_outputs(eager, outputs, dtypes=False).max_abs
    pairs = [(wide.double(), own.double()) for wide, own in zip(exact, outputs, strict=True) if own.numel()]
    similar = [cosine({"": wide}, {"": own}) for wide, own in pairs]
    return {"error": error, "difference": difference, "cosine": min(similar)}


def _of_first_call(call: FirstCall) -> dict[str, float]:
    return {"first_call_s": call.seconds, "resident_mb": call.resident / 1e6, "peak_mb": call.peak / 1e6}


def _of_times(times: list[float], eager: list[float], flops: int, peak: float) -> dict[str, float]:
    """The columns of the times of an engine; `peak` is in operations per second."""
    speedup, median = ratio(eager, times), statistics.median(times)
    return {
        "rounds": len(times),
        "median_ms": 1e3 * median,
        "speedup": speedup.median,
        "speedup_low": speedup.low,
        "speedup_high": speedup.high,
        "gflops": flops / median / 1e9,
        "gemm_gflops": peak / 1e9,
    }
