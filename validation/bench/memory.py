"""The memory of a capture at its peak, in a process of its own."""

from __future__ import annotations

import gc
import math
import multiprocessing
import re
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

import fxopt
from fxopt.objects import tensors_in

from .workloads import VERIFIED, llama

_STATUS = Path("/proc/self/status")


def resident(field: str) -> float:
    """Resident memory of this process in bytes: `VmRSS` now, `VmHWM` at its peak; NaN without a /proc."""
    found = re.search(rf"{field}:\s+(\d+) kB", _STATUS.read_text()) if _STATUS.exists() else None
    return 1024.0 * int(found[1]) if found else math.nan


def forget_peak() -> None:
    """Lets the peak start anew from the memory that is resident now."""
    if _STATUS.exists():
        Path("/proc/self/clear_refs").write_text("5")


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
