"""Numbers that decide: dimensions, training mode, statistics, dtypes, divisors, writes between."""

import math

import pytest
import torch
from torch import nn

from tests.hazards.sites import IMAGE, ROWS, SITES, own_leaves, safe, unsafe

NORMS = ["conv-norm", "linear-norm", "norm-linear"]


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.norm.train(), "in training mode"),
        (
            lambda m: setattr(m, "norm", type(m.norm)(4, track_running_stats=False).eval()),
            "no running statistics",
        ),
        (lambda m: m.norm.running_var.fill_(-1.0), "not finite"),
    ],
)
def test_a_norm_that_is_no_scale_and_shift_is_refused(name, change, reason):
    site = SITES[name]
    model = site.model().eval()
    change(model)
    unsafe(site, model, "own", reason)


def test_a_norm_in_float64_behind_a_float32_layer_is_refused():
    model = SITES["conv-norm"].model().eval()  # torch runs no such model with a linear layer
    model.norm.double()
    unsafe(SITES["conv-norm"], model, "fx", "torch.float64 on cpu, the layer")


@pytest.mark.parametrize("name", NORMS)
def test_a_frozen_norm_in_a_training_model_is_folded(name):
    site = SITES[name]
    model = site.model().train()
    model.norm.eval()
    assert len(site.pass_.explain(torch.fx.symbolic_trace(model)).rows) == 1
    safe(site, site.model(), "own")


@pytest.mark.parametrize("name", ["linear-norm", "norm-linear"])
def test_three_dimensions_are_refused_also_where_all_sizes_agree(name):
    unsafe(SITES[name], SITES[name].model().eval(), "own", "have 3 dimensions", torch.randn(2, 4, 4))


@pytest.mark.parametrize("name", ["linear-norm", "norm-linear"])
def test_one_feature_is_folded(name):
    site = SITES[name]
    model = site.model()
    model.a, model.norm = nn.Linear(1, 1), nn.BatchNorm1d(1)
    safe(site, model, "own", torch.randn(5, 1))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("name", NORMS)
def test_missing_biases_and_affine_parameters(name, affine, bias):
    site = SITES[name]
    model = site.model()
    model.a = nn.Conv2d(3, 4, 3, bias=bias) if name == "conv-norm" else nn.Linear(4, 4, bias=bias)
    model.norm = type(model.norm)(4, affine=affine)
    safe(site, model, site.tracers[0])


CONVS = [
    nn.Conv2d(3, 4, 3, padding=2, dilation=2, stride=2),
    nn.Conv2d(3, 4, 3, padding="same", padding_mode="reflect"),
    nn.Conv2d(3, 4, 3, padding=1, padding_mode="replicate", bias=False),
    nn.Conv2d(3, 4, (1, 3), padding=(0, 1), padding_mode="circular"),
    nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
]


@pytest.mark.parametrize("number", range(len(CONVS)))
@pytest.mark.parametrize("tracer", ["fx", "own"])
def test_options_of_convolutions(number, tracer):
    model = SITES["conv-norm"].model()
    model.a = CONVS[number]
    safe(SITES["conv-norm"], model, tracer)


def test_a_transposed_convolution_is_left_alone():
    model = SITES["conv-norm"].model().eval()
    model.a = nn.ConvTranspose2d(3, 4, 3)
    assert not SITES["conv-norm"].pass_.explain(torch.fx.symbolic_trace(model)).rows
    assert model(IMAGE).shape[1] == 4


@pytest.mark.parametrize(
    ("use", "reason"),
    [
        (lambda m, x: x / 0, "the denominator is 0"),
        (lambda m, x: x / math.inf, "the denominator is inf"),
        (lambda m, x: x / math.nan, "the denominator is nan"),
        (lambda m, x: x / True, "is a bool"),
        (lambda m, x: x / 1e300, "outside of the normal range"),
        (lambda m, x: x.to(torch.complex64) / 4, "the numerator is complex"),
        (lambda m, x: x.long() / 49, "not known to be a floating tensor"),
        (lambda m, x: (x > 0) / 7, "not known to be a floating tensor"),
        (lambda m, x: (x / 49) == 1, "keep the error small"),
        (lambda m, x: (x / 49 / 7).int(), "keep the error small"),
        (lambda m, x: torch.special.round(x / 49), "keep the error small"),
        (lambda m, x: torch.histogram(x / 49, 4, range=(-1.0, 1.0))[0], "keep the error small"),
        (lambda m, x: 1 / (1 - x / 49), "keep the error small"),
        (lambda m, x: torch.logit(x / 49), "keep the error small"),
        (
            lambda m, x: torch.nn.functional.adaptive_max_pool1d(x / 49, 2, return_indices=True),
            "keep the error small",
        ),
    ],
)
def test_divisions_that_are_refused(use, reason):
    unsafe(SITES["division"], SITES["division"].model(use), "own", reason)


@pytest.mark.parametrize(
    ("use", "sites"),
    [
        (lambda m, x: x / 49 / 7 / 2, 3),
        (lambda m, x: (x / 8).floor(), 1),
        (lambda m, x: x.long() / 8, 1),
        (lambda m, x: (x > 0) / 4, 1),
        (lambda m, x: (x / 49, x.floor()), 1),
        (lambda m, x: (x / -3).softmax(-1).argmax(-1), 1),
    ],
)
def test_divisions_that_are_rewritten(use, sites):
    safe(SITES["division"], SITES["division"].model(use), "own", sites=sites)


WRITES = {
    "method": lambda x: x.mul_(2),
    "out": lambda x: torch.add(x, 1, out=x),
    "a view": lambda x: x.t().add_(1),
    "a detached alias": lambda x: x.detach().zero_(),
    "inplace": lambda x: torch.nn.functional.relu(x, inplace=True),
    "foreach": lambda x: torch._foreach_add_([x], 1.0),
    "a part": lambda x: x.detach().unbind(0)[0].add_(1),
}
REBINDS = ("method", "out", "inplace", "foreach")


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("tracer", ["fx", "own"])
def test_writes_to_the_input_between_merged_layers(write, tracer):
    def use(m, x):
        h = x * 1
        first = m.a(h)
        WRITES[write](h)
        return first, m.b(h)

    if tracer == "own" and write in REBINDS:  # the second layer reads what the write returned: another value
        traced = own_leaves(SITES["merge"].model(use), [ROWS])
        assert not SITES["merge"].pass_.explain(traced).sites
        return
    with torch.no_grad():
        unsafe(SITES["merge"], SITES["merge"].model(use), tracer, "stands between")


@pytest.mark.parametrize("write", WRITES)
def test_writes_to_the_input_before_the_layer_behind_a_norm(write):
    def use(m, x):
        h = x * 1
        y = m.norm(h)
        WRITES[write](h)
        return m.a(y)

    site, model = SITES["norm-linear"], SITES["norm-linear"].model(use).eval()
    with torch.no_grad():
        if write == "inplace":  # nobody reads this memory again, so that the graph writes nothing
            safe(site, model, "own")
        else:
            unsafe(site, model, "own", "may write into")


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("used", [False, True])
def test_writes_into_a_merged_output(write, used):
    """They stay in their slice; after another slice was used, autograd would count them as writes into that."""

    def use(m, x):
        first, second = m.a(x), m.b(x)
        third = second.sigmoid() if used else second
        WRITES[write](first)
        return first, second, third

    site = SITES["merge"]
    with torch.no_grad():
        written = write in ("method", "a view", "a detached alias", "a part")
        if (
            written and not used
        ) or write == "inplace":  # the graph has a value of its own in the place of that one
            safe(site, site.model(use), "own")
        else:
            unsafe(site, site.model(use), "own", "into its output")


@pytest.mark.parametrize("view", ["reshape", "contiguous", "flatten", "ravel"])
def test_writes_beside_what_is_a_view_of_a_tensor_and_a_copy_of_a_slice(view):
    def use(m, x):
        first = m.a(x)
        other = first.reshape(-1) if view == "reshape" else getattr(first, view)()
        other.add_(1)
        return first * 1, other, m.b(x)

    with torch.no_grad():
        unsafe(SITES["merge"], SITES["merge"].model(use), "fx", "may be a view or a copy")


@pytest.mark.sweep(3)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("name", ["conv-norm", "linear-norm", "bias"])
def test_writes_into_other_outputs_are_no_obstacle(write, name):
    site = SITES[name]

    def use(m, x):
        y = site.use(m, x)
        if y.ndim == 2:
            WRITES[write](y)
        return y

    safe(site, site.model(use), "own")


def test_a_norm_of_another_size_is_refused():
    model = SITES["conv-norm"].model().eval()
    model.norm = nn.BatchNorm2d(5).eval()
    unsafe(SITES["conv-norm"], model, "fx", "features, the layer has 4")
