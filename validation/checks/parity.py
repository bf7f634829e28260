"""Parity: the captured graph returns what the model returns, before any pass."""

from __future__ import annotations

import torch

from fxopt.testing import RTOL_FLOAT64, compare
from validation.comparison import judge, per_dtype
from validation.records import Finding, Outcome
from validation.subject import Subject


def check(subject: Subject, pipeline: tuple[str, ...]) -> Finding:
    """Compare the model, run eagerly, with its captured graph, in float64 and in each dtype of the entry."""
    truth, traced = subject.output(torch.float64), subject.traced(torch.float64)
    with subject.entering("run the graph"):
        wide = subject.run(traced, torch.float64)
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
    if subject.entry.sizes == "dynamic":
        measurements["relative_error_other_batch"] = _other_batch(subject)
    return Finding(measurements={**measurements, "nodes": len(subject.traced(subject.dtypes[0]).graph.nodes)})


def _other_batch(subject: Subject) -> float:
    """The error in float64 with one more row in every input; raises `AssertionError` if it is too large."""
    inputs = {name: torch.cat([value, value[:1]]) for name, value in subject.inputs(torch.float64).items()}
    model, traced = subject.model(torch.float64), subject.traced(torch.float64)
    with subject.entering("run the graph"):
        expected, actual = (subject.run(module, torch.float64, inputs) for module in (model, traced))
    with subject.entering("compare"):
        error = compare(expected, actual).max_rel
        if not error <= RTOL_FLOAT64:
            raise AssertionError(f"with one more row in the batch, in float64, the graph is {error:.3g} off")
    return error
