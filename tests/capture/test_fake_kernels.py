"""Operators that torch takes apart on fakes, or has in C++ alone: recurrent layers of any length, distances, losses."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
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


@pytest.mark.sweep(4)
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


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("part", [slice(None, -1), slice(1, None), slice(3, None)])
def test_a_recurrent_layer_takes_a_part_of_any_length(kind, part):
    model = Does(lambda self, x: self.rnn(x[:, part])[0], rnn=kind(4, 5, batch_first=True))
    shapes = {"args": ({0: Dim.AUTO, 1: Dim.AUTO},)}
    traced = fxopt.trace(model, (torch.randn(3, 6, 4),), dynamic_shapes=shapes)
    for shape in ((3, 6, 4), (7, 9, 4), (1, 5, 4)):
        x = torch.randn(shape)
        assert_same(traced(x), model(x))
    with pytest.raises((fxopt.GuardError, RuntimeError)):  # there is no step, of which the model says so
        traced(torch.randn(3, 1, 4))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("lengths", [torch.tensor, list])
def test_the_loss_of_sequences_with_lengths(reduction, lengths):
    def forward(self, x, targets, *lengths):
        scores = self.linear(x).log_softmax(-1)
        return F.ctc_loss(scores, targets, *lengths, reduction=reduction, zero_infinity=True)

    model, targets = Does(forward), torch.randint(1, 4, (2, 3))
    inputs = torch.randn(6, 2, 4), targets, lengths([6, 5]), lengths([2, 3])
    traced = fxopt.trace(model, inputs, verify=False)
    for x in (inputs[0], torch.randn(6, 2, 4)):
        assert_same(traced(x, *inputs[1:]), model(x, *inputs[1:]))
    (output,) = traced.graph.find_nodes(op="output")
    assert output.args[0].meta["val"].shape == model(*inputs).shape


def quantized(self, x):
    scale, zero = torch.full((4,), 0.1), torch.zeros(4, dtype=torch.int32)
    return (
        torch.fake_quantize_per_tensor_affine(self.linear(x), 0.1, 0, -8, 7),
        torch.fake_quantize_per_tensor_affine(x, scale[0], zero[0], -8, 7),
        torch.fake_quantize_per_channel_affine(x, scale, zero, 1, -8, 7),
    )


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


def taken_along(self, x):
    order = x.argsort(0)
    return (
        torch.take_along_dim(x, order, 0),
        x.take_along_dim(order[:1], dim=0),
        x.take_along_dim(order),
    )


def kron(self, x):
    return torch.kron(x, self.table), torch.kron(self.table[0], x), torch.kron(x[:, 0], x)


def products(self, x):
    return torch.linalg.multi_dot([x, self.table.T @ self.table, x.T]), torch.linalg.multi_dot(
        [x[0], x.T, x, x[0]]
    )


def diagonals(self, x):
    square = x @ x.T
    square.fill_diagonal_(0.5)
    return square, x.new_zeros(x.shape).fill_diagonal_(1, wrap=True)


def combinations(self, x):
    pairs = torch.combinations(torch.arange(x.shape[0]))
    return (
        x[pairs[:, 0]] - x[pairs[:, 1]],
        torch.combinations(x[:, 0], 3),
        torch.combinations(x[:, 1], 2, True),
        torch.combinations(x[:, 0], 0),
        torch.combinations(x[:-1, 0]),
    )


def splits(self, x):
    return x.tensor_split(3), [part.sum(0) for part in torch.tensor_split(x, 2, dim=-2)]


def pooled(self, x):
    rows = x.T
    return (
        F.max_pool1d(rows, 2, 1, ceil_mode=True),
        self.pool(x.repeat(3, 1).T[None]),
        self.pool(x.repeat(3, 1).requires_grad_().T),
        F.max_pool1d(x[None], 3, padding=1, dilation=1),
    )


@pytest.mark.parametrize(
    "forward", [taken_along, kron, products, diagonals, combinations, splits, pooled, quantized]
)
@pytest.mark.parametrize("grad", [True, False])
def test_an_operator_that_torch_has_in_c_takes_any_batch(forward, grad):
    model = Does(forward, table=nn.Parameter(torch.randn(2, 4)), pool=nn.MaxPool1d(2, ceil_mode=True))
    with torch.set_grad_enabled(grad):
        example = (torch.randn(4, 4),)
        traced = fxopt.trace(model, example, dynamic_shapes={"args": ({0: Dim.DYNAMIC(min=2)},)})
        for size in (4, 2, 7):
            x = torch.randn(size, 4)
            assert_same(traced(x), model(x))
        (output,) = traced.graph.find_nodes(op="output")
        fakes = [node.meta["val"] for node in output.all_input_nodes]
        for fake, real in zip(tree_leaves(fakes), tree_leaves(model(*example)), strict=True):
            assert (len(fake.shape), fake.requires_grad) == (real.dim(), real.requires_grad)
            assert forward is splits or fake.is_contiguous() == real.is_contiguous()


@pytest.mark.long
@pytest.mark.parametrize("is_causal", [None, False])
def test_a_stack_of_transformer_layers_takes_a_causal_mask_of_any_length(is_causal):
    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        x = self.encoder(x, mask=mask, is_causal=is_causal)
        return self.decoder(x, x, tgt_mask=mask, tgt_is_causal=is_causal)

    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2)
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(4, 2, 8, batch_first=True), 2)
    model = Does(forward, encoder=encoder, decoder=decoder).eval()
    shapes = {"args": ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)}
    traced = fxopt.trace(model, (torch.randn(3, 5, 4),), dynamic_shapes=shapes)
    for shape in ((3, 5, 4), (7, 2, 4), (1, 1, 4)):
        x = torch.randn(shape)
        assert_same(traced(x), model(x))
