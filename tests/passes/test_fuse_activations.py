"""FuseActivations: activations that are written out become one call."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import EsmConfig, EsmModel, GPT2Config, GPT2Model

import fxopt
from fxopt import FuseActivations
from fxopt.activations import ACTIVATIONS
from fxopt.testing import assert_equivalent, assert_round_trip, randomise
from tests.modules import module

X = torch.randn(3, 4, dtype=torch.float64)


def written(x, factor=0.044715, half=0.5):
    return half * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + factor * torch.pow(x, 3.0))))


@pytest.mark.parametrize(
    ("name", "forward"),
    [
        ("gelu_tanh", lambda self, x: written(x) + 1),
        (
            "gelu_tanh",
            lambda self, x: x * 0.5 * (torch.tanh((x + 0.044715 * x**3.0) * math.sqrt(2.0 / math.pi)) + 1.0),
        ),
        (
            "gelu_tanh",
            lambda self, x: 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x))),
        ),
        ("gelu_tanh", lambda self, x: x * 0.5 * (1 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))),
        ("gelu", lambda self, x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))),
        ("gelu", lambda self, x: 0.5 * (x * (x * math.sqrt(0.5)).erf() + x)),
        ("silu", lambda self, x: x * torch.sigmoid(x)),
        ("silu", lambda self, x: self.sigmoid(x).mul(x)),
        ("silu", lambda self, x: x / (1 + torch.exp(-x))),
        ("mish", lambda self, x: x * torch.tanh(F.softplus(x))),
        ("hardswish", lambda self, x: x * F.relu6(x + 3) / 6),
        ("hardswish", lambda self, x: x * self.relu6(x + 3.0) * (1 / 6)),
        ("hardswish", lambda self, x: x * F.relu6(x + 3, inplace=True) / 6),
        ("hardswish", lambda self, x: x * F.hardtanh(x + 3, 0.0, 6.0) / 6),
    ],
)
def test_each_spelling_is_found(name, forward):
    model = module(forward, sigmoid=nn.Sigmoid(), relu6=nn.ReLU6()).eval()
    traced = fxopt.trace(model, (X,))
    before = copy.deepcopy(traced)
    FuseActivations()(traced, verify=True)
    wanted = ACTIVATIONS[name]
    (call,) = traced.graph.find_nodes(op="call_function", target=wanted.function)
    assert call.kwargs == wanted.options
    assert len(traced.graph.nodes) <= 5
    assert_equivalent(model, traced, (X,))
    assert_round_trip(before, fxopt.undo(traced))


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: written(x, factor=0.0447),
        lambda self, x: written(x, half=0.25),
        lambda self, x: 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**2.0))),
        lambda self, x: x * torch.sigmoid(1.702 * x),
        lambda self, x: x * (x + 3).clamp(0, 6) / 6,  # which has other gradients where it is cut off
        # Numbers that matter for few inputs alone.
        lambda self, x: x.clamp(-65504, 65504) * torch.sigmoid(x),
        lambda self, x: torch.sigmoid(x).clamp(min=1e-9) * x,
        lambda self, x: torch.sigmoid(x).mul_(x),  # whose gradient cannot be computed
        lambda self, x: x * torch.sigmoid(x + 1e-6),
        lambda self, x: x * torch.sigmoid(x[:, :1]),
        lambda self, x: x * torch.sigmoid(x.detach()),
        lambda self, x: (
            x * torch.exp(x) / (1 + torch.exp(x))
        ),  # not a number for large ones, where SiLU is one
        lambda self, x: x * torch.sigmoid(x).float().double(),
    ],
)
def test_another_formula_stays(forward):
    traced = fxopt.trace(module(forward).eval(), (X,))
    assert not FuseActivations().explain(traced).sites


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: x * torch.sigmoid(x) + 1e-12,
        lambda self, x: (x * torch.sigmoid(x)).clamp(max=65504),
        lambda self, x: torch.sigmoid(x) * x + 1e-12 * x * x,
    ],
)
def test_guards_behind_an_activation_stay(forward):
    fused = FuseActivations()(fxopt.trace(module(forward).eval(), (X,)))
    (call,) = fused.graph.find_nodes(op="call_function", target=F.silu)
    assert all(user.op != "output" for user in call.users)
    assert "65504" in fused.code or "1e-12" in fused.code


def test_numbers_without_a_point_stay():
    traced = fxopt.trace(module(lambda self, x: x * torch.sigmoid(x)).eval(), (torch.arange(4),))
    assert not FuseActivations().explain(traced).sites


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (lambda self, x: (lambda s: (x * s, s))(torch.sigmoid(x)), "sigmoid is also used by output"),
        (
            lambda self, x: (lambda y, v, s: (v.add_(1), y * s)[1])(x, x.view(-1), torch.sigmoid(x)),
            "add_ may write",
        ),
        (
            lambda self, x: (lambda y: (y * F.relu6(y, inplace=True), y)[0] / 6)(x + 3),
            None,
        ),
        (lambda self, x: self.hooked(x) * x, None),
    ],
)
def test_what_cannot_be_one_call_stays(forward, reason):
    hooked, called = nn.Sigmoid(), []
    hooked.register_forward_hook(lambda _, args, __: called.append(args))
    traced = fxopt.trace(module(forward, hooked=hooked).eval(), (X,))
    called.clear()
    explanation = FuseActivations().explain(traced)
    assert not explanation.sites
    assert not called
    assert reason is None or reason in str(explanation.refusals)


@pytest.mark.parametrize(
    ("cls", "config"),
    [
        (GPT2Model, GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=50, use_cache=False)),
        (
            EsmModel,
            EsmConfig(
                vocab_size=50,
                pad_token_id=1,
                hidden_size=16,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=16,
            ),
        ),
    ],
)
def test_models_that_write_it_out(cls, config):
    ids = torch.arange(6).view(2, 3)
    model = randomise(cls(config).double().eval())
    traced = fxopt.trace(model, (ids,))
    assert len(FuseActivations().explain(traced).sites) == 2
    before = copy.deepcopy(traced)
    assert_equivalent(model, FuseActivations()(traced), (ids,))
    assert_round_trip(before, fxopt.undo(traced))
