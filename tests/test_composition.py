"""Compositions: their order, what follows from their parts, and the two transformations that change nothing."""

import copy

import pytest
import torch
from torch import nn

import fxopt
from fxopt import (
    ChangeTrueDivToMulByInverse,
    DeepCopy,
    FuseBiasInLinear,
    LintAndRecompile,
    MergeLinears,
    PassError,
    ReplaceActivation,
    ReversibleTransformation,
    UndoError,
    VerificationWarning,
    compose,
    history,
)
from fxopt.testing import assert_round_trip, randomise
from tests.example_passes import THREE, TWO, BreaksTheGraph, ChangeMulToAdd, MulToMulTimesTwo, product


def test_compose_applies_in_order():
    assert compose(MulToMulTimesTwo(), ChangeMulToAdd())(product())(TWO, THREE) == 2 + 2 + 3
    assert compose(ChangeMulToAdd(), MulToMulTimesTwo())(product())(TWO, THREE) == 5


def test_what_a_composition_is_follows_from_its_parts():
    keeps = compose(MergeLinears(), ChangeTrueDivToMulByInverse())
    assert keeps.preserves_computation
    assert isinstance(keeps, ReversibleTransformation)
    changes = compose(MergeLinears(), ReplaceActivation())
    assert not changes.preserves_computation
    assert isinstance(changes, ReversibleTransformation)
    assert not isinstance(compose(MergeLinears(), ChangeMulToAdd()), ReversibleTransformation)
    assert compose().preserves_computation


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        return self.q(x) / 2, self.k(x)


def test_a_nested_composition_is_undone_in_reverse_order():
    traced = torch.fx.symbolic_trace(Head())
    before = copy.deepcopy(traced)
    passes = compose(MergeLinears(), compose(FuseBiasInLinear(), ChangeTrueDivToMulByInverse()))
    after = passes(traced)
    assert after is traced
    assert len(passes.get_transformed_nodes(after)) == 2
    assert_round_trip(before, passes(after, reverse=True))


def test_not_in_place_leaves_the_module_alone():
    traced = torch.fx.symbolic_trace(Head())
    before = copy.deepcopy(traced)
    passes = compose(MergeLinears(), FuseBiasInLinear(), inplace=False)
    after = passes(traced)
    assert_round_trip(before, traced)
    merged = copy.deepcopy(after)
    restored = passes(after, reverse=True)
    assert_round_trip(before, restored)
    assert_round_trip(merged, after)


def test_a_composition_lints_and_recompiles_once(monkeypatch):
    calls = []
    traced = torch.fx.symbolic_trace(Head())
    monkeypatch.setattr(type(traced), "recompile", lambda self: calls.append(self))
    compose(MergeLinears(), compose(FuseBiasInLinear(), ChangeTrueDivToMulByInverse()))(traced)
    assert len(calls) == 1
    compose(MergeLinears(), FuseBiasInLinear())(traced, lint_and_recompile=False)
    assert len(calls) == 1


def test_compose_takes_instances():
    with pytest.raises(TypeError, match=r"write MergeLinears\(\)"):
        compose(MergeLinears)
    with pytest.raises(TypeError, match="got 3"):
        compose(3)


def test_deep_copy_and_lint_and_recompile():
    traced = product()
    for reverse in (False, True):
        assert DeepCopy()(traced, reverse=reverse) is not traced
        assert LintAndRecompile()(traced, reverse=reverse) is traced
    assert DeepCopy().preserves_computation
    assert LintAndRecompile().preserves_computation
    with pytest.raises(PassError, match="left an invalid graph"):
        LintAndRecompile()(BreaksTheGraph()(product(), lint_and_recompile=False))


def test_undo_of_a_composition_that_copies_leaves_the_given_module_alone():
    pipeline = compose(DeepCopy(), FuseBiasInLinear())
    traced = torch.fx.symbolic_trace(Head())
    after = pipeline(traced)
    code = after.code
    assert_round_trip(traced, pipeline(after, reverse=True))
    assert after.code == code
    assert len(history(after)) == 1


class ForgetsTheBias(FuseBiasInLinear):
    def apply(self, rewriter, site):
        node = super().apply(rewriter, site)
        with torch.no_grad():
            rewriter.graph_module.get_submodule(str(node.target)).weight[:, -1] = 0
        return node


def test_parts_are_verified():
    traced = fxopt.trace(randomise(Head()), (torch.randn(2, 4),))
    with pytest.warns(VerificationWarning, match=r"rolled back its rewrite of .*: q differs by"):
        compose(ChangeTrueDivToMulByInverse(), ForgetsTheBias())(traced, verify=True)
    assert [step.name for step in history(traced)] == ["ChangeTrueDivToMulByInverse()"]


def test_a_part_is_explained_behind_those_before_it():
    merge, fuse = compose(MergeLinears(), FuseBiasInLinear()).explain(torch.fx.symbolic_trace(Head()))
    assert len(merge.sites) == 1
    assert [module for _, module in fuse.sites] == ["fxopt_merged_q_k"]


def test_a_composition_without_its_record_is_an_error():
    pipeline = compose(MergeLinears(), FuseBiasInLinear())
    lost = torch.fx.symbolic_trace(pipeline(torch.fx.symbolic_trace(Head())))
    with pytest.raises(UndoError, match="the record of its changes is gone"):
        pipeline(lost, reverse=True)
