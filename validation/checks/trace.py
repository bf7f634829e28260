"""Trace parity: the captured graph returns what the model returns, before any pass."""

from __future__ import annotations

import torch

from validation.comparison import judge, per_dtype
from validation.records import Finding, Outcome
from validation.subject import Subject


def check(subject: Subject, pipeline: tuple[str, ...]) -> Finding:
    """Compare eager and traced, in float64 and in each dtype of the entry."""
    truth = subject.output(torch.float64)
    wide = subject.run(subject.traced(torch.float64), torch.float64)
    measurements: dict[str, float | int] = {}
    for dtype in subject.dtypes:
        original, traced = subject.output(dtype), subject.traced(dtype)
        with subject.entering("run the graph"):
            own = subject.run(traced, dtype)
        with subject.entering("compare"):
            finding = judge(truth=truth, wide=wide, original=original, own=own, dtype=dtype)
        measurements |= per_dtype(dtype, subject.dtypes[0], finding.measurements)
        if finding.outcome is not Outcome.PASS:
            return Finding(finding.outcome, finding.reason, measurements)
    return Finding(measurements={**measurements, "nodes": len(subject.traced(subject.dtypes[0]).graph.nodes)})
