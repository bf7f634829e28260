"""The verdict on outputs that should be the same: in float64 without doubt, in the model's own dtype with measure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fxopt.testing import RTOL_FLOAT64, compare, leaves
from validation.records import Finding, Outcome
from validation.subject import Subject

FACTOR = 2.0
"""In its own dtype, a rewrite may be this many times as far from the float64 output as the original is."""

FLOOR = 8.0
"""And this many units in the last place of the largest value farther: the original may be exact by chance."""


def judge_graph(subject: Subject, graph: Callable[[torch.dtype], nn.Module]) -> Finding:
    """Compare the model, run eagerly, with its graph, in float64 and in each dtype of the entry, until one fails."""
    truth, module = subject.output(torch.float64), graph(torch.float64)
    with subject.entering("run the graph"):
        wide = subject.run(module, torch.float64)
    measurements: dict[str, float | int] = {}
    for dtype in subject.dtypes:
        original, module = subject.output(dtype), graph(dtype)
        with subject.entering("run the graph"):
            own = subject.run(module, dtype)
        with subject.entering("compare"):
            finding = judge(truth=truth, wide=wide, original=original, own=own, dtype=dtype)
        measurements |= per_dtype(dtype, subject.dtypes[0], finding.measurements)
        if finding.outcome is not Outcome.PASS:
            return Finding(finding.outcome, finding.reason, measurements)
    return Finding(measurements=measurements)


def judge(*, truth: Any, wide: Any, original: Any, own: Any, dtype: torch.dtype) -> Finding:
    """Compare a rewritten model with its original, every tensor of the output.

    Args:
        truth: what the original returns in float64.
        wide: what the rewritten model returns in float64.
        original: what the original returns in `dtype`.
        own: what the rewritten model returns in `dtype`.
        dtype: the model's own.

    Returns:
        `pass` or `fail`, with the errors and their limits; errors are relative to the largest value of a tensor.

    Raises:
        AssertionError: the outputs differ in structure, or hold nothing to compare.
    """
    exact = compare(truth, wide)
    compare(original, own)  # the same structure, shapes and dtypes
    before, after = (compare(truth, output, dtypes=False) for output in (original, own))
    limit = FACTOR * before.max_rel + FLOOR * torch.finfo(dtype).eps
    measurements = {
        "max_abs_error": after.max_abs,
        "relative_error": after.max_rel,
        "relative_error_original": before.max_rel,
        "tolerance": limit,
        "max_abs_error_float64": exact.max_abs,
        "relative_error_float64": exact.max_rel,
        "tolerance_float64": RTOL_FLOAT64,
        "tensors_compared": exact.tensors,
        "values_compared": exact.values,
    }
    if hidden := not_finite(truth):
        reason = f"the original's own {hidden} is not finite everywhere, so that nothing is proved"
    elif type(truth) is not type(wide):
        reason = f"returns a {type(wide).__name__}, the original a {type(truth).__name__}"
    elif not exact.max_rel <= RTOL_FLOAT64:
        reason = f"in float64, {exact.where} is {exact.max_rel:.3g} off, more than {RTOL_FLOAT64:.0e}"
    elif not after.max_rel <= limit:
        reason = (
            f"in {str(dtype).removeprefix('torch.')}, {after.where} is {after.max_rel:.3g} from the float64 "
            f"output, the original {before.max_rel:.3g}; the limit is {limit:.3g}"
        )
    else:
        return Finding(measurements=measurements)
    return Finding(Outcome.FAIL, reason, measurements)


def not_finite(output: Any) -> str:
    """The path of a tensor of an output that holds NaN or infinity; empty if none does."""
    for path, value in leaves(output):
        if isinstance(value, Tensor) and not value.isfinite().all():
            return path
    return ""


def per_dtype(
    dtype: torch.dtype, first: torch.dtype, measurements: dict[str, float | int]
) -> dict[str, float | int]:
    """Measurements in a dtype other than the model's first carry its name."""
    suffix = "" if dtype == first else f"_{str(dtype).removeprefix('torch.')}"
    return {f"{name}{suffix}": value for name, value in measurements.items()}
