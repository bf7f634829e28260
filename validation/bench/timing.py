"""Times of several things that do the same work, taken in turn, so that a slow minute of the machine meets all."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any


def interleaved(
    runs: Sequence[Callable[[], Any]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> list[list[float]]:
    """Seconds of each run in turn, round after round; the first round, which imports and warms up, is left out."""
    times: list[list[float]] = [[] for _ in runs]
    for turn in range(rounds + 1):
        for run, seconds in zip(runs, times, strict=True):
            gc.collect()  # what one leaves behind is not to be cleared away in the time of the next
            start = clock()
            run()
            if turn:
                seconds.append(clock() - start)
    return times


def ratios(times: Sequence[float], others: Sequence[float]) -> list[float]:
    """What each time is of the other one of the same round."""
    return [mine / other for mine, other in zip(times, others, strict=True)]


def spread(values: Sequence[float], digits: int = 2) -> str:
    """`median (minimum to maximum)`."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"
