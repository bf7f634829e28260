"""The time of a capture, compared with `torch.export`, and by the number of layers."""

from __future__ import annotations

import functools
import gc
import statistics
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

import fxopt

from ..timing import in_random_order, seconds_of
from .models import Workload, llama, workload

SUBJECTS = ("bert-base", "resnet-50", "groupvit")


def capture(
    rounds: Annotated[int, typer.Option(help="Captures of each kind, after one that is not counted.")] = 5,
    layers: Annotated[str, typer.Option(help="Numbers of layers of a narrow Llama.")] = "12,24,48,96",
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = 2,
) -> None:
    """Measure `fxopt.trace` in comparison with `torch.export.export(strict=False)`.

    The ratio is for captures with `verify=False`, because torch.export does not compare outputs. The time with verification
    is listed as well.
    """
    torch.set_num_threads(threads)
    counts = [int(count) for count in layers.split(",")]
    for table in (
        _times([*map(workload, SUBJECTS), llama(24)], rounds),
        _by_layers(counts, rounds),
    ):
        Console().print(table)


def _times(measured: Sequence[Workload], rounds: int) -> Table:
    """One row a model and kind of sizes."""
    table = Table(
        *("model", "sizes", "fxopt.trace", "verified", "torch.export", "ratio"),
        title=f"capture, seconds and ratio: median of {rounds} (minimum to maximum), torch {torch.__version__}",
    )
    export = functools.partial(torch.export.export, strict=False)
    for subject in measured:
        for sizes, free in (("fixed", False), ("dynamic", True)):
            runs = [subject.captured(fxopt.trace, free, verify=verify) for verify in (False, True)]
            times = _of([*runs, subject.captured(export, free)], rounds)
            ratios = [mine / other for mine, other in zip(times[0], times[2], strict=True)]
            table.add_row(subject.name, sizes, *map(_spread, [*times, ratios]))
    return table


def _by_layers(counts: Sequence[int], rounds: int) -> Table:
    """One row for each number of layers of a Llama."""
    table = Table(
        *("layers", "fixed, s", "ms a layer", "dynamic, s", "ms a layer"),
        title=f"fxopt.trace of a narrow Llama by number of layers: median of {rounds}",
    )
    for count in counts:
        subject = llama(count)
        times = _of([subject.captured(fxopt.trace, free, verify=False) for free in (False, True)], rounds)
        medians = map(statistics.median, times)
        table.add_row(
            str(count), *(text for s in medians for text in (f"{s:.2f}", f"{1000 * s / count:.1f}"))
        )
    return table


def _of(runs: Sequence[Callable[[], Any]], rounds: int) -> list[list[float]]:
    """The seconds of each run in `rounds` rounds, after one warm-up run; garbage is collected before each run."""

    def turn(run: Callable[[], Any]) -> float:
        gc.collect()
        return seconds_of(run)

    for run in runs:
        run()
    turns = {str(number): functools.partial(turn, run) for number, run in enumerate(runs)}
    return list(in_random_order(turns, rounds, 0.0, np.random.default_rng(0)).values())


def _spread(values: Sequence[float]) -> str:
    """`median (minimum to maximum)`."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
