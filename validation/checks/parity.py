"""Parity: the captured graph returns what the model returns, before any pass."""

from __future__ import annotations

from torch import nn

from fxopt.errors import GuardError
from fxopt.testing.free_sizes import SIZES

from ..judging.comparison import difference, judge_graph
from ..judging.rewritten import size
from ..judging.subject import Subject
from ..records import Finding, Outcome
from ..zoo.build import free_sizes
from ..zoo.sources import FIXED, FIXED_BY_MODEL, FREE, NONE

OTHER_SIZES = {
    "batch": ({"batch": 3}, {"batch": 1}),
    "sequence": ({"sequence": 21}, {"sequence": 5}),
}
"""Where a graph of a sweep is run besides the sizes it was captured at: its entry does not say which sizes are free."""

GUARDED = "guarded: "


def check(subject: Subject, pipeline: tuple[str, ...]) -> Finding:
    """Compare the model, run eagerly, with its captured graph, in float64 and in each dtype of the entry; of all sizes if it says so."""
    captured = subject.captured(subject.wide)
    subject.measurements |= {
        **size(captured.graph),
        "forward_runs": captured.graph.meta["forward_runs"],
    }
    if not subject.entry.given:
        subject.facts |= {"captured": captured.way.name, "refusal": next(iter(captured.refusals), "")}
    finding = judge_graph(subject, subject.traced)
    # The first capture of a process imports what others find there.
    every = (subject.wide, *subject.dtypes)
    subject.measurements["trace_seconds"] = min(subject.captured(dtype).seconds for dtype in every)
    if finding.outcome is not Outcome.PASS:
        return finding
    if not subject.entry.given:
        subject.measurements |= finding.measurements
        subject.facts |= _became(subject)
        return finding
    if subject.entry.sizes_are_free and SIZES not in subject.oracle(subject.dtypes[0]).probes:
        reason = "the graph was captured for other sizes, too, but takes none that was tried besides those of the inputs"
        return Finding(Outcome.FAIL, reason, finding.measurements)
    return finding


def _became(subject: Subject) -> dict[str, str]:
    """Try each size that the inputs of a sweep can have, and say whether it is free, or what forbids it."""
    way = subject.captured(subject.wide).way
    if not way.shapes and free_sizes(subject.entry, subject.model(subject.wide)):
        return dict.fromkeys(OTHER_SIZES, FIXED)
    became = {}
    for name, sizes in OTHER_SIZES.items():
        found = [_at(subject, each) for each in sizes]
        # What is free at one size the model itself may forbid at the other; what the graph forbids is not free.
        guarded = [text for text in found if text.startswith(GUARDED)]
        became[name] = guarded[0] if guarded else FREE if FREE in found else found[0]
    return became


def _at(subject: Subject, sizes: dict[str, int]) -> str:
    """Say what became of one size; raises `AssertionError` where the graph takes it, and gives something else."""
    graph = subject.traced(subject.wide)
    with subject.entering("other sizes"):
        fate, why = fate_of(subject, graph, sizes, GuardError)
    if fate == FIXED:
        return f"{GUARDED}{why}"
    with subject.entering("compare"):
        if why:
            where = ", ".join(f"{name} {size}" for name, size in sizes.items())
            raise AssertionError(f"with {where}, {why}")
    return fate


def fate_of(
    subject: Subject, graph: nn.Module, sizes: dict[str, int], refusal: type[Exception]
) -> tuple[str, str]:
    """Try sizes in a graph: their fate, and why it refuses them, or how what it gives differs from the model."""
    dtype, stage = subject.wide, subject.stage
    given = {name: value.shape for name, value in subject.inputs(dtype).items()}
    try:
        inputs = subject.inputs(dtype, **sizes)
        if {name: value.shape for name, value in inputs.items()} == given:
            return NONE, ""
        expected = subject.run(subject.model(dtype), dtype, inputs)
    except Exception:  # whatever it raises, the model itself does not take this size
        subject.enter(stage)
        return FIXED_BY_MODEL, ""
    try:
        actual = subject.run(graph, dtype, subject.inputs(dtype, **sizes))
    except refusal as error:
        kind = "" if isinstance(error, GuardError) else f"{type(error).__name__}: "
        return FIXED, " ".join(f"{kind}{error}".split())
    return FREE, difference(expected, actual, subject.rtol)
