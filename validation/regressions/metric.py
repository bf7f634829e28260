"""The metrics: better direction and noise of each measurement, by patterns of its name."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import math
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Metric:
    """A kind of number.

    Attributes:
        kind: the name of this kind, and of a change of it.
        better: the better direction; if empty, a change is reported but is not a regression.
        factor: a change by more than this factor is not noise.
        difference: a change by more than this amount is not noise; if given, it replaces the factor.
        floor: smaller values count as this value.
        machine: if True, values are only compared on the same machine with the same threads.
        text: the meaning.

    Example:
        >>> metric_of("relative_error_float64").changed(1e-9, 5e-8), metric_of("cosine").changed(0.9999, 0.995)
        (1, 1)
        >>> metric_of("sites").changed(12, 13), metric_of("latency_baseline_ms").changed(1.0, 1.5)
        (-1, 0)
    """

    kind: str
    better: Literal["lower", "higher", ""] = ""
    factor: float = 1.0
    difference: float | None = None
    floor: float = 0.0
    machine: bool = False
    text: str = ""

    def changed(self, was: float, now: float) -> int:
        """Return 1 for worse, -1 for better or merely different, 0 for noise; a change to infinity counts as a change."""
        if was == now or math.isnan(was) or math.isnan(now):
            return 0
        if self.difference is not None:
            clear = abs(now - was) > self.difference
        else:
            low, high = sorted((max(was, self.floor), max(now, self.floor)))
            clear = high > low * self.factor
        if not clear:
            return 0
        return 1 if self.better and (now > was) == (self.better == "lower") else -1


EAGER = "eager"
"""The fact with the reason why `optimize` made no graph, or why the graph does not compute in the precision."""

KERNELS = "kernels"
"""The fact that names the kernels that the passes of a case picked; the available kernels depend on the machine."""


BUSY, MOST_BUSY = "busy_percent", 10.0
"""The percentage of a core that other processes used during timing, and the maximum at which latencies count."""

UNKNOWN = Metric("undeclared", factor=1.1)
"""A measurement that no pattern matches: its changes are reported, and that its better direction is not declared."""

_CONTEXT = functools.partial(Metric, "context", factor=math.inf)
_TIME = functools.partial(Metric, "time", "lower", factor=2, machine=True)

METRICS: dict[str, Metric] = {
    # The error of the model itself, which passes do not affect.
    "*_error_original*": Metric(
        "error", factor=math.inf, text="the error of the eager model against float64"
    ),
    # Below the floor, errors are rounding in float64.
    "*_error*": Metric(
        "error", "lower", factor=10, floor=1e-12, text="the error of outputs, held against `tolerance`"
    ),
    "tolerance*": Metric("limit", "lower", factor=10, text="the limit of the error"),
    "agreement*": Metric("accuracy", "higher", difference=0.02, text="the share of equal predictions"),
    # Below 0.99, the check fails.
    "cosine*": Metric(
        "accuracy", "higher", difference=1e-3, text="the cosine of outputs with those of the model"
    ),
    # Two runs prove nothing: for the same code, ratios differ by ten times their intervals. `trend.latencies` judges many
    # runs.
    "latency_*": _CONTEXT(text="latencies, judged over several runs (below)"),
    "busy_percent": _CONTEXT(text="the part of a core that other processes used while timing"),
    "apply_seconds": _TIME(floor=0.1, text="seconds, to apply a pass: the shorter of two runs"),
    "*seconds": _TIME(floor=0.3, text="seconds, to capture the model"),
    "forward_runs": Metric("runs", "lower", factor=1.5, text="how many runs of the forward the capture took"),
    "*memory*_mb": Metric(
        "memory",
        "lower",
        factor=1.25,
        floor=1.0,
        machine=True,
        text="the peak of tensors, of a run or while a pass is applied",
    ),
    "sites*": Metric("sites", "higher", text="the sites that a pipeline rewrote"),
    "refused*": Metric("refused", text="the sites that a pass refused"),
    "*_compared": Metric("compared", "higher", machine=True, text="how many values or tensors were compared"),
    "ways_used": _CONTEXT(text="how many uses of the graph were tried: copy, pickle, save, ..."),
    "nodes*": Metric("size", factor=1.1, text="the nodes of the graph"),
    "timing_threads": _CONTEXT(text="the threads of a timed run, in older files"),
}
"""The metrics by patterns of names; the first matching pattern counts."""


@functools.cache
def metric_of(name: str) -> Metric:
    """The metric of a measurement, by its name."""
    return next((found for pattern, found in METRICS.items() if fnmatch.fnmatch(name, pattern)), UNKNOWN)
