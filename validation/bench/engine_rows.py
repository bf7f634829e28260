"""One workload on all engines at one precision and number of threads: one row an engine."""

from __future__ import annotations

import copy
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch

from fxopt.testing import compare as compare_outputs

from ..judging.metrics import cosine
from ..timing import Others, in_random_order, ratio, second_of_two
from .engines import EAGER, Prepare, cast, quiet, reason, tensors
from .machine import gemm_peak
from .workloads import Workload

WARM_UP = 3


@dataclasses.dataclass
class Row:
    """One engine on one workload. Without a reason why it was left out it ran; numbers that were not measured are NaN.

    `speedup` is the median of the paired ratios of eager's time to its own, with the ends of the 95 % interval, `error_ratio`
    the error to float64 by that of eager float32, `busy` the cores that others used during the rounds.
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
    error: float = math.nan
    error_ratio: float = math.nan
    cosine: float = math.nan
    busy: float = math.nan


def compare(
    case: tuple[str, str, int],
    workload: Workload,
    engines: Mapping[str, Prepare],
    *,
    rounds: int,
    seconds: float,
    say: Callable[[str], object] = print,
) -> list[Row]:
    """Makes every engine ready, then times all of them in rounds; `case` is the model's name, precision and threads.

    An engine that fails at anything is left out with its reason.
    """
    threads = case[-1]
    torch.set_num_threads(threads)
    rows = {name: Row(*case, name) for name in engines}
    flops, exact = workload.flops(), in_float64(workload)
    turns: dict[str, Callable[[], float]] = {}
    with torch.no_grad():
        for name, prepare in engines.items():
            say(f"{case}, first runs: {name}")
            try:
                with quiet():
                    turns[name] = _ready(prepare, workload, threads, rows[name], exact)
            except Exception as error:  # whatever an engine makes of a model
                if name == EAGER:
                    raise
                rows[name] = Row(*case, name, reason(error))
        say(f"{case}, rounds")
        others = Others()
        times = in_random_order(turns, rounds, seconds, np.random.default_rng(0))
        busy = others.cores()
    torch._dynamo.reset()  # what it compiled holds the model
    peak = gemm_peak() / 1e9
    for name, measured in times.items():
        row, median, found = rows[name], statistics.median(measured), ratio(times[EAGER], measured)
        row.rounds, row.median_ms, row.busy = len(measured), 1e3 * median, busy
        row.speedup, row.speedup_low, row.speedup_high = dataclasses.astuple(found)
        row.gflops, row.gemm_gflops = flops / median / 1e9, peak
        own = rows[EAGER].error
        row.error_ratio = row.error / own if own else math.nan
    return list(rows.values())


def _ready(
    prepare: Prepare, workload: Workload, threads: int, row: Row, exact: list[torch.Tensor]
) -> Callable[[], float]:
    """Make an engine ready and warm: its turn; the row gets the time of its first outputs, and how exact they are."""
    start = time.perf_counter()
    prepared = prepare(workload.model, workload.inputs, threads)
    outputs = tensors(prepared.run(prepared.feed(workload.inputs)))
    row.first_call_s = time.perf_counter() - start
    row.error, row.cosine = exactness(outputs, exact)
    turn = second_of_two(prepared.run, lambda: prepared.feed(workload.inputs))
    for _ in range(WARM_UP):
        turn()
    return turn


def in_float64(workload: Workload) -> list[torch.Tensor]:
    """The outputs of a copy of the model in float64."""
    with torch.no_grad():
        return tensors(copy.deepcopy(workload.model).double()(**cast(workload.inputs, torch.float64)))


def exactness(outputs: list[torch.Tensor], exact: list[torch.Tensor]) -> tuple[float, float]:
    """The worst output: its error to float64, relative to its largest value, and its cosine.

    Raises `AssertionError` when they are not of the same number and shapes.
    """
    error = compare_outputs(exact, outputs, dtypes=False).max_rel
    pairs = [(wide.double(), own.double()) for wide, own in zip(exact, outputs, strict=True) if own.numel()]
    return error, min(cosine({"": wide}, {"": own}) for wide, own in pairs)
