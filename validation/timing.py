"""Times of several functions with the same work, called in random order; peaks of memory; load by other processes."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import psutil
import torch

RESAMPLES = 2000

Times = dict[str, list[float]]
"""The seconds of each timed function by name, one value a round."""


@dataclasses.dataclass(frozen=True)
class Ratio:
    """The median of paired ratios with its 95 % bootstrap interval."""

    median: float
    low: float
    high: float

    @property
    def width(self) -> float:
        """The width of the interval, relative to the median."""
        return (self.high - self.low) / self.median


class OtherProcesses:
    """Measures the number of cores that other processes use (Linux: use of the machine without this process)."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Start the measurement again."""
        self._begin = self._now()

    def cores(self) -> float:
        """The average number of cores that other processes used since the beginning."""
        wall, busy, own = (now - then for now, then in zip(self._now(), self._begin, strict=True))
        return max(0.0, busy - own) / wall if wall else 0.0

    @staticmethod
    def _now() -> tuple[float, float, float]:
        """Seconds of wall time, of work of all cores (with steal time), and of work of this process and its ended children."""
        machine, own = psutil.cpu_times(), psutil.Process().cpu_times()
        working = ("user", "nice", "system", "irq", "softirq", "steal")
        busy = sum(getattr(machine, name, 0.0) for name in working)
        # Own times: user and system, of this process and of children that have ended.
        return time.perf_counter(), busy, sum(own[:4])


def peak_mb(run: Callable[[], object], device: str) -> float:
    """The peak memory of the tensors that a run allocates, without earlier ones, in MB."""
    if device.startswith("cuda"):
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        return float(torch.cuda.max_memory_allocated(device) - before) / 1e6
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it prints lines for each profile
    kinds = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds, profile_memory=True) as profile:
        run()
    kineto: Any = profile.profiler
    events = [e for e in kineto.kineto_results.events() if e.name() == "[memory]"]
    sizes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    return max(0.0, float(np.max(np.cumsum(sizes), initial=0))) / 1e6


def in_random_order(
    turns: Mapping[str, Callable[[], float]],
    fewest: int,
    seconds: float,
    rng: np.random.Generator,
    enough: Callable[[Times], bool] = lambda times: False,
    most: float = math.inf,
) -> Times:
    """Take every turn once a round, for `fewest` to `most` rounds, until the seconds are used up or `enough` is true.

    A turn does its work and returns the seconds that count. The garbage collector only runs between rounds. `enough` is
    called again whenever the number of rounds has grown by half.
    """
    times: Times = {name: [] for name in turns}
    end, rounds, ask = time.perf_counter() + seconds, 0, fewest
    gc.collect()
    gc.disable()
    try:
        while rounds < fewest or (rounds < most and time.perf_counter() < end):
            if rounds >= ask:
                if enough(times):
                    break
                ask = rounds + rounds // 2 + 1
            for name in rng.permutation(list(turns)):
                times[name].append(turns[name]())
            rounds += 1
            gc.collect(1)
    finally:
        gc.enable()
    return times


def seconds_of(run: Callable[[], Any], wait: Callable[[], object] = lambda: None) -> float:
    """The seconds that a run takes; `wait` returns when the device has finished all its work."""
    wait()
    start = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - start


def synchronise(device: str) -> Callable[[], None]:
    """Make a function that waits until the device has finished all its work; for a CPU it returns at once."""
    return torch.cuda.synchronize if device.startswith("cuda") else lambda: None


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def timing_threads() -> int:
    """Half of the cores that this process may use: threads on all cores would wait for each other under other load."""
    return max(1, cores() // 2)


@contextlib.contextmanager
def timing() -> Iterator[OtherProcesses]:
    """Set torch's threads for timed runs in the block, and measure the load by other processes."""
    before = torch.get_num_threads()
    torch.set_num_threads(timing_threads())
    try:
        yield OtherProcesses()
    finally:
        torch.set_num_threads(before)


def second_of_two(
    run: Callable[[Any], object], feed: Callable[[], Any], wait: Callable[[], object] = lambda: None
) -> Callable[[], float]:
    """Make a turn that runs twice, each time on inputs made untimed, and returns the seconds of the second run.

    The first run brings the weights back into the caches, and lets threads of earlier functions come to rest.
    """

    def turn() -> float:
        run(feed())
        given = feed()
        return seconds_of(lambda: run(given), wait)

    return turn


def ratio(times: Sequence[float], others: Sequence[float]) -> Ratio:
    """The ratios of paired times, `times` ÷ `others`, round by round; a single round has no interval (NaN)."""
    import scipy.stats  # imported here because it takes a second, for which each worker would wait

    ratios = np.asarray(times) / np.asarray(others)
    median = float(np.median(ratios))
    if len(ratios) < 2:
        return Ratio(median, math.nan, math.nan)
    interval = scipy.stats.bootstrap(
        (ratios,), np.median, n_resamples=RESAMPLES, method="percentile", rng=np.random.default_rng(0)
    ).confidence_interval
    return Ratio(median, float(interval.low), float(interval.high))
