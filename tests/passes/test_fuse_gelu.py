"""FuseGelu: the tanh form of GELU that is written out becomes one call."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from transformers import AlbertConfig, AlbertModel, GPT2Config, GPT2Model

import fxopt
from fxopt import FuseGelu
from fxopt.testing import assert_equivalent, assert_round_trip, randomise
from tests.modules import module


def written(x, factor=0.044715, half=0.5):
    return half * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + factor * torch.pow(x, 3.0))))


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: written(x) + 1,
        lambda self, x: x * 0.5 * (torch.tanh((x + 0.044715 * x**3.0) * math.sqrt(2.0 / math.pi)) + 1.0),
    ],
)
def test_each_order_is_found(forward):
    x = torch.randn(3, 4, dtype=torch.float64)
    model = module(forward).eval()
    traced = fxopt.trace(model, (x,))
    before = copy.deepcopy(traced)
    FuseGelu()(traced, verify=True)
    assert [node.kwargs for node in traced.graph.find_nodes(op="call_function", target=F.gelu)] == [
        {"approximate": "tanh"}
    ]
    assert_equivalent(model, traced, (x,))
    assert_round_trip(before, fxopt.undo(traced))


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: written(x, factor=0.0447),
        lambda self, x: written(x, half=0.25),
        lambda self, x: 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0))),
        lambda self, x: 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**2.0))),
    ],
)
def test_another_formula_stays(forward):
    traced = fxopt.trace(module(forward).eval(), (torch.randn(3),))
    assert not FuseGelu().explain(traced).sites


def test_a_value_that_something_else_uses_is_refused():
    def forward(self, x):
        tanh = torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0)))
        return 0.5 * x * (1.0 + tanh), tanh

    explanation = FuseGelu().explain(fxopt.trace(module(forward).eval(), (torch.randn(3),)))
    assert not explanation.sites
    assert "tanh" in str(explanation.refusals)


@pytest.mark.parametrize(
    ("cls", "config"),
    [
        (GPT2Model, GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=50, use_cache=False)),
        (
            AlbertModel,
            AlbertConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16),
        ),
    ],
)
def test_models_that_write_it_out(cls, config):
    ids = torch.arange(6).view(2, 3)
    model = randomise(cls(config).double().eval())
    traced = fxopt.trace(model, (ids,))
    assert len(FuseGelu().explain(traced).sites) == 2
    before = copy.deepcopy(traced)
    assert_equivalent(model, FuseGelu()(traced), (ids,))
    assert_round_trip(before, fxopt.undo(traced))
