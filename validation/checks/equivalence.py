"""Equivalence: a pipeline that preserves the computation leaves the outputs as they are."""

from __future__ import annotations

import dataclasses

from ..judging.comparison import judge_graph
from ..judging.subject import Subject
from ..records import NOTHING, Finding, Outcome


def check(subject: Subject, pipeline: tuple[str, ...]) -> Finding:
    """Compare the eager model with its rewritten graph, in its dtype; for a single pass, site by site as well."""
    # Some kernels exist in only one dtype.
    if not any(
        subject.rewritten(pipeline, dtype).sites for dtype in {subject.wide, subject.dtype_of(pipeline)}
    ):
        return NOTHING
    finding = judge_graph(subject, lambda dtype: subject.rewritten(pipeline, dtype).module, pipeline)
    # A tolerance is for the whole model, not for a single site; the limits found by a sweep are not either.
    tolerated = subject.entry.tolerance(pipeline) > 0 or not subject.entry.given
    wrong = [] if tolerated else subject.wrong_sites(pipeline, subject.dtype_of(pipeline))
    if not wrong:
        return finding
    reason = "; ".join(filter(None, (finding.reason, *wrong[:3])))
    return dataclasses.replace(finding, outcome=Outcome.FAIL, reason=reason)
