"""The time of a capture for each layer, from few layers to many."""

from __future__ import annotations

import functools
import statistics

from rich.table import Table

import fxopt

from ..timing import of_runs
from .models import llama

COUNTS = (12, 24, 48, 96)


def layers_table(rounds: int) -> Table:
    """Captures of one Llama with more and more layers."""
    table = Table(
        *("layers", "fixed, ms", "ms a layer", "dynamic, ms", "ms a layer"),
        title=f"fxopt.trace of a narrow Llama by number of layers: median of {rounds}",
    )
    subjects = [llama(count) for count in COUNTS]
    kinds = [
        of_runs(
            [
                functools.partial(
                    fxopt.trace, s.model, (), s.inputs, dynamic_shapes=s.free if free else None, verify=False
                )
                for s in subjects
            ],
            rounds,
        )
        for free in (False, True)
    ]
    for count, *times in zip(COUNTS, *kinds, strict=True):
        medians = [1000 * statistics.median(seconds) for seconds in times]
        table.add_row(str(count), *(text for ms in medians for text in (f"{ms:.0f}", f"{ms / count:.2f}")))
    return table
