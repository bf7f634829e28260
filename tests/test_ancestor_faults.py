"""The known faults of optimum.fx.optimization, one test each: they must not come back."""

import copy
import pickle

import pytest
import torch
from torch import nn

from fxopt import (
    ChangeTrueDivToMulByInverse,
    FuseBatchNorm1dInLinear,
    FuseBatchNorm2dInConv2d,
    FuseBiasInLinear,
    MergeLinears,
    trace,
)
from fxopt.testing import assert_equivalent, assert_round_trip, randomise
from tests.before_after import assert_untouched

IMAGE = torch.randn(2, 3, 6, 6, dtype=torch.float64)
ROWS = torch.randn(5, 4, dtype=torch.float64)


def same_outputs(pass_, model, *inputs, sites):
    """Tell whether the pass rewrites `sites` places of a float64 model, and the outputs stay."""
    model = randomise(model).double().eval()
    traced = trace(model, inputs)
    before = copy.deepcopy(traced)
    assert len(pass_.explain(traced).sites) == sites
    assert_equivalent(before, pass_(traced), inputs)
    return traced


def test_the_bias_of_a_convolution_is_scaled():
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=True), nn.BatchNorm2d(4))
    same_outputs(FuseBatchNorm2dInConv2d(), model, IMAGE, sites=1)


def test_a_norm_without_affine_parameters_adds_no_one():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=False))
    same_outputs(FuseBatchNorm2dInConv2d(), model, IMAGE, sites=1)
    model = nn.Sequential(nn.BatchNorm1d(4, affine=False), nn.Linear(4, 3), nn.BatchNorm1d(3, affine=False))
    same_outputs(FuseBatchNorm1dInLinear(), model, ROWS, sites=1)


def test_a_convolution_that_another_path_uses_is_not_folded_into():
    class TwoPaths(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

        def forward(self, x):
            return self.norm(self.conv(x)), self.conv(x * 2)

    same_outputs(FuseBatchNorm2dInConv2d(), TwoPaths(), IMAGE, sites=0)


class Mixed(nn.Module):
    """Something for every pass."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.conv, self.norm2d = nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2)

    def forward(self, x):
        return self.norm(self.a(x)), self.b(x) / 49, self.norm2d(self.conv(x[None, None]))


ALL = [
    MergeLinears(),
    FuseBiasInLinear(),
    ChangeTrueDivToMulByInverse(),
    FuseBatchNorm2dInConv2d(),
    FuseBatchNorm1dInLinear(),
]


@pytest.mark.parametrize("pass_", ALL, ids=repr)
@pytest.mark.parametrize("tracer", [lambda m: trace(m, (ROWS,)), torch.fx.symbolic_trace], ids=["own", "fx"])
def test_the_model_of_the_user_is_not_changed(pass_, tracer):
    model = randomise(Mixed()).double().eval()
    untouched = copy.deepcopy(model)
    parameters = dict(model.named_parameters())
    pass_(tracer(model))
    assert_untouched(untouched, model)
    assert all(parameters[name] is now for name, now in model.named_parameters())
    assert_equivalent(untouched, model, [ROWS])


def test_linear_layers_at_the_root_are_merged():
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 2), nn.Linear(4, 3)

        def forward(self, x):
            return self.a(x), self.b(x)

    traced = same_outputs(MergeLinears(), Root(), ROWS, sites=1)
    assert MergeLinears()(traced, reverse=True).a.out_features == 2


def test_a_layer_is_not_moved_past_an_in_place_write():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x):
            x = x * 1
            first = self.a(x)
            x.t().mul_(2)
            return first, self.b(x)

    model = randomise(Writes()).double()
    for traced in (trace(model, (ROWS,)), torch.fx.symbolic_trace(model)):
        assert_equivalent(model, MergeLinears()(traced), [ROWS])


def test_a_bias_is_fused_in_bfloat16():
    model = randomise(nn.Sequential(nn.Linear(4, 3))).bfloat16()
    fused = FuseBiasInLinear()(torch.fx.symbolic_trace(model))
    assert fused(ROWS.bfloat16()).dtype == torch.bfloat16
    assert_equivalent(model, fused, [ROWS.bfloat16()], factor=4)


def test_division_by_49_comes_back():
    assert 1 / (1 / 49) != 49
    traced = trace(Mixed().double().eval(), (ROWS,))
    before = copy.deepcopy(traced)
    change = ChangeTrueDivToMulByInverse()
    restored = change(change(traced), reverse=True)
    assert any(49 in node.args and type(node.args[1]) is int for node in restored.graph.nodes)
    assert_round_trip(before, restored)


@pytest.mark.parametrize("carry", [copy.deepcopy, lambda gm: pickle.loads(pickle.dumps(gm))])
@pytest.mark.parametrize("tracer", [lambda m: trace(m, (ROWS,)), torch.fx.symbolic_trace], ids=["own", "fx"])
@pytest.mark.parametrize("pass_", ALL[:3], ids=repr)
def test_marks_and_undo_survive_copies(pass_, tracer, carry):
    traced = tracer(Mixed().double().eval())
    before = carry(copy.deepcopy(traced))
    transformed = pass_(traced)
    names = [node.name for node in pass_.get_transformed_nodes(transformed)]
    carried = carry(transformed)
    assert [node.name for node in pass_.get_transformed_nodes(carried)] == names
    assert bool(names)
    assert_round_trip(before, pass_(carried, reverse=True))


def test_a_signature_leaves_the_instance_alone():
    for cls in map(type, ALL):
        pass_ = cls()  # a fresh one: the others have been asked for their signature before
        before = dict(vars(pass_))
        assert pass_.signature
        assert vars(pass_) == before
