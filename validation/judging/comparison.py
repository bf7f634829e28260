"""From the verdict of the oracle on a graph to a finding."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from fxopt.testing import Verdict, compare

from ..records import Finding, Outcome
from .subject import Subject

V = TypeVar("V")


def judge_graph(
    subject: Subject, graph: Callable[[torch.dtype], nn.Module], pipeline: tuple[str, ...] = ()
) -> Finding:
    """Compare the model, run eagerly, with its graph, in float64 and in each dtype of the entry, until one fails.

    The grade of each dtype becomes a fact of the record.
    """
    measurements: dict[str, float | int] = {}
    dtypes = subject.dtypes_of(pipeline)
    for dtype in dtypes:
        wide, module, oracle = graph(subject.wide), graph(dtype), subject.oracle(dtype)
        with subject.entering("run the graph"):
            verdict = oracle.judge(module, wide, tolerance=subject.entry.tolerance(pipeline))
        measurements |= per_dtype(dtype, dtypes[0], _measured(verdict, subject.rtol))
        subject.facts |= per_dtype(dtype, dtypes[0], {"grade": str(verdict.grade)})
        reason = verdict.reason
        if oracle.unproved:
            reason = (
                f"the original's own {oracle.unproved} is not finite everywhere, so that nothing is proved"
            )
        if oracle.unproved or not verdict.grade.passes:
            text = reason.replace("in its own dtype", f"in {str(dtype).removeprefix('torch.')}", 1)
            return Finding(Outcome.FAIL, text, measurements)
    return Finding(measurements=measurements)


def difference(expected: object, actual: object, rtol: float) -> str:
    """How two outputs differ by more than `rtol` of the largest value of a tensor; empty where they do not."""
    try:
        found = compare(expected, actual)
    except AssertionError as error:
        return " ".join(str(error).split())
    if found.max_rel <= rtol:
        return ""
    return f"{found.where} is {found.max_rel:.3g} of its largest value off"


def per_dtype(dtype: torch.dtype, first: torch.dtype, values: dict[str, V]) -> dict[str, V]:
    """Measurements in a dtype other than the model's first carry its name."""
    suffix = "" if dtype == first else f"_{str(dtype).removeprefix('torch.')}"
    return {f"{name}{suffix}": value for name, value in values.items()}


def _measured(verdict: Verdict, rtol: float) -> dict[str, float | int]:
    """The errors of a verdict and their limits; errors are relative to the largest value of a tensor."""
    return {
        "relative_error": verdict.own.max_rel,
        "relative_error_original": verdict.baseline.max_rel,
        "tolerance": verdict.own_limit,
        "relative_error_float64": verdict.float64.max_rel,
        "tolerance_float64": rtol,
        "tensors_compared": verdict.float64.tensors,
        "values_compared": verdict.float64.values,
    }
