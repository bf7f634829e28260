"""Parity: the captured graph returns what the model returns, before any pass."""

from __future__ import annotations

import torch

from fxopt.testing import RTOL_FLOAT64, compare
from validation.comparison import judge_graph
from validation.records import Finding, Outcome
from validation.subject import Subject


def check(subject: Subject, pipeline: tuple[str, ...]) -> Finding:
    """Compare the model, run eagerly, with its captured graph, in float64 and in each dtype of the entry."""
    finding = judge_graph(subject, subject.traced)
    if finding.outcome is not Outcome.PASS:
        return finding
    measurements = {**finding.measurements, "nodes": len(subject.traced(subject.dtypes[0]).graph.nodes)}
    if subject.entry.sizes == "dynamic":
        measurements["relative_error_other_batch"] = _other_batch(subject)
    return Finding(measurements=measurements)


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
