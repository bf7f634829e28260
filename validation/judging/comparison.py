"""Converts the oracle's verdict on a graph to a finding."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from fxopt.testing import compare

from ..records import Finding, Outcome, one_line
from .subject import Subject


def judge_graph(
    subject: Subject, graph: Callable[[torch.dtype], nn.Module], pipeline: tuple[str, ...] = ()
) -> Finding:
    """Compare the eager model with its graph, in float64 and in the dtype of the entry; the grade becomes a fact."""
    dtype = subject.dtype_of(pipeline)
    wide, module, oracle = graph(subject.wide), graph(dtype), subject.oracle(dtype)
    with subject.entering("run the graph"):
        stated = subject.entry.tolerance(pipeline)
        verdict = oracle.judge(module, wide, tolerance=stated)
    measurements = {  # relative to the largest value of a tensor
        "relative_error": verdict.own.max_rel,
        "relative_error_original": verdict.baseline.max_rel,
        "tolerance": max(verdict.own_limit, stated),
        "relative_error_float64": verdict.float64.max_rel,
        "tolerance_float64": max(subject.rtol, stated),
        "tensors_compared": verdict.float64.tensors,
        "values_compared": verdict.float64.values,
    }
    subject.facts["grade"] = str(verdict.grade)
    if oracle.unproved:
        text = f"the original's own {oracle.unproved} is not finite everywhere, so that nothing is proved"
        return Finding(Outcome.FAIL, text, measurements)
    if not verdict.grade.passes:
        text = verdict.reason.replace("in its own dtype", f"in {str(dtype).removeprefix('torch.')}", 1)
        return Finding(Outcome.FAIL, text, measurements)
    return Finding(measurements=measurements)


def difference(expected: object, actual: object, rtol: float) -> str:
    """Describe how two outputs differ by more than `rtol` of the largest value of a tensor; empty if they do not."""
    try:
        found = compare(expected, actual)
    except AssertionError as error:
        return one_line(error)
    return f"{found.where} is {found.max_rel:.3g} of its largest value off" if found.max_rel > rtol else ""
