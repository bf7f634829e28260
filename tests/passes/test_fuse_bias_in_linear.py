"""FuseBiasInLinear: the bias as a column of the weight, in any dtype, and back."""

import copy

import pytest
import torch
from torch import nn

import fxopt
from fxopt import FuseBiasInLinear
from fxopt.testing import assert_round_trip
from tests.before_after import fxopt_trace, rewritten

X = torch.randn(2, 3, 4)


@pytest.mark.parametrize(
    ("model", "sites"),
    [
        (nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), 2),
        (nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 2)), 1),
    ],
)
def test_fuses(model, sites):
    after = rewritten(FuseBiasInLinear(), model, X, sites=sites)
    assert not any(name.endswith("bias") for name in after.state_dict())


def test_a_vector_as_input():
    rewritten(FuseBiasInLinear(), nn.Sequential(nn.Linear(4, 3)), torch.randn(4), sites=1)


def test_no_bias_is_no_site():
    explanation = FuseBiasInLinear().explain(torch.fx.symbolic_trace(nn.Linear(4, 2, bias=False)))
    assert not explanation.rows


def test_the_ones_follow_the_input():
    fused = FuseBiasInLinear()(torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 3))))
    assert copy.deepcopy(fused).double()(X.double()).dtype == torch.float64
    assert copy.deepcopy(fused).to("meta")(X.to("meta")).device.type == "meta"


def test_with_metadata():
    after = rewritten(FuseBiasInLinear(), nn.Sequential(nn.Linear(4, 3)), X, sites=1, trace=fxopt_trace)
    (pad,) = [node for node in after.graph.nodes if node.name.startswith("pad")]
    assert pad.meta["val"].shape == (2, 3, 5)


def test_undo_keeps_training():
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 3)))
    before = copy.deepcopy(traced)
    fused = FuseBiasInLinear()(traced)
    with torch.no_grad():
        fused.get_parameter("0.weight").add_(1)
    restored = FuseBiasInLinear()(fused, reverse=True)
    assert torch.equal(restored.get_parameter("0.bias"), before.get_parameter("0.bias") + 1)
    with pytest.raises(AssertionError, match=r"0\._parameters\.bias differs"):
        assert_round_trip(before, restored)


def test_undo_gives_a_transposed_weight_its_strides():
    model = nn.Sequential(nn.Linear(4, 3))
    model[0].weight = nn.Parameter(torch.randn(4, 3).t())
    after = rewritten(FuseBiasInLinear(), model, X, sites=1)
    assert FuseBiasInLinear()(after, reverse=True).get_submodule("0").weight.stride() == (1, 3)


def test_undo_gives_a_single_row_its_own_strides():
    restored = fxopt.undo(FuseBiasInLinear()(torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 1)))))
    assert restored.get_parameter("0.weight").stride() == (4, 1)
