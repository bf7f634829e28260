"""How much memory an optimized model takes, by the value of `memory` that it was made with, a capture at its peak, and the first
call of an engine: each in a process of its own.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import multiprocessing
import re
import time
import tracemalloc
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

import fxopt
from fxopt.optimizing.prepare import MEMORIES

from .engines import Prepare, Unavailable, engines, fresh, quiet, reason
from .workloads import SMALL, WEIGHED, WORKLOADS, Workload, build, llama, named

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


PATIENCE = 1800.0
"""Seconds after which an engine that does not come to its first result is given up."""


@dataclasses.dataclass(frozen=True)
class FirstCall:
    """Bytes of the whole process, with torch and the model; NaN where this system does not tell them."""

    seconds: float  # from the model in memory to the first result
    resident: float  # memory after that
    peak: float  # of it, on the way


def first_call(prepare: Prepare, workload: Workload, threads: int) -> FirstCall:
    """Makes an engine ready and runs it once, in this process."""
    torch.set_num_threads(threads)
    gc.collect()
    forget_peak()
    start = time.perf_counter()
    with torch.no_grad():
        prepared = prepare(workload.model, workload.inputs, threads)
        prepared.run(prepared.feed(workload.inputs))
    seconds = time.perf_counter() - start
    return FirstCall(seconds, resident("VmRSS"), resident("VmHWM"))


def first_call_alone(
    name: str, small: bool, precision: str, engine: str, threads: int, patience: float = PATIENCE
) -> FirstCall:
    """The same in a new process, which imports and compiles everything anew.

    Raises `Unavailable` with the reason when the engine cannot run, and when its process ends without an answer.
    """
    context = multiprocessing.get_context("spawn")
    answer, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, name, small, precision, engine, threads))
    process.start()
    sender.close()
    try:
        if not answer.poll(patience):
            raise Unavailable(f"no result after {patience:.0f} seconds")
        found = answer.recv()
        process.join(60)  # it has processes of its own to end
    except EOFError:
        process.join()
        raise Unavailable(f"its process ended with exit status {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
    if isinstance(found, str):
        raise Unavailable(found)
    assert isinstance(found, FirstCall)
    return found


def _answer(sender: Connection, name: str, small: bool, precision: str, engine: str, threads: int) -> None:
    with quiet():
        try:
            sender.send(first_call(engines(precision, threads)[engine], build(name, small), threads))
        except Exception as error:  # whatever an engine makes of a model
            sender.send(reason(error))
