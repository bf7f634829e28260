"""An assertion that users write: one module does what another does."""

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
    """Assert that two modules do the same: outputs, every tensor of them, and what they write.

    They are called on the inputs, on other and larger values, on NaN and infinities, and, where a graph leaves sizes free, on other
    sizes. First both in float64, where a correct rewrite agrees to `rtol` and a wrong one does not. Then in
    their own dtype, where the candidate may be `factor` times as far from the float64 output as the reference
    itself, plus `floor` units in the last place.

    Weights that a pass computed in float32, such as a folded batch normalisation, are rounded, and stay so in
    a copy in float64. A candidate with such weights is judged by the second rule alone, and the verdict says so: for
    a proof, apply the pass to the model in float64 as well and give both as `float64`.

    Args:
        reference: the module that is right.
        candidate: the module to judge.
        args: positional inputs, in the modules' own dtype; floating ones are converted where needed.
        kwargs: keyword inputs.
        float64: reference and candidate in float64. By default, deep copies are converted, which is not possible for a graph
            with dtype constants, such as a captured BERT: capture `model.double()` as well for these.
        rtol: tolerance in float64, relative to the largest value of each tensor.
        factor: largest accepted ratio of errors vs float64, candidate ÷ reference.
        floor: units in the last place that are accepted besides, relative to the largest value of each tensor.

    Returns:
        The verdict: its grade, and the measured differences.

    Raises:
        GuardError: a graph contains dtype constants, and `float64` is not given.
        AssertionError: an output differs in the type of a container, shape, dtype, device or value, or holds no tensor; a
            later call changes an earlier result; inputs, buffers or parameters differ after the call; an output shares memory with an
            input, a weight or another output, and that of the reference does not; a graph takes other inputs; or the reference does
            not repeat itself, or gives nothing but NaN and infinities. Where the reference is a graph, or the candidate one whose passes can be undone, the
            message names the first node that parts, as `first_divergence` finds it.

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
    # A copy of the candidate, which comes to the calls that count as it was given.
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
    """Find the first node of a changed graph that does not do what the original does.

    Both are run node by node on the inputs of `assert_equivalent`, in float64 and then in their own dtype. A node is held
    against the one of its name in the original, or against the one that the log of a pass says it stands for; a new node
    may give anything, as long as what follows is right.

    Args:
        before: the graph before the passes: a deep copy made then, or `fxopt.undo` of a copy.
        after: the graph after them.
        args: positional inputs, in the modules' own dtype.
        kwargs: keyword inputs.
        float64: both graphs in float64, when converted copies do not do.

    Returns:
        The node with its module, the line of the model and the pass that touched it last; `None` where no node parts.

    Raises:
        TypeError: `before` or `after` is no graph module.

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
        in float64, it first parts at node _0 (module 0): ... of its largest value off, where ... is right
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
    """Where a candidate that the oracle calls wrong parts from the reference; empty where nothing tells.

    The nodes of the reference tell, or those of the candidate with its passes undone; of a graph without passes, what the
    model computes on its way.
    """
    pairs = [(reference, candidate), *([float64] if float64 else [])]
    try:
        graphs = [(_original(left, right), right) for left, right in pairs]
        found: Divergence | str | None = None
        if all(left is not None and isinstance(right, GraphModule) for left, right in graphs):
            found = oracle.first_divergence(*graphs[0], *graphs[1:])  # type: ignore[arg-type]
        elif isinstance(candidate, GraphModule) and not history(candidate):
            found = oracle.parting_place(reference, candidate)
    except Exception as error:  # such as one of the model: the verdict stands, whatever this is
        return f"where, cannot be told: {error_text(error)}"
    return str(found or "")


def _original(reference: nn.Module, candidate: nn.Module) -> GraphModule | None:
    """The graph that a candidate was made of: the reference, or the candidate with its passes undone."""
    if isinstance(reference, GraphModule):
        return reference
    if not isinstance(candidate, GraphModule) or not (steps := len(history(candidate))):
        return None
    try:
        return undo(copy.deepcopy(candidate), steps)
    except UndoError:
        return None
