"""Latency: the captured graph and its rewritten copy, timed turn by turn so that both meet the same weather."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import numpy as np
import torch

from ..records import Finding, Outcome
from ..subject import Subject

WARM_UP = 3
FEWEST, MOST = 11, 51
SECONDS = 1.0
"""Pairs of runs are timed until this much time is used, but at least `FEWEST` and at most `MOST`."""


def check(subject: Subject, pipeline: tuple[str, ...]) -> Finding:
    """Median times, and the median of the paired ratios with its 95 % bootstrap confidence interval."""
    dtype = subject.dtypes[0]
    rewritten = subject.rewritten(pipeline, dtype)
    if not sum(rewritten.sites):
        return Finding(Outcome.NO_OP, "nothing to rewrite")
    traced = subject.traced(dtype)
    inputs = subject.inputs(dtype)
    threads = timing_threads()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with subject.entering("time"), torch.no_grad():
            pairs = time_pairs(
                lambda: traced(**inputs), lambda: rewritten.module(**inputs), synchronise(subject.device)
            )
    finally:
        torch.set_num_threads(before)
    return Finding(measurements={**summarise(pairs), "timing_threads": threads})


def timing_threads() -> int:
    """Half of the cores that this process may use: when other programs run, threads on all cores wait for each
    other, and a run takes a hundred times as long.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // 2)


def synchronise(device: str) -> Callable[[], None]:
    """What waits until the device has done all its work; a CPU always has."""
    return torch.cuda.synchronize if device.startswith("cuda") else lambda: None


def time_pairs(
    baseline: Callable[[], object], transformed: Callable[[], object], wait: Callable[[], None]
) -> np.ndarray:
    """Seconds of each run, [pairs, 2]: the order within a pair alternates."""

    def seconds(run: Callable[[], object]) -> float:
        wait()
        start = time.perf_counter()
        run()
        wait()
        return time.perf_counter() - start

    for _ in range(WARM_UP):
        seconds(baseline), seconds(transformed)
    pairs: list[tuple[float, float]] = []
    end = time.perf_counter() + SECONDS
    while len(pairs) < FEWEST or (len(pairs) < MOST and time.perf_counter() < end):
        if len(pairs) % 2:
            second = seconds(transformed)
            pairs.append((seconds(baseline), second))
        else:
            first = seconds(baseline)
            pairs.append((first, seconds(transformed)))
    return np.array(pairs)


def summarise(pairs: np.ndarray) -> dict[str, float | int]:
    """What the report shows of timed pairs: medians in milliseconds, the ratio transformed / baseline."""
    import scipy.stats  # only here: it takes a second, and each worker would wait for it

    ratios = pairs[:, 1] / pairs[:, 0]
    interval = scipy.stats.bootstrap(
        (ratios,), np.median, n_resamples=2000, method="percentile", rng=np.random.default_rng(0)
    ).confidence_interval
    baseline, transformed = np.median(pairs, axis=0) * 1e3
    return {
        "latency_baseline_ms": float(baseline),
        "latency_transformed_ms": float(transformed),
        "latency_ratio": float(np.median(ratios)),
        "latency_ratio_low": float(interval.low),
        "latency_ratio_high": float(interval.high),
        "latency_pairs": len(pairs),
    }
