"""How much memory a capture takes at its peak, beside what the model holds by itself."""

from __future__ import annotations

import gc
import math
import multiprocessing
import re
import tracemalloc
from pathlib import Path

from rich.table import Table

import fxopt

from .models import WEIGHED, llama

_STATUS = Path("/proc/self/status")


def memory_table() -> Table:
    """The growth of the resident memory of a fresh process to its peak during one capture (Linux alone)."""
    table = Table(
        *("model", "sizes", "weights, MB", "peak above, MB", "of the weights", "of it compiling, MB"),
        title="peak resident memory of a capture above what was there before, each in a process of its own",
    )
    if not _STATUS.exists():
        table.caption = "Not measured: this system has no /proc."
        return table
    context = multiprocessing.get_context("spawn")
    for position in range(len(WEIGHED)):
        for free in (False, True):
            with context.Pool(1) as pool:
                name, weights, growth, compiling = pool.apply(_peak, (position, free))
            row = [
                f"{weights / 1e6:.0f}",
                f"{growth / 1e6:.1f}",
                f"{growth / weights:.1%}",
                f"{compiling / 1e6:.1f}",
            ]
            table.add_row(name, "dynamic" if free else "fixed", *row)
    return table


def resident(field: str) -> float:
    """Resident memory of this process in bytes: `VmRSS` now, `VmHWM` at its peak; NaN without a /proc."""
    found = re.search(rf"{field}:\s+(\d+) kB", _STATUS.read_text()) if _STATUS.exists() else None
    return 1024.0 * int(found[1]) if found else math.nan


def forget_peak() -> None:
    """Lets the peak start anew from the memory that is resident now."""
    if _STATUS.exists():
        Path("/proc/self/clear_refs").write_text("5")


def _peak(position: int, free: bool) -> tuple[str, int, int, int]:
    """The name of a subject, and in bytes: its weights, by how much the memory grew while it was captured, and compiling.

    Compiling is what Python itself takes at its peak for the code that fx generated, which every graph module pays.
    """
    # What torch and sympy import and keep at the first capture is not this one's: a small model pays for it.
    small = llama(2)
    fxopt.trace(small.model, (), small.inputs, dynamic_shapes=small.free if free else None, verify=False)
    subject = WEIGHED[position]()
    gc.collect()
    before = resident("VmRSS")
    forget_peak()
    traced = fxopt.trace(
        subject.model, (), subject.inputs, dynamic_shapes=subject.free if free else None, verify=False
    )
    growth = int(resident("VmHWM") - before)
    return subject.name, sum(p.nbytes for p in traced.parameters()), growth, _compiling(traced.code)


def _compiling(code: str) -> int:
    tracemalloc.start()
    compile(code, "<graph>", "exec")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak
