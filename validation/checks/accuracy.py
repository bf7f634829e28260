"""Accuracy: how far a pipeline that does not preserve the computation moves the outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fxopt.compare import cosine_similarity, norm_error
from fxopt.errors import GuardError
from fxopt.testing import compare, leaves
from fxopt.testing.probes import not_finite

from ..judging.subject import FLOOR, Subject
from ..records import NOTHING, Finding, Outcome, one_line


def check(subject: Subject, pipeline: tuple[str, ...]) -> Finding:
    """Compute every metric of the rewritten model against the original.

    In a sweep, models are untrained: the metrics are reported, but not judged. The outputs must be finite, and have the
    same structure unless sizes depend on values.
    """
    dtype, given = subject.dtype_of(pipeline), subject.entry.given
    rewritten = subject.rewritten(pipeline, dtype)
    if not rewritten.sites:
        return NOTHING
    oracle = subject.oracle(dtype)
    with subject.entering("run the graph"):
        try:
            seen = oracle.observe(rewritten.module)
        except GuardError as error:
            if given:
                raise
            # With other numbers, a runtime check of the graph may fail: nothing was compared.
            return Finding(Outcome.REFUSED, f"in other numbers, {one_line(error)}")
    with subject.entering("compare"):
        infinite = next(filter(None, (not_finite(each.output) for each in (*oracle.expected, *seen))), "")
        finite = Finding(Outcome.FAIL, f"{infinite} is not finite") if infinite else Finding()
        if not given and _sizes_follow_values(subject.traced(dtype)):
            return finite
        if fault := oracle.fault(seen):
            return Finding(Outcome.FAIL, fault)
        if infinite:
            return finite
        pairs = zip(oracle.expected, seen, strict=True)
        measured, *others = [_measure(expected.output, actual.output) for expected, actual in pairs]
        measured["tolerance"] = subject.most_error(pipeline, dtype)
        away = max(each["relative_error"] for each in (measured, *others))
    return _judged(subject, pipeline, away, measured) if given else Finding(measurements=measured)


def _judged(
    subject: Subject, pipeline: tuple[str, ...], away: float, measured: dict[str, float | int]
) -> Finding:
    """Compare the change of the outputs with the tolerance that the zoo or the passes state."""
    silent = "" if subject.entry.tolerance(pipeline) else subject.without_tolerance(pipeline)
    moved, stated = f"the outputs moved by {away:.3g} of their norm", f"{silent} states no `tolerance`"
    limit = measured["tolerance"]
    if not away <= limit:
        texts = [f"{moved}, the limit is {limit:.3g}", *([stated] if silent else [])]
        return Finding(Outcome.FAIL, "; ".join(texts), measured)
    if silent and away > FLOOR * torch.finfo(subject.own).eps:
        return Finding(Outcome.UNJUDGED, f"{moved}; {stated}", measured)
    return Finding(measurements=measured)


def _sizes_follow_values(graph: GraphModule) -> bool:
    """Tell whether some sizes are known only at run time, such as the number of key points in an image."""
    values = (node.meta.get("val") for node in graph.graph.nodes)
    return any(isinstance(value, Tensor) and free_unbacked_symbols(value) for value in values)


def _measure(original: Any, output: Any) -> dict[str, float | int]:
    compared, agreed = compare(original, output), agreement(_floating(original), _floating(output))
    return ({} if agreed is None else {"agreement": agreed}) | {
        "cosine": cosine_similarity(original, output),
        "relative_error": norm_error(original, output),
        "tensors_compared": compared.tensors,
    }


def agreement(reference: Mapping[str, Tensor], candidate: Mapping[str, Tensor]) -> float | None:
    """The share of positions with the same argmax along the last axis: the predicted class or token.

    If tensors of the output are called logits, only these count. A model without a head has no logits: all its vectors
    count instead. None for outputs without vectors, such as a loss.

    Example:
        >>> agreement({"logits": torch.eye(2)}, {"logits": torch.tensor([[2.0, 1.0], [2.0, 1.0]])})
        0.5
    """
    vectors = [path for path, tensor in reference.items() if tensor.ndim and tensor.shape[-1] > 1]
    chosen = [path for path in vectors if "logits" in path] or vectors
    if not chosen:
        return None
    same = [(reference[path].argmax(-1) == candidate[path].argmax(-1)).flatten() for path in chosen]
    return float(torch.cat(same).double().mean())


def _floating(output: Any) -> dict[str, Tensor]:
    """The floating-point tensors of an output by path, in float64."""
    return {
        path: value.double()
        for path, value in leaves(output)
        if isinstance(value, Tensor) and value.is_floating_point()
    }
