"""Parity: the captured graph returns what the model returns, before any pass."""

from __future__ import annotations

from fxopt.testing.probes import SIZES

from ..comparison import judge_graph
from ..records import Finding, Outcome
from ..subject import Subject


def check(subject: Subject, pipeline: tuple[str, ...]) -> Finding:
    """Compare the model, run eagerly, with its captured graph, in float64 and in each dtype of the entry; of all sizes if it says so."""
    finding = judge_graph(subject, subject.traced)
    if finding.outcome is not Outcome.PASS:
        return finding
    measurements = {**finding.measurements, "nodes": len(subject.traced(subject.dtypes[0]).graph.nodes)}
    if subject.entry.sizes == "dynamic" and SIZES not in subject.oracle(subject.dtypes[0]).probes:
        reason = "the graph was captured for all sizes, but takes none other than those of the inputs"
        return Finding(Outcome.FAIL, reason, measurements)
    return Finding(measurements=measurements)
