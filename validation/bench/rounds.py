"""Rounds in which several things do the same work, each in a new random order, and what their times say."""

from __future__ import annotations

import dataclasses
import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import scipy.stats

RESAMPLES = 2000


@dataclasses.dataclass(frozen=True)
class Ratio:
    """The median of paired ratios with its 95 % bootstrap interval."""

    median: float
    low: float
    high: float


def in_random_order(
    turns: Mapping[str, Callable[[], float]],
    fewest: int,
    seconds: float,
    rng: np.random.Generator,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Takes every turn once a round, until the seconds are used up and there are at least so many rounds.

    A turn does its work and returns the seconds that count. The garbage collector runs between rounds alone.
    """
    times: dict[str, list[float]] = {name: [] for name in turns}
    end, rounds = clock() + seconds, 0
    gc.collect()
    gc.disable()
    try:
        while rounds < fewest or clock() < end:
            for name in rng.permutation(list(turns)):
                times[name].append(turns[name]())
            rounds += 1
            gc.collect(1)
    finally:
        gc.enable()
    return times


def speedup(baseline: Sequence[float], times: Sequence[float]) -> Ratio:
    """How many times as fast as the baseline of the same round; the interval is missing (NaN) for a single round."""
    ratios = np.asarray(baseline) / np.asarray(times)
    median = float(np.median(ratios))
    if len(ratios) < 2:
        return Ratio(median, math.nan, math.nan)
    interval = scipy.stats.bootstrap(
        (ratios,), np.median, n_resamples=RESAMPLES, method="percentile", rng=np.random.default_rng(0)
    ).confidence_interval
    return Ratio(median, float(interval.low), float(interval.high))
