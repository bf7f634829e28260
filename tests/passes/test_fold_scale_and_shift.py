"""FoldScaleAndShift: constants beside layers, in every spelling; refused where they are none of a channel."""

import pickle

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from fxopt import FoldScaleAndShift, UndoError, trace, undo
from fxopt.testing import randomise
from tests.before_after import fx_trace, fxopt_trace, refused, rewritten

X = torch.randn(2, 3, 4)
IMAGE = torch.randn(2, 4, 6, 5)


class Use(nn.Module):
    """A linear layer, a convolution, and constants, used as `use` says."""

    def __init__(self, use, features=4):
        super().__init__()
        self.linear, self.other = nn.Linear(4, features), nn.Linear(4, 3, bias=False)
        self.conv = nn.Conv2d(4, 6, 3, groups=2)
        self.gamma, self.image_gamma = nn.Parameter(torch.rand(features) + 0.5), nn.Parameter(torch.rand(6))
        self.register_buffer("offset", torch.randn(1, 1, features))
        self.one = nn.Parameter(torch.rand(()) + 0.5)
        self.use = use

    def forward(self, x):
        return self.use(self, x)


def described_trace(model, inputs):
    """A graph with metadata and without a guard."""
    traced = torch.fx.symbolic_trace(model)
    FakeTensorProp(traced, FakeTensorMode(allow_non_fake_inputs=True)).propagate(*inputs)
    return traced


def check(use, x=X, sites=1, trace=fxopt_trace):
    return rewritten(FoldScaleAndShift(), Use(use), x, sites=sites, trace=trace)


def refuse(use, reason, x=X, trace=fxopt_trace, change=None):
    model = randomise(Use(use).eval())
    if change:
        change(model)
    refused(FoldScaleAndShift(), model, x, reason=reason, trace=trace)


BEHIND = {
    "number": lambda m, x: m.linear(x) * 0.3,
    "number first": lambda m, x: 3 * m.linear(x),
    "division": lambda m, x: m.linear(x) / 7,
    "method": lambda m, x: m.linear(x).mul(0.3),
    "function": lambda m, x: torch.true_divide(m.linear(x), other=5),
    "sum": lambda m, x: m.linear(x) + 2,
    "difference": lambda m, x: m.linear(x) - 2,
    "difference from": lambda m, x: 2 - m.linear(x),
    "rsub": lambda m, x: torch.rsub(m.linear(x), 2),
    "aten": lambda m, x: torch.ops.aten.mul.Tensor(m.linear(x), 0.5),
    "parameter": lambda m, x: m.gamma * m.linear(x),
    "divided by a parameter": lambda m, x: m.linear(x) / m.gamma,
    "one for all": lambda m, x: m.linear(x) * m.one,
    "shift": lambda m, x: m.linear(x) + m.gamma,
    "minus": lambda m, x: m.gamma - m.linear(x),
    "of more dimensions": lambda m, x: m.linear(x) + m.offset,
    "made of a parameter": lambda m, x: m.linear(x) * (1 + m.gamma.float().to(m.gamma.dtype)),
    "behind a view": lambda m, x: m.linear(x).flatten(0, 1) * m.gamma,
    "without a bias": lambda m, x: m.other(x) * 3,
    "a bias for a layer without": lambda m, x: m.other(x) + 3,
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("use", BEHIND)
def test_behind_a_linear_layer(use):
    after = check(BEHIND[use])
    assert [n.op for n in after.graph.nodes if n.op == "get_attr"] == []


@pytest.mark.parametrize("use", ["number", "parameter", "divided by a parameter", "shift", "minus"])
def test_without_metadata(use):
    check(BEHIND[use], trace=fx_trace)


def test_a_bias_made_of_one_number_can_be_trained():
    """In float64, in which folds are computed, it is no copy of anything else."""
    model = Use(lambda m, x: m.other(x) + 3).double()
    bias = FoldScaleAndShift()(trace(model, (X.double(),))).other.bias
    assert bias.stride() == (1,)
    with torch.no_grad():
        bias.add_(1)


def test_a_layer_without_a_bias_gets_none_for_a_scale():
    assert check(BEHIND["without a bias"]).other.bias is None
    assert check(BEHIND["a bias for a layer without"]).other.bias is not None


@pytest.mark.parametrize(
    ("use", "sites"),
    [
        (lambda m, x: m.conv(x) * 0.3, 1),
        (lambda m, x: m.conv(x) * m.image_gamma[:, None, None], 1),
        (lambda m, x: m.conv(x) + m.image_gamma.view(1, -1, 1, 1), 1),
        (lambda m, x: m.image_gamma.reshape(6, 1, 1) - m.conv(x), 1),
        (lambda m, x: m.conv(x * 0.3), 1),
        (lambda m, x: m.conv(x * m.gamma.view(4, 1, 1) - 2), 2),
    ],
)
def test_beside_a_convolution(use, sites):
    rewritten(FoldScaleAndShift(), Use(use), IMAGE, sites=sites, trace=fxopt_trace)


BEFORE = {
    "number": lambda m, x: m.linear(x * 0.3),
    "parameter": lambda m, x: m.linear(m.gamma * x),
    "shift": lambda m, x: m.linear(x - m.gamma),
    "both": lambda m, x: m.linear(x * m.gamma + 2),
    "of a norm that the model writes itself": lambda m, x: (
        m.linear(y := m.gamma * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))),
        m.other(y),
    ),
    "one plus": lambda m, x: m.linear(x * (1.0 + m.gamma)),
    "with its shape": lambda m, x: m.linear(y := x * m.gamma).view(y.shape[0], -1),
}


@pytest.mark.parametrize("use", BEFORE)
def test_before_layers(use):
    after = check(BEFORE[use], sites=1 + (use == "both"))
    assert not after.graph.find_nodes(op="get_attr")


def test_a_chain_goes_as_a_whole():
    after = check(lambda m, x: ((m.linear(x) * 2 + m.gamma) / 3 - 1) * m.one, sites=5)
    assert len(after.graph.nodes) == 4  # the input, its guard, the layer and the output


def test_who_reads_strides_reads_more_than_a_shape():
    def use(m, x):
        doubled = x.repeat(1, 1, 2)[..., :4] * 2  # without the gaps of what it is made of
        return m.linear(doubled) + doubled.stride()[1]

    refuse(use, "mul is also used by stride", trace=fx_trace)


REFUSED = [
    (lambda m, x: (y := m.linear(x)) * 2 + y, "linear is also used by"),
    (lambda m, x: (y := x * 2, m.linear(y)), "mul is also used by output"),
    (lambda m, x: m.linear(x) * m.image_gamma[:3, None], "has not one value for each of 4 channels"),
    (lambda m, x: m.linear(x) * m.other.weight.sum() + m.linear(x), "is also called by"),
    (lambda m, x: m.linear(x).mul_(2), "writes into what it takes"),
    (lambda m, x: m.linear(x) / 0, "not finite"),
    (lambda m, x: m.linear(x) * 1e300, "not finite"),
    (lambda m, x: m.linear(x[:, :, :1] * m.gamma), "fewer channels than the product"),
    (lambda m, x: m.linear(x.long() * 0.5), "is not known to be torch.float32"),
    (lambda m, x: m.linear(x) * m.other.weight.cumprod(0)[0].softmax(0), "not known to give the same"),
    (lambda m, x: m.linear(x) * m.gamma.double(), "the constant is torch.float64"),
    (lambda m, x: m.linear(x) * torch.rand_like(m.gamma), "rand_like may write into the constant"),
    (lambda m, x: (y := x * 1, m.linear(y + 2), y.mul_(2)), "mul_ may write into mul, which the call keeps"),
]


@pytest.mark.parametrize(("use", "reason"), REFUSED)
def test_refused(use, reason):
    refuse(use, reason)


@pytest.mark.parametrize(
    "use",
    [
        lambda m, x: m.linear(x) * x,
        lambda m, x: 3 / m.linear(x),
        lambda m, x: m.linear(x) // 2,
        lambda m, x: torch.div(m.linear(x), 2, rounding_mode="floor"),
        lambda m, x: torch.add(m.linear(x), 2, alpha=3),
        lambda m, x: m.linear(x) * True,
        lambda m, x: m.linear(x) * 2j,
        lambda m, x: m.linear(x) * float("nan"),
        lambda m, x: m.linear(x).relu() * 2,
        lambda m, x: m.linear(x)[..., :2] * 2,
        lambda m, x: m.linear(x).mT * m.gamma[:3],
        lambda m, x: m.linear(x).unsqueeze(-1) * m.gamma,
    ],
)
def test_left_alone(use):
    traced = fxopt_trace(randomise(Use(use).eval()), [X])
    assert not FoldScaleAndShift().explain(traced).rows


def test_a_number_that_the_graph_makes_of_a_shape():
    model = Use(lambda m, x: m.linear(x) / m.gamma.shape[0] ** 0.5)
    rewritten(FoldScaleAndShift(), model, X, sites=1, trace=fx_trace)


def test_a_tensor_that_is_no_buffer_does_not_become_one():
    traced = torch.fx.symbolic_trace(Use(lambda m, x: m.linear(x) * m.gamma))
    gamma = traced.gamma.detach()
    del traced.gamma
    traced.__dict__["gamma"] = gamma
    keys = list(traced.state_dict())
    assert "gamma is no plain parameter" in str(FoldScaleAndShift().explain(traced))
    assert list(FoldScaleAndShift()(traced).state_dict()) == keys


def test_a_shift_before_a_padded_convolution_is_refused():
    def change(model):
        model.conv = nn.Conv2d(4, 6, 3, padding=1)

    refuse(lambda m, x: m.conv(x + 2), "takes zeros beside its input", IMAGE, change=change)
    model = Use(lambda m, x: m.conv(x * 2))
    change(model)
    rewritten(FoldScaleAndShift(), model, IMAGE, sites=1, trace=fxopt_trace)


def test_more_dimensions_than_the_value_are_refused():
    refuse(lambda m, x: m.linear(x) * m.offset, "the constant has 3 dimensions", X[0, 0])
    refuse(lambda m, x: m.linear(x) * m.offset, "the constant has 3 dimensions", trace=fx_trace)
    refuse(lambda m, x: m.linear(x) * m.offset, "the constant has 3 dimensions", trace=described_trace)


def test_a_constant_that_others_take_too_is_verified_with_its_own_value():
    check(lambda m, x: (m.linear(x) * (scale := 1 + m.gamma), scale * 2))


def test_channels_that_nobody_checks():
    refuse(lambda m, x: m.linear(x * m.gamma), "fewer channels than the product", trace=described_trace)
    rewritten(FoldScaleAndShift(), Use(lambda m, x: m.linear(x * 2)), X, sites=1, trace=described_trace)
    refuse(lambda m, x: m.linear(x) * m.one.view(1, 1, 1, 1), "the constant has 4 dimensions")


def test_a_constant_for_each_position_is_refused_also_where_sizes_agree():
    model = Use(lambda m, x: m.conv(x) * m.image_gamma)
    refused(
        FoldScaleAndShift(), model.eval(), torch.randn(2, 4, 8, 8), reason="not one value", trace=fxopt_trace
    )
    model = Use(lambda m, x: m.linear(x) * m.gamma[:, None])
    refused(FoldScaleAndShift(), model.eval(), torch.randn(4, 4), reason="not one value", trace=fxopt_trace)


def test_writes_are_seen():
    def between(m, x):
        h = x * 1.5 + x
        y = h * 2
        h.add_(1)
        return m.linear(y)

    refuse(between, "may write into add")

    def into_the_constant(m, x):
        m.offset.add_(1)
        return m.linear(x) * m.offset

    refuse(into_the_constant, "may write into the constant")


def test_an_autocast_block_is_refused():
    def use(m, x):
        with torch.autocast("cpu", torch.bfloat16):
            return m.linear(x) * m.gamma

    refuse(use, "as in an autocast block")


def test_a_constant_that_is_computed_beside_an_autocast_block_is_refused():
    def use(m, x):
        with torch.autocast("cpu", torch.bfloat16):
            other = m.other(x)
        return m.linear(x) * (1 + m.gamma), other

    refuse(use, "computed in a graph with autocast")


def test_complex_weights_are_refused():
    refuse(
        lambda m, x: m.linear(x) * m.gamma,
        "the weight of the layer is torch.complex64",
        x=X.to(torch.complex64),
        change=lambda m: m.to(torch.complex64),
    )


def test_what_is_folded_is_not_trained_in_between():
    model = randomise(Use(BEHIND["parameter"]).eval())
    folded = FoldScaleAndShift()(trace(model, (X,)))
    with torch.no_grad():
        folded.gamma.add_(1)
    with pytest.raises(UndoError, match="gamma, which was folded into linear, was changed since"):
        FoldScaleAndShift()(folded, reverse=True)


def test_a_parameter_that_two_layers_take_is_folded_into_both():
    model = Use(lambda m, x: m.linear(x) * m.gamma + m.gamma * m.third(x))
    model.third = nn.Linear(4, 4)
    after = rewritten(FoldScaleAndShift(), model, X, sites=2, trace=fxopt_trace)
    assert "gamma" in after.state_dict()


def test_hooks_and_tied_parameters():
    def hooked(model):
        model.gamma.register_hook(lambda gradient: gradient)

    def odd(model):
        model.gamma.__class__ = type("Quantized", (nn.Parameter,), {})

    for change in (hooked, odd):
        refuse(BEHIND["parameter"], "no plain parameter or buffer without hooks", change=change)


def test_the_scale_is_in_the_dtype_of_the_layer():
    model = Use(BEHIND["parameter"]).eval()
    model.linear.bfloat16()
    refused(FoldScaleAndShift(), model, X.bfloat16(), reason="the layer torch.bfloat16", trace=fx_trace)


def test_a_parameter_that_is_trained_elsewhere_stays():
    model = randomise(Use(lambda m, x: (m.linear(x) * m.gamma).tanh() * m.gamma).train())
    graph = trace(model, (X,))
    (refusal,) = FoldScaleAndShift().explain(graph).refusals
    assert refusal[2] == "gamma is trained, and mul_1 reads it, too"
    model.gamma.requires_grad_(False)
    assert len(FoldScaleAndShift().explain(graph).sites) == 1
    model = randomise(Use(lambda m, x: m.tied(m.linear(x) * m.gamma)).train())
    model.tied = nn.Linear(4, 4)
    model.tied.bias = model.gamma
    (refusal,) = FoldScaleAndShift().explain(trace(model, (X,))).refusals
    assert refusal[2].startswith("gamma is trained, and tied reads it, too")


def test_what_the_record_holds_is_its_own_in_every_dtype():
    model = randomise(Use(BEHIND["parameter"]).eval()).double()
    before = model.linear.weight.detach().clone()
    graph = trace(model, (X.double(),))
    FoldScaleAndShift()(graph)
    step = pickle.dumps(graph)
    with torch.no_grad():
        graph.gamma.mul_(2)
    with pytest.raises(UndoError, match="gamma, which was folded into linear"):
        undo(graph)
    with torch.no_grad():
        graph.gamma.div_(2)
    assert torch.equal(undo(graph).linear.weight, before)
    assert torch.equal(undo(pickle.loads(step)).linear.weight, before)
