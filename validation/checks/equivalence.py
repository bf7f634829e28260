"""Equivalence: a pipeline that preserves the computation leaves the outputs as they are."""

from __future__ import annotations

import torch

from validation.comparison import judge, per_dtype
from validation.records import Finding, Outcome
from validation.subject import Subject


def check(subject: Subject, pipeline: tuple[str, ...]) -> Finding:
    """Compare the model, run eagerly, with its rewritten graph, in float64 and in each dtype of the entry."""
    rewritten = subject.rewritten(pipeline, torch.float64)
    if not sum(rewritten.sites):
        return Finding(Outcome.NO_OP, "nothing to rewrite")
    truth = subject.output(torch.float64)
    with subject.entering("run the graph"):
        wide = subject.run(rewritten.module, torch.float64)
    measurements: dict[str, float | int] = {}
    for dtype in subject.dtypes:
        original, candidate = subject.output(dtype), subject.rewritten(pipeline, dtype)
        with subject.entering("run the graph"):
            own = subject.run(candidate.module, dtype)
        with subject.entering("compare"):
            finding = judge(truth=truth, wide=wide, original=original, own=own, dtype=dtype)
        measurements |= per_dtype(dtype, subject.dtypes[0], finding.measurements)
        if finding.outcome is not Outcome.PASS:
            return Finding(finding.outcome, finding.reason, measurements)
    return Finding(measurements=measurements)
