"""Recurrent layers of any length and distances of any batch, which torch takes apart on fakes."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.utils._pytree import tree_leaves

import fxopt
from tests.capture.test_odd_models import Does
from tests.capture.test_trace import assert_same

LAYERS = {
    f"{kind.__name__} {options}": kind(4, 5, **options)
    for kind, options in itertools.product(
        (nn.LSTM, nn.GRU, nn.RNN),
        ({}, {"batch_first": True, "bidirectional": True}, {"num_layers": 2, "bias": False}),
    )
} | {
    "projected": nn.LSTM(4, 5, proj_size=3, num_layers=2),
    "relu": nn.RNN(4, 5, nonlinearity="relu", batch_first=True),
}


@pytest.mark.parametrize("case", LAYERS)
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("wrap", [nn.Sequential, lambda layer: layer])
def test_a_recurrent_layer_takes_any_length(case, grad, wrap):
    model = wrap(LAYERS[case])
    with torch.set_grad_enabled(grad):
        traced = fxopt.trace(model, (torch.randn(3, 6, 4),), dynamic_shapes=({0: Dim.AUTO, 1: Dim.AUTO},))
        for shape in ((3, 6, 4), (7, 2, 4), (1, 1, 4)):
            x = torch.randn(shape)
            assert_same(traced(x), model(x))
            assert traced(x)[0].requires_grad == grad


@pytest.mark.parametrize("case", LAYERS)
def test_the_sizes_and_strides_of_a_recurrent_layer(case):
    model, x = nn.Sequential(LAYERS[case]), torch.randn(3, 6, 4)
    (node,) = fxopt.trace(model, (x,)).graph.find_nodes(op="call_module", target="0")
    for fake, real in zip(*map(tree_leaves, (node.meta["val"], model(x))), strict=True):
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


def test_the_gradient_of_a_recurrent_layer_has_all_of_its_steps():
    def forward(self, x):
        return torch.func.grad(lambda x: self.rnn(x)[0].square().sum())(x)

    model, x = Does(forward, rnn=nn.GRU(4, 5)), torch.randn(6, 3, 4)
    assert_same(fxopt.trace(model, (x,))(x), model(x))


@pytest.mark.parametrize("p", [2.0, 1.0])
def test_distances_take_any_batch(p):
    model = Does(lambda self, x, y: torch.cdist(x, y, p=p))
    batch = Dim("batch")
    shapes = ({0: batch, 1: Dim.AUTO}, {0: batch})
    traced = fxopt.trace(model, (torch.randn(2, 3, 4), torch.randn(2, 5, 4)), dynamic_shapes={"args": shapes})
    for size, rows in ((2, 3), (4, 7), (1, 1)):
        inputs = torch.randn(size, rows, 4), torch.randn(size, 5, 4)
        assert_same(traced(*inputs), model(*inputs))


@pytest.mark.parametrize("training", [True, False])
def test_a_batch_norm_without_momentum_averages_over_all_calls(training):
    model = nn.Sequential(nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 4)).train(training)
    traced = fxopt.trace(copy.deepcopy(model), (torch.randn(3, 4),), dynamic_shapes=({0: Dim.AUTO},))
    assert model[0].momentum is traced.get_submodule("0").momentum is None
    for batch in (3, 5, 2):
        x = torch.randn(batch, 4)
        assert_same(traced(x), model(x))
        assert_same(dict(traced.named_buffers()), dict(model.named_buffers()))
