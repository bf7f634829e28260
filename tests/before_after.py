"""Tests of passes share this: before -> after, judged in every way that a pass promises."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

import fxopt
from fxopt import Rewrite
from fxopt.compare import unlike
from fxopt.testing import assert_equivalent, assert_round_trip, randomise

Trace = Callable[[nn.Module, Sequence[torch.Tensor]], GraphModule]


def fx_trace(model: nn.Module, inputs: Sequence[torch.Tensor]) -> GraphModule:
    """A graph without metadata."""
    return torch.fx.symbolic_trace(model)


def fxopt_trace(model: nn.Module, inputs: Sequence[torch.Tensor]) -> GraphModule:
    """A graph with metadata."""
    return fxopt.trace(model, tuple(inputs))


def rewritten(
    pass_: Rewrite[Any],
    model: nn.Module,
    *inputs: torch.Tensor,
    sites: int,
    trace: Trace = fx_trace,
    training: bool = False,
    picklable: bool = True,
) -> GraphModule:
    """Apply a pass to a model and check all that it promises; returns the rewritten graph module."""
    model = randomise(model.train(training))
    untouched = copy.deepcopy(model)
    traced = trace(model, inputs)
    before = copy.deepcopy(traced)
    assert len(pass_.explain(traced).sites) == sites, pass_.explain(traced)
    with warnings.catch_warnings():
        warnings.simplefilter("error", fxopt.VerificationWarning)
        warnings.simplefilter("ignore", fxopt.UnverifiedWarning)  # a graph without metadata
        after = pass_(traced, verify=True)
    assert sum(step.sites for step in fxopt.history(after)) == sites
    assert_untouched(untouched, model)
    if pass_.preserves_computation:
        wide, wide_inputs = copy.deepcopy(untouched).double(), in_float64(inputs)
        pair = trace(wide, wide_inputs), pass_(trace(copy.deepcopy(wide), wide_inputs))
        assert_equivalent(before, after, inputs, float64=pair)
        with torch.no_grad(), torch.random.fork_rng():
            outputs = [each(*copy.deepcopy(inputs)) for each in copy.deepcopy((before, after))]
        assert not unlike(*outputs, strides=True), "callers may `view` an output"
    assert not pass_.explain(after).sites
    code = after.code
    assert pass_(after).code == code, "a second application changed something"
    if pass_.reversible:
        copies = [copy.deepcopy(after)] + ([pickle.loads(pickle.dumps(after))] if picklable else [])
        for copied in copies:
            assert_round_trip(before, copy.deepcopy(pass_)(copied, reverse=True))
        again = pass_(pass_(pass_(copy.deepcopy(before)), reverse=True))
        assert [node.name for node in again.graph.nodes] == [node.name for node in after.graph.nodes]
    return after


def refused(
    pass_: Rewrite[Any], model: nn.Module, *inputs: torch.Tensor, reason: str, trace: Trace = fx_trace
) -> None:
    """Check that a pass leaves a model alone, for a reason that contains a text."""
    traced = trace(model, inputs)
    before = copy.deepcopy(traced)
    explanation = pass_.explain(traced)
    assert not explanation.sites, explanation
    assert any(reason in text for _, _, text in explanation.refusals), explanation
    assert_round_trip(before, pass_(traced))


def in_float64(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The inputs, floating ones in float64."""
    return [x.double() if x.is_floating_point() else x for x in inputs]


def assert_untouched(before: nn.Module, after: nn.Module) -> None:
    """The user's model is as it was: the same modules, options, weights and flags."""
    assert str(before) == str(after)
    old, new = before.state_dict(), after.state_dict()
    assert list(old) == list(new)
    assert all(torch.equal(old[name], new[name]) for name in old)
    assert [m.training for m in before.modules()] == [m.training for m in after.modules()]
    assert [p.requires_grad for p in before.parameters()] == [p.requires_grad for p in after.parameters()]
