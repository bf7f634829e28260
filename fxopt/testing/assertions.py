"""An assertion that users write: one module does what another does."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from fxopt.testing.oracle import RTOL_FLOAT64, Oracle
from fxopt.testing.probes import input_guard
from fxopt.testing.verdicts import Verdict

Equivalence = Verdict
"""What `assert_equivalent` returns."""


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

    They are called on the inputs, on other and larger values, and, where a graph leaves sizes free, on other
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
        float64: reference and candidate in float64, when a converted copy does not do, for example because
            a dtype is baked into the graph. By default, deep copies are converted.
        rtol: tolerance in float64, relative to the largest value of each tensor.
        factor: see above.
        floor: see above; relative to the largest value of each tensor.

    Returns:
        The verdict: its grade, and the measured differences.

    Raises:
        AssertionError: an output differs in the type of a container, shape, dtype or value, or holds no tensor; a
            later call changes an earlier result; inputs or buffers differ after the call; or the reference does
            not repeat itself.

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
        raise AssertionError(verdict.reason)
    return verdict
