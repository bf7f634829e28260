"""Round trip: undoing a reversible pipeline gives the graph back, bit for bit."""

from __future__ import annotations

from torch.fx import GraphModule

from fxopt.errors import UndoError
from fxopt.testing import assert_round_trip

from ..judging.subject import Subject
from ..records import NOTHING, Finding, Outcome


def check(subject: Subject, pipeline: tuple[str, ...]) -> Finding:
    """Compare the whole graph before a pipeline and after its undo, by the pipeline's reverse and by `undo`."""
    dtype, values = subject.dtype_of(pipeline), 0
    if not subject.rewritten(pipeline, dtype).sites:
        return NOTHING
    try:
        for way, restored in subject.restored(pipeline, dtype):
            with subject.entering("compare"):
                values += _compared(subject.traced(dtype), restored, way)
    except UndoError as error:
        return Finding(Outcome.FAIL, f"the round trip is not exact: {error}")
    return Finding(measurements={"values_compared": values})


def _compared(before: GraphModule, restored: GraphModule, way: str) -> int:
    try:
        return assert_round_trip(before, restored)
    except AssertionError as error:
        raise AssertionError(f"by {way}, {error}") from error
