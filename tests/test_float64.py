"""Computing in float64 what a model computes in a lower precision, and what a node draws or a hook may do."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxopt
from fxopt.effects import draws, has_forward_hooks
from fxopt.float64 import Float64, run_in_float64
from tests.modules import module

X = torch.randn(3, 4)
MADE = {
    "zeros": lambda x, low: torch.zeros(3) + x[:, 0] / 3,
    "full": lambda x, low: torch.full((2,), 0.1),
    "linspace": lambda x, low: torch.linspace(0, 1, 4),
    "a dtype that is named": lambda x, low: torch.ones(2, dtype=low) / 3,
    "a cast": lambda x, low: (x / 3).to(low),
    "softmax": lambda x, low: x.softmax(-1, dtype=low),
    "a write": lambda x, low: torch.zeros(3).add_(x[:, 0] / 3),
    "complex": lambda x, low: (
        torch.ones(2, dtype=torch.complex128 if low is torch.float64 else torch.complex64) / 3
    ),
    "integers": lambda x, low: torch.arange(3) // 2,
    "a mask": lambda x, low: x > 0,
    "a quotient of integers": lambda x, low: torch.arange(3) / 3,
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_what_a_model_makes_is_in_float64(make):
    with Float64():
        found = make(X, torch.bfloat16)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        wanted = make(X.double(), torch.float64)
    finally:
        torch.set_default_dtype(default)
    torch.testing.assert_close(found, wanted, rtol=1e-14, atol=1e-14)


def test_bits_and_random_numbers_are_those_of_the_model():
    def both():
        torch.manual_seed(0)
        return X.view(torch.int32), torch.rand(3), torch.randn_like(X)

    wanted = both()
    with Float64():
        found = both()
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other.to(one.dtype))
    assert [each.dtype for each in found] == [torch.int32, torch.float64, torch.float64]


def test_an_operator_without_float64_computes_in_float32():
    x = torch.randn(2, 8)
    layer = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(8, 8)).eval(), {nn.Linear})
    with Float64():
        found = layer(x)
    assert torch.equal(found, layer(x).double())


def writes(m, x, others):
    m.total.add_(m.layer(x).sum(0))
    y = torch.cond(x.sum() > 0, lambda x: m.layer(x) / 3, lambda x: m.layer(x) * 2, (x,))
    return y + m.total + others["a"] + torch.eye(3, 5) + F.dropout(y, 0.5, m.training)


@pytest.mark.parametrize("sign", [1, -1])
@torch.no_grad()
def test_a_graph_computes_what_the_model_does_in_float64_and_keeps_its_values(sign):
    model = module(writes, layer=nn.Linear(4, 5), total=nn.Buffer(torch.zeros(5)))
    x = sign * X.abs()
    others = {"a": torch.randn(3, 5)}
    traced = fxopt.trace(model, (x, others))
    before = copy.deepcopy((model.state_dict(), x, others))
    found = run_in_float64(traced, [x, others])
    torch.testing.assert_close((model.state_dict(), x, others), before, rtol=0, atol=0)
    wide = copy.deepcopy(model).double()
    wanted = wide(x.double(), {"a": others["a"].double()})
    torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_read_twice_is_one_copy(dtype):
    def forward(self, x, y):
        x.add_(1)
        self.total.add_(y)
        return self.total * y

    graph_module = torch.fx.symbolic_trace(module(forward, total=nn.Buffer(torch.zeros(3, 4, dtype=dtype))))
    x = X.to(dtype)
    assert torch.equal(run_in_float64(graph_module, [x, x]), (X.double() + 1) ** 2)
    assert torch.equal(x, X.to(dtype))
    assert not graph_module.total.any()


DRAWS = {
    "dropout": (lambda x: F.dropout(x, 0.5), True),
    "dropout without training": (lambda x: F.dropout(x, 0.5, training=False), False),
    "dropout of nothing": (lambda x: F.dropout(x, p=0), False),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.0), False),
    "attention with dropout": (lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1), True),
    "noise": (lambda x: torch.rand_like(x), True),
    "relu": (F.relu, False),
}


@pytest.mark.parametrize("name", DRAWS)
def test_what_draws_random_numbers(name):
    function, wanted = DRAWS[name]
    *_, node, _ = torch.fx.symbolic_trace(function).graph.nodes
    assert draws(node, None) == wanted


def test_a_layer_of_dropout_draws_in_training_alone():
    layer = nn.Dropout(0.5)
    (_, node, _) = torch.fx.symbolic_trace(nn.Sequential(layer)).graph.nodes
    assert draws(node, layer)
    assert not draws(node, layer.eval())


def test_hooks_on_the_forward_are_those_of_users():
    assert not has_forward_hooks(nn.utils.weight_norm(nn.Linear(2, 2)))
    stateful, hooked = nn.Linear(2, 2), nn.Linear(2, 2)
    stateful.register_load_state_dict_pre_hook(print)
    stateful.register_state_dict_pre_hook(print)
    assert not has_forward_hooks(stateful)
    hooked.register_forward_pre_hook(print)
    assert has_forward_hooks(hooked)
