"""Parity: the captured graph returns what the model returns, before any pass."""

from __future__ import annotations

from fxopt.testing.free_sizes import SIZES

from ..judging.comparison import judge_graph
from ..judging.subject import Subject
from ..records import Finding, Outcome


def check(subject: Subject, pipeline: tuple[str, ...]) -> Finding:
    """Compare the eager model with its captured graph, in float64 and in its dtype; for all sizes if the entry says so."""
    captured = subject.captured(subject.wide)
    subject.measurements |= {
        "nodes": len(captured.graph.graph.nodes),
        "forward_runs": captured.graph.meta["forward_runs"],
    }
    if not subject.entry.given:
        subject.facts |= {"captured": captured.way.name, "refusal": captured.refusal}
    finding = judge_graph(subject, subject.traced)
    # The first capture of a process imports modules that the second one finds.
    seconds = [subject.captured(dtype).seconds for dtype in (subject.wide, subject.own)]
    subject.measurements["trace_seconds"] = min(seconds)
    tried = not subject.entry.sizes_are_free or SIZES in subject.oracle(subject.own).probes
    if finding.outcome is Outcome.PASS and subject.entry.given and not tried:
        reason = "the graph was captured for other sizes, too, but takes none that was tried besides those of the inputs"
        return Finding(Outcome.FAIL, reason, finding.measurements)
    return finding
