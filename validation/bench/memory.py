"""The memory of an optimized model, with the model itself and without, and of a capture at its peak, each in a process of its own."""

from __future__ import annotations

import gc
import math
import multiprocessing
import re
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

import fxopt
from fxopt.objects import tensors_in

from .engines import fresh, quiet
from .workloads import SMALL, VERIFIED, WORKLOADS, build, llama, named

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
    small: Annotated[bool, typer.Option(help="Tiny models, to try the benchmark out.")] = False,
) -> None:
    """Resident and peak memory of fxopt.optimize with `keep_model` and without, the original released, each in a process of its own."""
    table = Table(
        *("model", "it is", "weights, MB", "resident", "after a call", "peak", "peak of eager", "report"),
        title="memory above what was there before the model, by the memory of its weights",
    )
    for name in named(models, SMALL if small else WORKLOADS):
        for keep_model in (True, False):
            weights, *ratios = _alone(_of_optimized, name, small, keep_model)
            table.add_row(
                name,
                "kept" if keep_model else "not",
                f"{weights / 1e6:.0f}",
                *(f"{ratio:.2f}" for ratio in ratios),
            )
    Console().print(table)


def memory_table() -> Table:
    """The peak of the resident memory above what was there before the model, of a run and of captures."""
    table = Table(
        *("model", "mode", "run, MB", "capture", "verified", "of the run"),
        title="peak memory, with the model, of a run (in training with backward), a capture and a verified one, each in its own process",
    )
    for name in VERIFIED:
        for training in (False, True):
            sizes = [_alone(_of_capture, name, training, verify) for verify in (None, False, True)]
            table.add_row(
                *(name, "training" if training else "eval", *(f"{size / 1e6:.0f}" for size in sizes)),
                f"{sizes[2] / sizes[0]:.2f}" if sizes[0] else "-",  # a small model may fit what is there
            )
    return table


def _alone(function: Any, *arguments: Any) -> Any:
    """Call a function in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


@torch.no_grad()
def _of_optimized(name: str, small: bool, keep_model: bool) -> tuple[float, ...]:
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
        fast: Any = fxopt.optimize(model, (), fresh(inputs), keep_model=keep_model)
        del model
        gc.collect()
        peak, after = resident("VmHWM"), resident("VmRSS")
        fast(**fresh(inputs))
        called = resident("VmRSS")
    (report,) = fast.report
    growths = [(each - before) / weights for each in (after, called, peak, eager)]
    return (weights, *growths, report.memory or 1.0)


def _of_capture(name: str, training: bool, verify: bool | None) -> float:
    """The bytes that a model and its capture take at their peak, or its run where `verify` is None."""
    # What torch and sympy import and keep at the first capture is not this one's.
    llama(2).captured(fxopt.trace, free=False)()
    gc.collect()
    before = resident("VmRSS")
    subject = VERIFIED[name]()
    subject.model.train(training)
    forget_peak()
    if verify is None:
        with torch.set_grad_enabled(training):
            outputs = tensors_in(subject.model(**subject.inputs))
        if training:
            torch.stack([output.sum() for output in outputs]).sum().backward()
    else:
        subject.captured(fxopt.trace, free=False, verify=verify)()
    return resident("VmHWM") - before
