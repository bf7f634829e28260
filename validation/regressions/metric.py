"""The metrics: the direction, the noise and the unit of what a case measures, by patterns of its name."""

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
        kind: the word for it, and for a change of it.
        better: the direction that is better; a change of what has none is told, and is no regression.
        factor: a change by more than this factor is no noise.
        difference: so is one by more than this, which stands in place of the factor where it is given.
        floor: all below it is equal to it.
        machine: whether it depends on the machine: it is compared on the same machine with the same threads alone.

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

    def changed(self, was: float, now: float) -> int:
        """1 for worse, -1 for better or merely other, 0 for noise; what became infinite is worse or better, too."""
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


_ERROR = Metric("error", "lower", factor=10, floor=1e-12)  # below the floor it is rounding in float64
_SHARE = Metric("accuracy", "higher", difference=0.02)
_SIZE = Metric("size", factor=1.1)
_CONTEXT = Metric("context", factor=math.inf)  # explains other measurements


KERNELS = "kernels"
"""The fact in which a case names the kernels that its passes picked: which there are, the machine decides."""


@dataclasses.dataclass(frozen=True)
class Busy:
    """A measurement of how busy the machine was, and the most at which latencies count."""

    name: str
    most: float


BUSY = Busy("busy_percent", 10.0)
"""The part of a core that other processes took while latencies were measured."""

UNITS = {"ms": "ms", "seconds": "s", "mb": "MB", "bytes": "B", "percent": "%"}
"""The units that words in the names of measurements stand for."""

UNKNOWN = Metric("undeclared", factor=1.1)
"""A measurement that no pattern knows: its changes are told, and that nobody has said whether they are good."""

METRICS: dict[str, Metric] = {
    "*_error_original*": Metric("error", factor=math.inf),  # the model's own, whatever passes make of it
    "*_error*": _ERROR,
    "ulps*": Metric("error", factor=10, floor=8.0),  # near zero many are no fault: told, and no regression
    "tolerance*": Metric("limit", "lower", factor=10),
    "agreement*": _SHARE,
    "*accuracy*": _SHARE,
    "cosine*": Metric("accuracy", "higher", difference=1e-3),  # below 0.99 its check fails
    # Two runs prove nothing: of the same code, ratios differ by ten times their intervals. `trend.latencies` judges many.
    "latency_*": _CONTEXT,
    "busy_percent": _CONTEXT,
    "*seconds": Metric("time", "lower", factor=2, floor=0.2, machine=True),  # of the processor
    "forward_runs": Metric("runs", "lower", factor=1.5),
    "*memory*_mb": Metric("memory", "lower", factor=1.25, floor=1.0, machine=True),
    "sites*": Metric("sites", "higher"),
    "refused*": Metric("refused"),
    "*_compared": Metric("compared", "higher", machine=True),
    "ways_used": _CONTEXT,  # which of them fail, the outcome says
    "nodes*": _SIZE,
    "modules*": _SIZE,
    "parameters*": _SIZE,
    "timing_threads": _CONTEXT,
}
"""The metrics by the patterns of names; the first that fits counts."""


@functools.cache
def metric_of(name: str) -> Metric:
    """The metric of a measurement, by its name."""
    return next((found for pattern, found in METRICS.items() if fnmatch.fnmatch(name, pattern)), UNKNOWN)


def unit_of(name: str) -> str:
    """The unit of a measurement, which its name says; empty for a count or a ratio.

    Example:
        >>> unit_of("latency_baseline_ms"), unit_of("sites")
        ('ms', '')
    """
    return next((UNITS[word] for word in name.split("_")[1:] if word in UNITS), "")
