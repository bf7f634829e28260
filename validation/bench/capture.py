"""The cost of a capture: time, beside `torch.export` and `torch.fx.symbolic_trace`, and memory; and what its guards cost."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

import fxopt

from ..timing import of_runs, spread
from .guard_cost import guard_table
from .layers import layers_table
from .memory import memory_table
from .models import SUBJECTS, Subject


def capture(
    rounds: Annotated[
        int, typer.Option(help="Counted captures of each kind, after one that is not counted.")
    ] = 5,
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = 2,
) -> None:
    """Measure `fxopt.trace` beside `torch.export.export(strict=False)` and `torch.fx.symbolic_trace`.

    The ratio is that of a capture with `verify=False`, as torch.export does not compare; the default is beside it.
    `runs` is how often a capture runs the forward.
    """
    torch.set_num_threads(threads)
    console = Console()
    measured = [make() for make in SUBJECTS]
    console.print(_times(measured, rounds))
    for subject in measured:
        console.print(
            f"torch.fx.symbolic_trace, {subject.name}: {_symbolic_trace(subject, rounds)}",
            highlight=False,
            soft_wrap=True,
        )
    del measured
    console.print(layers_table(rounds))
    console.print(memory_table())
    console.print(guard_table(rounds))


def _times(measured: Sequence[Subject], rounds: int) -> Table:
    """One row a model and kind of sizes."""
    table = Table(
        *("model", "sizes", "runs", "fxopt.trace", "verified", "torch.export", "ratio"),
        title=f"capture, seconds and ratio: median of {rounds} (minimum to maximum), torch {torch.__version__}",
    )
    for subject in measured:
        for sizes, shapes in (("fixed", None), ("dynamic", subject.free)):
            options: dict[str, Any] = {"args": (), "kwargs": subject.inputs, "dynamic_shapes": shapes}
            times = of_runs(
                [
                    functools.partial(fxopt.trace, subject.model, verify=False, **options),
                    functools.partial(fxopt.trace, subject.model, **options),
                    functools.partial(torch.export.export, subject.model, strict=False, **options),
                ],
                rounds,
            )
            unverified, _, exported = times
            traced = fxopt.trace(subject.model, verify=False, **options)
            table.add_row(
                subject.name,
                sizes,
                str(traced.meta["forward_runs"]),
                *map(spread, times),
                spread([mine / other for mine, other in zip(unverified, exported, strict=True)]),
            )
    return table


def _symbolic_trace(subject: Subject, rounds: int) -> str:
    """The time of `torch.fx.symbolic_trace`, which knows no sizes, for the same inputs, or why it cannot."""
    parameters = inspect.signature(subject.model.forward).parameters.values()
    defaults = {
        p.name: p.default for p in parameters if p.name not in subject.inputs and p.default is not p.empty
    }
    run = functools.partial(torch.fx.symbolic_trace, subject.model, concrete_args=defaults)
    try:
        (times,) = of_runs([run], rounds)
    except Exception as error:  # whatever a model makes of proxies
        return f"fails, {type(error).__name__}: {error}"
    return f"{spread(times)} seconds"
