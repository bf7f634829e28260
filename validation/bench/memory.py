"""How much memory an optimized model takes, by the value of `memory` that it was made with, and a capture at its peak."""

from __future__ import annotations

import gc
import math
import multiprocessing
import re
import tracemalloc
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

import fxopt
from fxopt.optimizing.prepare import MEMORIES

from .nested import fresh
from .quiet import quiet
from .workloads import SMALL, WEIGHED, WORKLOADS, build, llama, named

_STATUS = Path("/proc/self/status")


def resident(field: str) -> float:
    """Resident memory of this process in bytes: `VmRSS` now, `VmHWM` at its peak; NaN without a /proc."""
    found = re.search(rf"{field}:\s+(\d+) kB", _STATUS.read_text()) if _STATUS.exists() else None
    return 1024.0 * int(found[1]) if found else math.nan


def forget_peak() -> None:
    """Lets the peak start anew from the memory that is resident now."""
    if _STATUS.exists():
        Path("/proc/self/clear_refs").write_text("5")


def memory(
    models: Annotated[
        str, typer.Option(help="Models by name, separated by commas.")
    ] = "bert-1x128,llama-prefill",
    precision: Annotated[str, typer.Option(help="As `fxopt.optimize` takes it.")] = "float32",
    small: Annotated[bool, typer.Option(help="Tiny models, to try the benchmark out.")] = False,
) -> None:
    """Resident and peak memory of fxopt.optimize in each mode, the original released, each in a process of its own."""
    table = Table(
        *("model", "memory", "weights, MB", "resident", "after a call", "peak", "peak of eager", "report"),
        title=f"{precision}: memory above what was there before the model, by the memory of its weights",
    )
    for name in named(models, SMALL if small else WORKLOADS):
        for mode in MEMORIES:
            weights, *ratios = _alone(_of_optimized, name, small, precision, mode)
            table.add_row(name, mode, f"{weights / 1e6:.0f}", *(f"{ratio:.2f}" for ratio in ratios))
    Console().print(table)


def memory_table() -> Table:
    """The growth of the resident memory of a fresh process to its peak during one capture (Linux alone)."""
    table = Table(
        *("model", "sizes", "weights, MB", "peak above, MB", "of it compiling, MB", "of the weights"),
        title="peak resident memory of a capture above what was there before, each in a process of its own",
    )
    if not _STATUS.exists():
        table.caption = "Not measured: this system has no /proc."
        return table
    for position in range(len(WEIGHED)):
        for sizes, free in (("fixed", False), ("dynamic", True)):
            name, weights, growth, compiling = _alone(_of_capture, position, free)
            megabytes = [f"{weights / 1e6:.0f}", *(f"{each / 1e6:.1f}" for each in (growth, compiling))]
            table.add_row(name, sizes, *megabytes, f"{growth / weights:.1%}")
    return table


def _alone(function: Any, *arguments: Any) -> Any:
    """Call a function in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


@torch.no_grad()
def _of_optimized(name: str, small: bool, precision: str, mode: str) -> tuple[float, ...]:
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


def _of_capture(position: int, free: bool) -> tuple[str, int, int, int]:
    """The name of a subject, and in bytes: its weights, by how much the memory grew while it was captured, and compiling.

    Compiling is what Python itself takes at its peak for the code that fx generated, which every graph module pays.
    """
    # What torch and sympy import and keep at the first capture is not this one's: a small model pays for it.
    llama(2).captured(fxopt.trace, free, verify=False)()
    subject = WEIGHED[position]()
    gc.collect()
    before = resident("VmRSS")
    forget_peak()
    traced = subject.captured(fxopt.trace, free, verify=False)()
    growth = int(resident("VmHWM") - before)
    tracemalloc.start()
    compile(traced.code, "<graph>", "exec")
    compiling = tracemalloc.get_traced_memory()[1]
    return subject.name, sum(p.nbytes for p in traced.parameters()), growth, compiling
