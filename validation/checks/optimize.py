"""Optimize: `fxopt.optimize` of a model returns what the model returns, as fast as its report says, or says why it runs eagerly."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping
from typing import Any, cast

import torch

import fxopt
from fxopt.compare import cosine_similarity, norm_error
from fxopt.errors import FallbackWarning
from fxopt.testing import compare

from ..judging.subject import Subject
from ..records import Finding, Outcome
from ..regressions.metric import BUSY, EAGER
from ..timing import timing
from ..zoo.plan import OPTIMIZED

MOST_ERROR = {"float32": 1e-3, "bfloat16": 0.1, "int8": 0.1}
"""The limit of the relative error for each precision, relative to the norm of an output."""


def check(subject: Subject, pipeline: tuple[str, ...]) -> Finding:
    """Compare the optimized with the eager model, on the inputs and on their rows in reverse order; report the speed-up.

    A model without a graph passes, because it falls back to eager; the reason says why it has no graph.
    """
    options, dtype = OPTIMIZED[pipeline[0]], subject.own
    precision = options.get("precision", "float32")
    model, inputs = subject.model(dtype).eval(), subject.inputs(dtype)
    measured = {"cosine": 1.0, "relative_error": 0.0, "tolerance": MOST_ERROR[precision]}
    with (
        subject.entering("optimize"),
        _in_this_process(options),
        timing() as others,
        torch.no_grad(),
        warnings.catch_warnings(action="ignore", category=FallbackWarning),  # the reason has the same text
    ):
        fast: Any = fxopt.optimize(model, kwargs=inputs, **options)
        report = fast.report[-1]
        for given in (inputs, {name: value.flip(0) for name, value in inputs.items()}):
            with subject.entering("run the model"):
                expected = subject.run(model, dtype, given)
            actual = subject.run(fast, dtype, given)
            compare(expected, actual)  # raises if the structures differ
            measured["cosine"] = min(measured["cosine"], cosine_similarity(expected, actual))
            measured["relative_error"] = max(measured["relative_error"], norm_error(expected, actual))
    unfit = "; ".join(f"{name} is not used: {why}" for name, why in report.engines.items())
    if said := report.reason or report.unused or unfit:
        subject.facts[EAGER] = said
    # If the graph is not used, the call falls back to eager.
    measured["latency_ratio"] = 1.0 if report.reason or not report.speedup else 1 / report.speedup
    measured |= {"latency_ready_s": report.seconds, BUSY: 100 * others.cores()}
    with subject.entering("compare"):
        error, limit = measured["relative_error"], measured["tolerance"]
        if error <= limit:
            return Finding(reason=said, measurements=measured)
        reason = f"the outputs in {precision} moved by {error:.3g} of their norm, the limit is {limit:g}"
        return Finding(Outcome.FAIL, reason, measured)


def _in_this_process(options: Mapping[str, Any]) -> Any:
    """Make inductor compile in this process: its worker processes would still start while the next case is timed."""
    if options.get("engine") != "inductor":
        return contextlib.nullcontext()
    from torch._inductor import config  # imported here because the import takes a second

    return cast(Any, config).patch(compile_threads=1)
