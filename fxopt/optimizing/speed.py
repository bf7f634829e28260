"""How long a graph takes beside its model."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from fxopt.optimizing.inputs import Inputs

_SECONDS = 0.2  # how long to time a graph, and the model
_SHORT = 0.01  # seconds: what takes less finds other values in the caches than its own, when something else ran before


def speedup(model: Callable[..., Any], computed: Callable[..., Any], inputs: Inputs) -> float:
    """The model's time by the graph's: the median over rounds in which both run."""
    ratios: list[float] = []
    begun = time.perf_counter()
    while len(ratios) < 3 or (len(ratios) < 50 and time.perf_counter() - begun < 2 * _SECONDS):
        theirs, mine = _seconds(model, inputs), _seconds(computed, inputs)
        ratios.append(theirs / mine)
    return statistics.median(ratios)


def _seconds(function: Callable[..., Any], inputs: Inputs) -> float:
    """The seconds of a call; of a short one, those of the second in a row, as in use."""
    took = float("inf")
    for _ in range(2):
        copied = inputs.copied()
        start = time.perf_counter()
        function(*copied.args, **copied.kwargs)
        took = time.perf_counter() - start
        if took > _SHORT:
            break
    return took
