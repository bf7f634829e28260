"""Accuracy: how far a pipeline that does not preserve the computation moves the outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fxopt.errors import GuardError
from fxopt.testing import compare, leaves
from fxopt.testing.probes import not_finite

from ..judging.comparison import per_dtype
from ..judging.metrics import METRICS
from ..judging.subject import FLOOR, Subject
from ..records import Finding, Outcome


def check(subject: Subject, pipeline: tuple[str, ...]) -> Finding:
    """Every metric of the rewritten model against the original, in each dtype.

    Of a sweep, whose models have learned nothing, the metrics are reported, but not judged; the results must be finite,
    and of the same form where the values do not decide on it.
    """
    measurements: dict[str, float | int] = {}
    problems: list[str] = []
    silent = (
        subject.entry.given and not subject.entry.tolerance(pipeline) and subject.without_tolerance(pipeline)
    )
    moved = ""
    for dtype in subject.dtypes_of(pipeline):
        rewritten = subject.rewritten(pipeline, dtype)
        if not sum(rewritten.sites):
            return Finding(Outcome.NO_OP, "nothing to rewrite")
        oracle = subject.oracle(dtype)
        with subject.entering("run the graph"):
            try:
                seen = oracle.observe(rewritten.module)
            except GuardError as error:
                if subject.entry.given:
                    raise
                # In other numbers, what the graph decides by may fall otherwise: nothing was compared.
                return Finding(Outcome.REFUSED, f"in other numbers, {' '.join(str(error).split())}")
        with subject.entering("compare"):
            if bad := next(filter(None, (not_finite(each.output) for each in (*oracle.expected, *seen))), ""):
                problems.append(f"{bad} is not finite")
            if not subject.entry.given and _sizes_follow_values(subject.traced(dtype)):
                continue
            if fault := oracle.fault(seen):
                return Finding(Outcome.FAIL, fault, measurements)
            measured, *others = [
                _measure(expected.output, actual.output)
                for expected, actual in zip(oracle.expected, seen, strict=True)
            ]
            away = max(each["relative_error"] for each in (measured, *others))
            measured["tolerance"] = limit = subject.most_error(pipeline, dtype)
            if subject.entry.given and not problems and not away <= limit:
                problems.append(f"the outputs moved by {away:.3g} of their norm, the limit is {limit:.3g}")
            if silent and away > FLOOR * torch.finfo(dtype).eps:
                moved = f"the outputs moved by {away:.3g} of their norm; {silent} states no `tolerance`"
        measurements |= per_dtype(dtype, subject.dtypes[0], measured)
    if problems:
        problems += [f"{silent} states no `tolerance`"] if silent else []
        return Finding(Outcome.FAIL, "; ".join(problems), measurements)
    return Finding(Outcome.UNJUDGED if moved else Outcome.PASS, moved, measurements)


def _sizes_follow_values(graph: GraphModule) -> bool:
    """Tell whether there are sizes that only a run knows, such as the number of key points in an image."""
    values = (node.meta.get("val") for node in graph.graph.nodes)
    return any(isinstance(value, Tensor) and free_unbacked_symbols(value) for value in values)


def _measure(original: Any, output: Any) -> dict[str, float | int]:
    compared = compare(original, output)
    reference, candidate = floating(original), floating(output)
    measured = {name: metric(reference, candidate) for name, metric in METRICS.items()}
    return {**measured, "tensors_compared": compared.tensors}


def floating(output: Any) -> dict[str, Tensor]:
    """The floating tensors of an output by their paths, in float64."""
    return {
        path: value.double()
        for path, value in leaves(output)
        if isinstance(value, Tensor) and value.is_floating_point()
    }
