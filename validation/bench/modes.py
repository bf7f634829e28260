"""`python -m validation.bench memory`: what an optimized model takes, by the value of `memory` that it was made with."""

from __future__ import annotations

import gc
import multiprocessing
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

import fxopt
from fxopt.optimizing.prepare import MEMORIES

from .memory import forget_peak, resident
from .nested import fresh
from .quiet import quiet
from .workloads import SMALL, WORKLOADS, build


def memory(
    models: Annotated[
        str, typer.Option(help="Models by name, separated by commas.")
    ] = "bert-1x128,llama-prefill",
    precision: Annotated[str, typer.Option(help="As `fxopt.optimize` takes it.")] = "float32",
    small: Annotated[bool, typer.Option(help="Tiny models, to try the benchmark out.")] = False,
) -> None:
    """Resident and peak memory of fxopt.optimize in each mode, the original released, each in a process of its own."""
    columns = (
        "model",
        "memory",
        "weights, MB",
        "resident",
        "after a call",
        "peak",
        "peak of eager",
        "report",
    )
    title = f"{precision}: memory above what was there before the model, by the memory of its weights"
    table, context = Table(*columns, title=title), multiprocessing.get_context("spawn")
    for name in models.split(","):
        if name not in (SMALL if small else WORKLOADS):
            raise typer.BadParameter(f"there is no model {name!r}")
        for mode in MEMORIES:
            with context.Pool(1) as pool:
                weights, *ratios = pool.apply(_measured, (name, small, precision, mode))
            table.add_row(name, mode, f"{weights / 1e6:.0f}", *(f"{ratio:.2f}" for ratio in ratios))
    Console().print(table)


@torch.no_grad()
def _measured(name: str, small: bool, precision: str, mode: str) -> tuple[float, ...]:
    """The bytes of the weights; by them: resident after `optimize`, after a call, peaks of `optimize` and eager; the report."""
    with quiet():
        # What torch and fxopt import and keep at the first time is not this model's.
        fxopt.optimize(torch.nn.Sequential(torch.nn.Linear(64, 64)).eval(), (torch.zeros(2, 64),))
        gc.collect()
        before = resident("VmRSS")
        workload = build(name, small)
        inputs, model = workload.inputs, workload.model
        del workload
        weights = sum(parameter.nbytes for parameter in model.parameters())
        forget_peak()
        model(**fresh(inputs))
        eager = resident("VmHWM")
        gc.collect()
        forget_peak()
        fast: Any = fxopt.optimize(model, (), fresh(inputs), precision=precision, memory=mode)
        del model
        gc.collect()
        peak, after = resident("VmHWM"), resident("VmRSS")
        fast(**fresh(inputs))
        called = resident("VmRSS")
    (report,) = fast.report
    growths = [(each - before) / weights for each in (after, called, peak, eager)]
    return (weights, *growths, report.memory or 1.0)
