"""The cost of the check of the inputs, beside the forward that it stands before."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from rich.table import Table

import fxopt

from ..timing import of_runs
from .models import bert_base, text_inputs

_CHECKS = 100


def guard_table(rounds: int) -> Table:
    """BERT-base at batch 1 and sequence 128, captured with both free."""
    inputs = text_inputs(1, 128)
    subject = bert_base()
    traced = fxopt.trace(subject.model, (), inputs, dynamic_shapes=subject.free)
    guard: Any = traced.input_guard

    def check() -> None:
        for _ in range(_CHECKS):
            guard(**inputs)

    with torch.inference_mode():
        forward, checks = of_runs([lambda: traced(**inputs), check], rounds)
    whole, one = statistics.median(forward), statistics.median(checks) / _CHECKS
    table = Table(
        *("forward, ms", "check of the inputs, ms", "share"),
        title=f"BERT-base, batch 1, sequence 128, CPU, {torch.get_num_threads()} threads: median of {rounds}",
    )
    table.add_row(f"{1000 * whole:.1f}", f"{1000 * one:.4f}", f"{one / whole:.3%}")
    return table
