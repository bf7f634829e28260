"""Round trip: undoing a reversible pipeline gives the graph back, bit for bit."""

from __future__ import annotations

from fxopt.errors import UndoError
from fxopt.testing import assert_round_trip
from validation.records import Finding, Outcome
from validation.subject import Subject


def check(subject: Subject, pipeline: tuple[str, ...]) -> Finding:
    """Compare names, order, values, dtypes, ties, flags and code of the graph before and after, in each dtype."""
    values = 0
    for dtype in subject.dtypes:
        if not sum(subject.rewritten(pipeline, dtype).sites):
            return Finding(Outcome.NO_OP, "nothing to rewrite")
        try:
            restored = subject.restored(pipeline, dtype)
        except UndoError as error:
            return Finding(Outcome.FAIL, f"the round trip is not exact: {error}")
        with subject.entering("compare"):
            values += assert_round_trip(subject.traced(dtype), restored)
    return Finding(measurements={"values_compared": values})
