"""One model on all engines at one precision and number of threads: one row an engine."""

from __future__ import annotations

import dataclasses
import functools
import math
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch

from fxopt.compare import cosine_similarity
from fxopt.testing import compare as compare_outputs

from ..judging.repro import portable
from ..timing import OtherProcesses, in_random_order, ratio, second_of_two, synchronise
from .engines import EAGER, Prepare, engines, quiet, reason, tensors
from .models import Workload, in_float64, workload

T = TypeVar("T")

WARM_UP = 3

Case = tuple[str, str, int]
"""A model by name, a precision and a number of threads."""


@dataclasses.dataclass
class Row:
    """One engine on one model. The engine ran if `reason` is empty; numbers that were not measured are NaN.

    `speedup` is the median of the paired ratios eager time ÷ engine time, with the ends of its 95 % interval. `error_ratio`
    is the error vs float64, divided by that of eager float32. `memory` is the size of the weights in memory, divided by
    that of the model's. `eager` is the reason why `fxopt.optimize` uses no graph, `taken` the engine that computes its
    graph. `busy` is the number of cores that other processes used during the rounds.
    """

    model: str
    precision: str
    threads: int
    engine: str
    reason: str = ""
    eager: str = ""
    taken: str = ""
    rounds: int = 0
    median_ms: float = math.nan
    speedup: float = math.nan
    speedup_low: float = math.nan
    speedup_high: float = math.nan
    first_call_s: float = math.nan
    error: float = math.nan
    error_ratio: float = math.nan
    cosine: float = math.nan
    memory: float = math.nan
    busy: float = math.nan


def of_case(
    case: Case, names: Collection[str], rounds: int, seconds: float, limit: float, device: str = "cpu"
) -> list[Row]:
    """Measure a case in a separate process; if the process fails or takes too long, return one row with the reason."""
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as caches:
            return alone(limit, _measured, case, names, rounds, seconds, device, caches)
    except Exception as error:  # the model cannot be built, its process ended, or its time is up
        return [Row(*case, EAGER, reason(error))]


def alone(limit: float, function: Callable[..., T], *given: Any) -> T:
    """Call a function in a separate process, which ends after `limit` seconds at the latest.

    Raises the errors of the function, `TimeoutError`, and `BrokenProcessPool` if the process ends itself.
    """
    context: Any = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, _end_with_parent) as pool:
        try:
            return pool.submit(function, *given).result(limit)
        finally:
            for process in [*pool._processes.values()]:
                process.kill()


def _end_with_parent() -> None:
    """End this process when its parent has ended, so that a killed benchmark stops computing."""
    parent: Any = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _measured(
    case: Case, names: Collection[str], rounds: int, seconds: float, device: str, caches: str
) -> list[Row]:
    # Empty caches: compilations and timings of earlier runs must not count.
    os.environ |= {"FXOPT_CACHE": caches, "TORCHINDUCTOR_CACHE_DIR": caches}
    with quiet():
        there = engines(case[1], device)
        chosen = {name: made for name, made in there.items() if name in names}
        return compare(case, workload(case[0], device=device), chosen, rounds=rounds, seconds=seconds)


def compare(
    case: Case, workload: Workload, engines: Mapping[str, Prepare], *, rounds: int, seconds: float
) -> list[Row]:
    """Prepare every engine, then time all of them in rounds. An engine that fails is left out with its reason."""
    threads = case[-1]
    torch.set_num_threads(threads)
    rows = {name: Row(*case, name) for name in engines}
    exact = in_float64(workload)
    turns: dict[str, Callable[[], float]] = {}
    with torch.no_grad():
        for name, prepare in engines.items():
            try:
                with quiet():
                    turns[name] = _ready(prepare, workload, threads, rows[name], exact)
            except Exception as error:  # an engine may raise anything
                if name == EAGER:
                    raise
                rows[name] = Row(*case, name, reason(error))
        others = OtherProcesses()
        times = in_random_order(turns, rounds, seconds, np.random.default_rng(0))
        busy = others.cores()
    for name, measured in times.items():
        row, found = rows[name], ratio(times[EAGER], measured)
        row.rounds, row.median_ms, row.busy = len(measured), 1e3 * statistics.median(measured), busy
        row.speedup, row.speedup_low, row.speedup_high = dataclasses.astuple(found)
        own = rows[EAGER].error
        row.error_ratio = row.error / own if own else math.nan
    return list(rows.values())


def _ready(
    prepare: Prepare, workload: Workload, threads: int, row: Row, exact: list[torch.Tensor]
) -> Callable[[], float]:
    """Prepare and warm up an engine and return its turn; the row gets the time and exactness of the first outputs."""
    start = time.perf_counter()
    prepared = prepare(workload.model, workload.inputs, threads)
    outputs = tensors(prepared.run(prepared.feed(workload.inputs)))
    wait = synchronise(str(exact[0].device))
    wait()
    row.first_call_s = time.perf_counter() - start
    row.error, row.cosine = exactness(outputs, exact)
    if prepared.model is not None:
        report = prepared.model.report  # the report of `generate()` has several graphs
        used = [each for each in report if each.reason is None]
        row.eager = "" if used else portable((report and report[-1].reason) or str(report))
        row.taken = "+".join(dict.fromkeys(each.engine for each in used))
        row.memory = max((each.memory or math.nan for each in used), default=math.nan)
    turn = second_of_two(prepared.run, functools.partial(prepared.feed, workload.inputs), wait)
    for _ in range(WARM_UP):
        turn()
    return turn


def exactness(outputs: list[torch.Tensor], exact: list[torch.Tensor]) -> tuple[float, float]:
    """The relative error vs float64 and the cosine of the worst output; for tokens, the shares that differ and agree.

    Raises `AssertionError` if the outputs differ in number or shapes.
    """
    error = compare_outputs(exact, outputs, dtypes=False).max_rel
    if exact and not any(tensor.is_floating_point() for tensor in exact):
        alike = min(float((own == its).double().mean()) for own, its in zip(outputs, exact, strict=True))
        return 1 - alike, alike
    return error, cosine_similarity(exact, outputs)
