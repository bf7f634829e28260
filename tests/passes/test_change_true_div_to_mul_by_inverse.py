"""ChangeTrueDivToMulByInverse: where an inverse is as good as a division, and where it is not."""

import math
import operator

import pytest
import torch
from torch import nn
from torch.fx.passes.shape_prop import ShapeProp

import fxopt
from fxopt import ChangeTrueDivToMulByInverse, UndoError
from tests.before_after import fx_trace, fxopt_trace, refused, rewritten
from tests.modules import module

X = torch.randn(3, 4)


def applying(function):
    return module(lambda m, x: function(x))


def div(denominator):
    return applying(lambda x: x / denominator)


@pytest.mark.parametrize("denominator", [49, 8, 3.7, -49, 1, math.sqrt(64), 1e-3, 1e30])
def test_float_tensors_of_known_dtype(denominator):
    after = rewritten(ChangeTrueDivToMulByInverse(), div(denominator), X, sites=1, trace=fxopt_trace)
    (node,) = ChangeTrueDivToMulByInverse().get_transformed_nodes(after)
    assert node.target is operator.mul
    assert node.args[1] == 1 / denominator


SPELLINGS = [
    lambda x: torch.div(x, 4),
    lambda x: torch.true_divide(x, other=4),
    lambda x: x.div(4),
    lambda x: x.divide(other=4),
]


@pytest.mark.parametrize("function", SPELLINGS)
def test_every_spelling_comes_back(function):
    rewritten(ChangeTrueDivToMulByInverse(), applying(function), X, sites=1)


def test_a_power_of_two_needs_no_metadata_and_is_exact():
    model = div(8)
    after = rewritten(ChangeTrueDivToMulByInverse(), model, X, sites=1)
    for x in (X, X.bfloat16(), torch.arange(10), X > 0):
        assert torch.equal(model(x), after(x))
        assert model(x).dtype == after(x).dtype


@pytest.mark.parametrize("denominator", [0, 0.0, math.inf, -math.inf, math.nan, 1e300, 1e-42])
def test_extreme_denominators(denominator):
    reason = "outside of the normal range" if denominator in (1e300, 1e-42) else "the denominator is"
    refused(ChangeTrueDivToMulByInverse(), div(denominator), X, reason=reason, trace=fxopt_trace)


def test_a_huge_integer():
    traced = torch.fx.symbolic_trace(div(10**400))
    reason = ChangeTrueDivToMulByInverse().explain(traced).refusals[0][2]
    assert reason == "the denominator is not a 64-bit integer"


def test_the_range_of_an_unknown_dtype_is_that_of_float16():
    refused(ChangeTrueDivToMulByInverse(), div(2.0**20), X, reason="normal range of float16")


@pytest.mark.parametrize(
    ("function", "reason", "trace"),
    [
        (lambda x: x / 49, "not known to be a floating tensor", fx_trace),
        (lambda x: x / True, "is a bool", fx_trace),
        (lambda x: x / x.abs().sum(), "computed in the graph", fx_trace),
        (lambda x: x.size(0) / 49, "not known to be a floating tensor", fx_trace),
        (lambda x: (x > 0) / 7, "not known to be a floating tensor", fxopt_trace),
        (lambda x: (x / 49).floor(), "1 / 49 is not exact, and floor (floor) is not known to", fxopt_trace),
        (lambda x: torch.round(x.abs() / 49 + 1), "keep the error small", fxopt_trace),
        (lambda x: (x / 49).reshape(-1).int(), "keep the error small", fxopt_trace),
        (lambda x: (x / 49).to(torch.int64), "keep the error small", fxopt_trace),
        (lambda x: (x / 49)[0] >= 1, "keep the error small", fxopt_trace),
        (lambda x: (x / 49) == 1, "keep the error small", fxopt_trace),
        (lambda x: (x / 49 / 7).int(), "keep the error small", fxopt_trace),
        (lambda x: x / 49 % 1, "keep the error small", fxopt_trace),
        (lambda x: (x / 49).argmax(), "keep the error small", fxopt_trace),
    ],
)
def test_refusals(function, reason, trace):
    refused(ChangeTrueDivToMulByInverse(), applying(function), X, reason=reason, trace=trace)


def written_and_read(x):
    target = torch.zeros(3, 4)
    target[0] = x[0] / 49
    return target.floor()


def written_into_integers(x):
    target = torch.zeros(3, 4, dtype=torch.long)
    target[0] = x[0] / 49
    return target


AFTER_OTHERS = [
    lambda x: torch.relu(x / 49).floor(),
    lambda x: nn.functional.relu(x / 49).long(),
    lambda x: (x / 49).sum().floor(),
    lambda x: nn.functional.dropout(x / 49, 0.5, False).ceil(),
    lambda x: (x / 49).type("torch.LongTensor"),
    lambda x: (x / 49).tanh().topk(2, -1),
    lambda x: (x / 49).sort(-1),
    lambda x: (x / 49).max(-1),
    lambda x: (x / 49).median(),
    lambda x: nn.functional.threshold(x / 49, 1.0, 0.0),
    lambda x: nn.functional.hardshrink(x / 49),
    lambda x: torch.special.round(x / 49),
    lambda x: torch.histogram(x / 49, 4, range=(-1.0, 1.0))[0],
    lambda x: 1 / (1 - x / 49),
    lambda x: torch.logit(x / 49),
    lambda x: nn.functional.adaptive_max_pool1d(x / 49, 2, return_indices=True),
    lambda x: (x / 49).log(),
    lambda x: (x / 49).view(torch.int32).view(torch.float32),
    lambda x: (x / 49).div(3, rounding_mode="floor"),
    lambda x: (x / 49) ** 0.5,
    lambda x: (x / 49) ** -1,
    lambda x: (x / 49) ** (x / 49),
    lambda x: 2 ** (x / 49),
    lambda x: torch.full_like(x, 1).copy_(x / 49).floor(),
    lambda x: x.long().copy_(x / 49),
    lambda x: torch.rsqrt((x / 3).pow(2).mean(-1, keepdim=True) + 1e-6),
    lambda x: {"scores": x / 49}["scores"].round(),
    written_and_read,
    written_into_integers,
]


@pytest.mark.parametrize("function", AFTER_OTHERS)
def test_a_step_behind_other_functions(function):
    reason = "keep the error small"
    refused(ChangeTrueDivToMulByInverse(), applying(function), X, reason=reason, trace=fxopt_trace)


def rotated(x):
    first, second = (x / 3).chunk(2, -1)
    return torch.cat([-second, first], -1) * x.cos() + (x / 3) * x.sin()


def accumulated(x):
    total = torch.zeros_like(x)
    total[0] = x[0] / 49
    total += 1
    return total


IDIOMS = [
    (lambda m, x: ((x @ x.transpose(0, 1)) / math.sqrt(80) + x[:, :3]).softmax(-1), 1),
    (lambda m, x: (x / 3).masked_fill(x > 0, -1e9).softmax(-1).argmax(-1), 1),
    (lambda m, x: torch.where(x > 0, x / 3, 0.0).float().log_softmax(-1), 1),
    (lambda m, x: nn.functional.layer_norm(x / 3 + x, (4,)).round(), 1),
    (lambda m, x: m.linear(nn.functional.gelu(x / 3)).floor(), 1),
    (lambda m, x: (x / 3 - x.mean()) ** 2, 1),
    (lambda m, x: x / 3 / 7 / x.square().sum(), 2),
    (lambda m, x: nn.functional.dropout((x / 3).tanh(), 0.1, False).view(2, 6).sum(0), 1),
    (lambda m, x: nn.functional.scaled_dot_product_attention(x / 3, x, x), 1),
    (lambda m, x: nn.functional.max_pool1d(x / 3, 2).amax(), 1),
    (lambda m, x: torch.zeros_like(x / 3).floor(), 1),
    (lambda m, x: [(x / 3).split(2, -1)[1], {"half": (x / 3).half()}], 2),
    (lambda m, x: (x / 3, x.floor()), 1),
    (lambda m, x: x.long() / 8, 1),
    (lambda m, x: (x > 0) / 4, 1),
    (lambda m, x: rotated(x), 2),
    (lambda m, x: accumulated(x), 1),
]


@pytest.mark.parametrize(("function", "sites"), IDIOMS)
def test_idioms_of_transformers_are_rewritten(function, sites):
    model = module(function, linear=nn.Linear(4, 4))
    rewritten(ChangeTrueDivToMulByInverse(), model, X, sites=sites, trace=fxopt_trace)


def with_shapes(model, inputs):
    traced = fx_trace(model, inputs)
    ShapeProp(traced).propagate(*inputs)
    return traced


def after_layer(function, **layers):
    return module(lambda m, x, like: function(m, m.linear(x) / 49, like), linear=nn.Linear(4, 4), **layers)


@pytest.mark.parametrize(
    "model",
    [
        after_layer(lambda m, x, like: x.type("torch.LongTensor")),
        after_layer(lambda m, x, like: x.type_as(like)),
        after_layer(lambda m, x, like: x.to(like.dtype)),
        after_layer(lambda m, x, like: x.to(like)),
        after_layer(lambda m, x, like: x.max(1)),
        after_layer(lambda m, x, like: torch.where(x)),
        after_layer(lambda m, x, like: like.copy_(x)),
        after_layer(lambda m, x, like: x.to(x.device).floor()),
        after_layer(lambda m, x, like: m.a(x).long(), a=nn.ReLU()),
        after_layer(lambda m, x, like: m.a(x).floor(), a=nn.Dropout()),
        after_layer(lambda m, x, like: m.linear_(x), linear_=nn.Hardshrink()),
        after_layer(lambda m, x, like: m.a(x), a=nn.Threshold(1.0, 0.0)),
        after_layer(lambda m, x, like: m.a(x), a=nn.MaxPool1d(2, return_indices=True)),
    ],
)
def test_a_step_in_a_graph_with_the_metadata_of_fx(model):
    like = torch.ones(3, 4, dtype=torch.long)
    reason = "keep the error small"
    refused(ChangeTrueDivToMulByInverse(), model, X, like, reason=reason, trace=with_shapes)


def test_a_foreign_module_may_round():
    class Round(nn.Module):
        def forward(self, x):
            return x.floor()

    def trace(model, inputs):
        return fxopt.trace(model, tuple(inputs), leaf_modules=(Round,))

    model = after_layer(lambda m, x, like: m.a(x), a=Round())
    refused(ChangeTrueDivToMulByInverse(), model, X, X, reason="keep the error small", trace=trace)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x, like: x.softmax(-1).argmax(-1),
        lambda m, x, like: m.linear(x).floor(),
        lambda m, x, like: x.reshape(x.shape[0] // 3, -1),
        lambda m, x, like: x.to(like.device),
    ],
)
def test_what_is_no_step(function):
    rewritten(ChangeTrueDivToMulByInverse(), after_layer(function), X, X, sites=1, trace=fxopt_trace)


def test_complex_and_integer_numerators():
    reason = "the numerator is complex"
    refused(ChangeTrueDivToMulByInverse(), div(4), X.to(torch.complex64), reason=reason, trace=fxopt_trace)
    reason = "not known to be a floating tensor"
    refused(ChangeTrueDivToMulByInverse(), div(49), torch.arange(4), reason=reason, trace=fxopt_trace)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: 2 / x,
        lambda x: x.div(3, rounding_mode="floor"),
        lambda x: torch.div(x, 4, rounding_mode="trunc"),
        lambda x: x // 4,
        lambda x: (x + 0).div_(4),
    ],
)
def test_what_is_no_division_by_a_constant(function):
    traced = fx_trace(applying(function), [X])
    assert not ChangeTrueDivToMulByInverse().explain(traced).sites


def test_a_power_of_two_before_floor_is_exact():
    rewritten(ChangeTrueDivToMulByInverse(), applying(lambda x: (x / 4).floor()), X, sites=1)


def test_undo_of_a_changed_node_raises():
    after = ChangeTrueDivToMulByInverse()(torch.fx.symbolic_trace(div(4)))
    (node,) = after.graph.find_nodes(op="call_function", target=operator.mul)
    node.update_arg(1, 0.5)
    with pytest.raises(UndoError, match="changed since"):
        ChangeTrueDivToMulByInverse()(after, reverse=True)


def test_a_step_behind_a_layer_with_the_name_of_a_function():
    model = module(lambda m, x: m.shape(x / 49).floor(), shape=nn.Sequential(nn.ReLU()))
    refused(ChangeTrueDivToMulByInverse(), model, X, reason="keep the error small", trace=fxopt_trace)
