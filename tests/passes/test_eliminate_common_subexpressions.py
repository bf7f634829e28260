"""EliminateCommonSubexpressions: what is computed twice is computed once, where nobody can tell."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxopt
from fxopt.passes.eliminate_common_subexpressions import EliminateCommonSubexpressions
from tests.before_after import fx_trace, fxopt_trace, rewritten

X = torch.randn(3, 4)


class Uses(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.layer, self.norm = function, nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.again = self.layer
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.function(self, x + 1)


@pytest.mark.parametrize("trace", [fx_trace, fxopt_trace])
@pytest.mark.parametrize(
    ("function", "sites"),
    [
        (lambda m, x: torch.exp(x) + torch.exp(x), 1),
        (lambda m, x: torch.exp(torch.exp(x)) + torch.exp(torch.exp(x)), 2),
        (lambda m, x: torch.relu(m.layer(x)) * torch.relu(m.again(x)), 2),
        (lambda m, x: x * m.scale + torch.sin(x * m.scale), 1),
        (lambda m, x: (x[:, 1:] - x[:, 1:]) + x[:, :3] * x[:, 1:4], 1),
        (lambda m, x: torch.cat([torch.exp(x), torch.exp(x)]).sum(0), 1),
        (lambda m, x: m.norm(x) + m.norm(x), 1),
    ],
)
def test_the_same_is_computed_once(function, sites, trace):
    rewritten(EliminateCommonSubexpressions(), Uses(function), X, sites=sites, trace=trace)


@pytest.mark.parametrize("trace", [fx_trace, fxopt_trace])
@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: x.sum(0) + x.sum(1)[:1],
        lambda m, x: x * 1 + x * 1.0,
        lambda m, x: torch.clamp(x, min=0.5) + torch.clamp(x, max=0.5),
        lambda m, x: m.layer(x) + m.norm(x),
        lambda m, x: x * 0.0 + x * -0.0,
        lambda m, x: F.dropout(x, 0.5, training=True) + F.dropout(x, 0.5, training=True),
        lambda m, x: torch.rand_like(x) + torch.rand_like(x),
        lambda m, x: [x.exp() - 1, x.exp(), x.exp()],
        lambda m, x: (x.exp()[0], x.exp()[1]),
        lambda m, x: x.exp().add_(1) + x.exp(),
        lambda m, x: (x + 2).exp() + x.add_(1) + x.exp(),
        lambda m, x: [x.exp(), x.mul_(2), x.exp()][0] + x,
    ],
)
def test_what_is_not_the_same_or_may_be_written_stays(function, trace):
    torch.manual_seed(0)
    model = Uses(function).eval()
    traced = trace(model, [X])
    assert not EliminateCommonSubexpressions().explain(traced).sites


def test_modules_are_told_by_what_they_are():
    traced = torch.fx.symbolic_trace(Uses(lambda m, x: m.layer(x) + m.layer(x)))
    traced.again = traced.layer
    second = traced.graph.find_nodes(op="call_module", target="layer")[1]
    second.target = "again"
    assert len(EliminateCommonSubexpressions().explain(traced).sites) == 1


def test_training_statistics_are_updated_twice():
    model = Uses(lambda m, x: m.norm(x) + m.norm(x)).train()
    assert not EliminateCommonSubexpressions().explain(torch.fx.symbolic_trace(model)).sites


def test_a_change_of_mode_in_between_is_a_refusal():
    def function(m, x):
        y = x.exp()
        with torch.no_grad():
            z = x.exp()
        return y + z

    explanation = EliminateCommonSubexpressions().explain(fxopt.trace(Uses(function), (X,)))
    assert not explanation.sites
    assert "side effect" in explanation.refusals[0][2]


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: m.layer(x) + (m.layer.weight.data.add_(1), m.layer(x))[1],
        lambda m, x: m.norm(x) + (m.norm.running_mean.add_(1), m.norm(x))[1],
    ],
)
def test_weights_that_are_written_between_two_calls(function):
    assert not EliminateCommonSubexpressions().explain(fxopt.trace(Uses(function).eval(), (X,))).sites


class Store:
    pass


def test_values_that_leave_in_an_object_of_the_caller_are_two():
    class Stores(nn.Module):
        def forward(self, x, store):
            store.a, store.b = torch.exp(x), torch.exp(x)
            return x * 1

    traced = fxopt.trace(Stores(), (X, Store()))
    assert not EliminateCommonSubexpressions().explain(traced).sites


def test_methods_of_objects_are_not_taken_for_those_of_tensors():
    class Draws(nn.Module):
        def forward(self, x, source):
            return x * source.sum() + source.sum()

    assert not EliminateCommonSubexpressions().explain(torch.fx.symbolic_trace(Draws())).sites
