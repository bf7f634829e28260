"""The time of a capture, beside `torch.export`; and what its guards cost."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

import fxopt

from ..timing import of_runs, spread
from .models import Workload, llama, workload

SUBJECTS = ("bert-base", "resnet-50", "groupvit")
LAYERS = (12, 24, 48, 96)
CHECKS = 100
"""How many checks of the inputs are timed as one, which is too short."""


def capture(
    rounds: Annotated[
        int, typer.Option(help="Counted captures of each kind, after one that is not counted.")
    ] = 5,
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = 2,
) -> None:
    """Measure `fxopt.trace` beside `torch.export.export(strict=False)`.

    The ratio is that of a capture with `verify=False`, as torch.export does not compare; the default is beside it.
    `runs` is how often a capture runs the forward.
    """
    torch.set_num_threads(threads)
    console = Console()
    console.print(_times([*map(workload, SUBJECTS), llama(24)], rounds))
    console.print(_by_layers(rounds))
    console.print(_of_guards(rounds))


def _times(measured: Sequence[Workload], rounds: int) -> Table:
    """One row a model and kind of sizes."""
    table = Table(
        *("model", "sizes", "runs", "fxopt.trace", "verified", "torch.export", "ratio"),
        title=f"capture, seconds and ratio: median of {rounds} (minimum to maximum), torch {torch.__version__}",
    )
    for subject in measured:
        for sizes, free in (("fixed", False), ("dynamic", True)):
            export = functools.partial(torch.export.export, strict=False)
            runs = [subject.captured(fxopt.trace, free, verify=verify) for verify in (False, True)]
            times = of_runs([*runs, subject.captured(export, free)], rounds)
            ratios = [mine / other for mine, other in zip(times[0], times[2], strict=True)]
            count = str(runs[0]().meta["forward_runs"])
            table.add_row(subject.name, sizes, count, *map(spread, [*times, ratios]))
    return table


def _by_layers(rounds: int) -> Table:
    """Captures of one Llama with more and more layers."""
    table = Table(
        *("layers", "fixed, ms", "ms a layer", "dynamic, ms", "ms a layer"),
        title=f"fxopt.trace of a narrow Llama by number of layers: median of {rounds}",
    )
    subjects = [llama(count) for count in LAYERS]
    kinds = [
        of_runs([subject.captured(fxopt.trace, free, verify=False) for subject in subjects], rounds)
        for free in (False, True)
    ]
    for count, *times in zip(LAYERS, *kinds, strict=True):
        medians = [1000 * statistics.median(seconds) for seconds in times]
        table.add_row(str(count), *(text for ms in medians for text in (f"{ms:.0f}", f"{ms / count:.2f}")))
    return table


def _of_guards(rounds: int) -> Table:
    """The check of the inputs beside the forward: BERT-base at batch 1 and sequence 128, captured with both free."""
    subject = workload("bert-base")
    inputs, traced = subject.inputs, subject.captured(fxopt.trace, free=True)()
    guard: Any = traced.input_guard

    def check() -> None:
        for _ in range(CHECKS):
            guard(**inputs)

    with torch.inference_mode():
        forward, checks = of_runs([lambda: traced(**inputs), check], rounds)
    whole, one = statistics.median(forward), statistics.median(checks) / CHECKS
    table = Table(
        *("forward, ms", "check of the inputs, ms", "share"),
        title=f"BERT-base, batch 1, sequence 128, CPU, {torch.get_num_threads()} threads: median of {rounds}",
    )
    table.add_row(f"{1000 * whole:.1f}", f"{1000 * one:.4f}", f"{one / whole:.3%}")
    return table
