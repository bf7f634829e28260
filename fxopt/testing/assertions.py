"""Assertions for users: two modules behave alike, and the first node where two graphs diverge."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.fx import GraphModule

from fxopt.errors import UndoError, error_text
from fxopt.rewriting.history import history, undo
from fxopt.testing.divergence import Divergence
from fxopt.testing.free_sizes import input_guard
from fxopt.testing.oracle import RTOL_FLOAT64, Oracle
from fxopt.testing.verdicts import Grade, Verdict

Equivalence = Verdict
"""The type that `assert_equivalent` returns."""


def assert_equivalent(
    reference: nn.Module,
    candidate: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    float64: tuple[nn.Module, nn.Module] | None = None,
    rtol: float = RTOL_FLOAT64,
    factor: float = 2.0,
    floor: float = 4.0,
) -> Verdict:
    """Assert that two modules behave alike: every tensor of the outputs, and all in-place writes.

    Both are called on the inputs, on other and larger values, on NaN and infinities, and on other sizes if a graph has dynamic
    sizes. The first comparison is in float64, where a correct rewrite agrees to `rtol` and a wrong one does not. The second is in
    their own dtype, where the candidate may be `factor` times as far from the float64 output as the reference,
    plus `floor` units in the last place.

    Weights that a pass computed in float32, such as a folded batch normalisation, are rounded, and a copy in float64
    keeps the rounding. A candidate with such weights is judged by the second rule only, and the verdict says so. For
    a proof, apply the pass to the model in float64 as well, and pass both as `float64`.

    Args:
        reference: the module that is right.
        candidate: the module to judge.
        args: positional inputs, in the modules' own dtype; floating ones are converted as needed.
        kwargs: keyword inputs.
        float64: reference and candidate in float64. By default, deep copies are converted, which is not possible for a graph
            with dtype constants, such as a captured BERT: for such a graph, capture `model.double()` as well.
        rtol: tolerance in float64, relative to the largest value of each tensor.
        factor: largest accepted ratio of errors vs float64, candidate ÷ reference.
        floor: units in the last place that are accepted in addition, relative to the largest value of each tensor.

    Returns:
        The verdict: its grade, and the measured differences.

    Raises:
        GuardError: a graph contains dtype constants, and `float64` is not given.
        AssertionError: an output differs in the type of a container, shape, dtype, device or value, or contains no tensor; a
            later call changes an earlier result; inputs, buffers or parameters differ after the call; an output shares memory
            with an input, a weight or another output, and that of the reference does not; a graph accepts other inputs; the
            reference does not repeat its results; or all its outputs are NaN and infinities. If the reference is a graph, or
            the candidate a graph whose passes can be undone, the message names the first node whose value diverges.

    Example:
        >>> import torch
        >>> linear = torch.nn.Linear(2, 3)
        >>> verdict = assert_equivalent(linear, torch.fx.symbolic_trace(linear), [torch.randn(4, 2)])
        >>> print(verdict)
        bit-exact
        >>> verdict.own.tensors, verdict.own.max_abs <= 1e-6
        (1, True)
    """
    wide_reference, wide_candidate = float64 or (None, None)
    # A copy, so that the oracle's own calls do not change the state of the candidate.
    captured = (
        reference if input_guard(reference) else copy.deepcopy(candidate) if input_guard(candidate) else None
    )
    oracle = Oracle(
        reference,
        args,
        kwargs,
        float64=wide_reference,
        captured=captured,
        rtol=rtol,
        factor=factor,
        floor=floor,
    )
    verdict = oracle.judge(candidate, wide_candidate)
    if not verdict.grade.passes:
        where = place_of_error(oracle, reference, candidate, float64) if verdict.grade is Grade.WRONG else ""
        raise AssertionError("; ".join(filter(None, [verdict.reason, where])))
    if oracle.blank:
        raise AssertionError(
            "the outputs of the reference are NaN or infinite everywhere, so nothing was compared: give other inputs, or "
            "weights, for example by fxopt.testing.randomise"
        )
    return verdict


def first_divergence(
    before: GraphModule,
    after: GraphModule,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    float64: tuple[GraphModule, GraphModule] | None = None,
) -> Divergence | None:
    """Find the first node of a changed graph whose value diverges from the original.

    Both graphs are run node by node on the inputs of `assert_equivalent`, in float64 and then in their own dtype. A node is
    compared with the node of its name in the original, or with the node that it replaces according to the log of a pass. A
    new node may have any value, as long as the nodes that follow are right.

    Args:
        before: the graph before the passes: a deep copy made in advance, or `fxopt.undo` of a copy.
        after: the graph after the passes.
        args: positional inputs, in the modules' own dtype.
        kwargs: keyword inputs.
        float64: both graphs in float64, if copies cannot be converted.

    Returns:
        The node with its module, the line of the model and the pass that changed it last; `None` if no node diverges.

    Raises:
        TypeError: `before` or `after` is not a graph module.

    Example:
        >>> import copy, torch
        >>> before = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh()))
        >>> after = copy.deepcopy(before)
        >>> with torch.no_grad():
        ...     _ = after.get_submodule("0").bias.add_(1)
        >>> found = first_divergence(before, after, [torch.ones(1, 2)])
        >>> found.node, found.module
        ('_0', '0')
        >>> print(found)
        in float64, it first diverges at node _0 (module 0): off by ... of its largest value; the limit is ...
    """
    wide = float64[0] if float64 else None
    oracle = Oracle(before, args, kwargs, float64=wide, captured=before if input_guard(before) else None)
    return oracle.first_divergence(before, after, float64)


def place_of_error(
    oracle: Oracle,
    reference: nn.Module,
    candidate: nn.Module,
    float64: tuple[nn.Module, nn.Module] | None = None,
) -> str:
    """Describe where a wrong candidate diverges from the reference; empty if that cannot be found.

    The candidate is compared node by node with the reference, or with its own graph after undo of its passes. A graph
    without passes is compared with the intermediate values of the model.
    """
    pairs = [(reference, candidate), *([float64] if float64 else [])]
    try:
        graphs = [(_original(left, right), right) for left, right in pairs]
        found: Divergence | str | None = None
        if all(left is not None and isinstance(right, GraphModule) for left, right in graphs):
            found = oracle.first_divergence(*graphs[0], *graphs[1:])  # type: ignore[arg-type]
        elif isinstance(candidate, GraphModule) and not history(candidate):
            found = oracle.place_of_divergence(reference, candidate)
    except Exception as error:  # such as one of the model: it must not hide the verdict
        return f"where, cannot be told: {error_text(error)}"
    return str(found or "")


def _original(reference: nn.Module, candidate: nn.Module) -> GraphModule | None:
    """The graph before the passes: the reference, or a copy of the candidate with its passes undone; None if there is none."""
    if isinstance(reference, GraphModule):
        return reference
    if not isinstance(candidate, GraphModule) or not (steps := len(history(candidate))):
        return None
    try:
        return undo(copy.deepcopy(candidate), steps)
    except UndoError:
        return None
