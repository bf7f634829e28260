"""The memory of an optimized model, with the model itself and without, of a capture at its peak, and of an engine's first call:
each in a process of its own.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import multiprocessing
import re
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

import fxopt
from fxopt.objects import tensors_in

from .engines import Prepare, Unavailable, engines, fresh, quiet, reason
from .workloads import SMALL, VERIFIED, WORKLOADS, Workload, build, llama, named

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


def first_call_alone(name: str, small: bool, precision: str, engine: str, threads: int) -> FirstCall:
    """The same in a new process, which imports and compiles everything anew.

    Raises `Unavailable` with the reason when the engine cannot run, and when its process ends without an answer.
    """
    context = multiprocessing.get_context("spawn")
    answer, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, name, small, precision, engine, threads))
    process.start()
    sender.close()
    try:
        if not answer.poll(PATIENCE):
            raise Unavailable(f"no result after {PATIENCE:.0f} seconds")
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
