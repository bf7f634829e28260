"""One workload on all engines at one precision and number of threads: one row an engine."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from validation.bench.engines import EAGER, Prepare, Prepared
from validation.bench.exactness import Exactness, exactness, in_float64
from validation.bench.isolated import FirstCall, reason
from validation.bench.machine import BUSY, Others, cores_of_others, gemm_peak
from validation.bench.nested import tensors
from validation.bench.quiet import quiet
from validation.bench.rounds import in_random_order, speedup
from validation.bench.workloads import Workload

WARM_UP = 3


@dataclasses.dataclass(frozen=True)
class Row:
    """One engine on one workload. Without a reason it ran; numbers that were not measured are NaN.

    Attributes:
        reason: Why the engine was left out; empty where it ran.
        speedup: Median of the paired ratios of eager's time to its own, with the ends of the 95 % interval.
        error_ratio: The error relative to float64, divided by that of eager float32.
        busy_before: Cores that other processes used in a second of rest before, and (`busy_during`) in the rounds.
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
    torch.set_num_threads(case[2])
    before, rng = cores_of_others(), np.random.default_rng(0)
    found: dict[str, dict[str, Any]] = {}
    turns: dict[str, Callable[[], float]] = {}
    exact = in_float64(workload)
    outputs: list[torch.Tensor] = []
    peak, flops = gemm_peak(), workload.flops()
    with torch.no_grad():
        for name, prepare in engines.items():
            say(f"{' '.join(map(str, case))}: {name}")
            try:
                with quiet():
                    call = alone(name) if alone else None
                    start = time.perf_counter()
                    prepared = prepare(workload.model, workload.inputs, case[2])
                    given = tensors(prepared.run(prepared.feed(workload.inputs)))
                    call = call or FirstCall(time.perf_counter() - start, math.nan, math.nan)
                    outputs = outputs or given
                    found[name] = _of_first_call(call) | _of_outputs(exactness(given, outputs, exact))
                    turn = _turn(prepared, workload)
                    for _ in range(WARM_UP):
                        turn()
                turns[name] = turn
            except Exception as error:  # whatever an engine makes of a model
                if name == EAGER:
                    raise
                found[name] = {"reason": reason(error)}
        others = Others()
        times = in_random_order(turns, rounds, seconds, rng)
        during = others.cores()
    peak = max(peak, gemm_peak())
    conditions: dict[str, Any] = {
        "idle": max(before, during) < BUSY,
        "busy_before": before,
        "busy_during": during,
    }
    own = found[EAGER]["error"]
    for name, measured in times.items():
        ratio = speedup(times[EAGER], measured)
        median = statistics.median(measured)
        found[name] |= {
            "rounds": len(measured),
            "median_ms": 1e3 * median,
            "speedup": ratio.median,
            "speedup_low": ratio.low,
            "speedup_high": ratio.high,
            "gflops": flops / median / 1e9,
            "gemm_gflops": peak / 1e9,
            "error_ratio": found[name]["error"] / own if own else math.nan,
        }
    name, precision, threads = case
    return [Row(name, precision, threads, engine, **values | conditions) for engine, values in found.items()]


def _turn(prepared: Prepared, workload: Workload) -> Callable[[], float]:
    """Runs twice and gives the seconds of the second run.

    The first brings the weights back into the caches, and lets the threads of the engine before come to rest.
    """

    def turn() -> float:
        seconds = math.nan
        for _ in range(2):
            feed = prepared.feed(workload.inputs)
            start = time.perf_counter()
            prepared.run(feed)
            seconds = time.perf_counter() - start
        return seconds

    return turn


def _of_first_call(call: FirstCall) -> dict[str, float]:
    return {"first_call_s": call.seconds, "resident_mb": call.resident / 1e6, "peak_mb": call.peak / 1e6}


def _of_outputs(found: Exactness) -> dict[str, float]:
    return dataclasses.asdict(found)
