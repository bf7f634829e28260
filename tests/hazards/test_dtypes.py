"""Dtypes that decide: autocast regions, layers of different dtypes, the range of float16, complex, double."""

import copy

import pytest
import torch
from torch import nn

import fxopt
from fxopt.testing import assert_equivalent, assert_round_trip, randomise
from tests.hazards.sites import PACKING, ROWS, SITES, TRACERS, fx_leaves, own_leaves, safe, unsafe

FOLDS = ["conv-norm", "linear-norm", "norm-linear"]
PRESERVING = [name for name in SITES if SITES[name].pass_.preserves_computation and name not in PACKING]


def low():
    return torch.autocast("cpu", dtype=torch.bfloat16)


def around(use):
    def forward(m, x):
        with low():
            return use(m, x)

    return forward


def first_inside(m, x):
    with low():
        first = m.a(x)
    return first, m.b(x)


def second_inside(m, x):
    first = m.a(x)
    with low():
        return first, m.b(x)


def inside_a_nested_one(m, x):
    with low():
        first = m.a(x)
        with torch.autocast("cpu", enabled=False):
            return first, m.b(x)


def layer_inside(m, x):
    with low():
        y = m.a(x)
    return m.norm(y) + 1


def norm_inside(m, x):
    y = m.a(x)
    with low():
        return m.norm(y) + 1


def norm_first_inside(m, x):
    with low():
        y = m.norm(x)
    return m.a(y) + 1


def norm_first_outside(m, x):
    y = m.norm(x)
    with low():
        return m.a(y) + 1


@pytest.mark.parametrize(
    "name",
    [n for n in SITES if n not in ("attention", "precision", "norm-linear", "norm-weights", "shift-linear")],
)
def test_a_site_inside_of_an_autocast_block_is_rewritten(name):
    site = SITES[name]
    after = safe(site, site.model(around(site.use)), "own")
    assert any("autocast" in getattr(n.target, "__name__", "") for n in after.graph.nodes)


def test_attention_inside_of_an_autocast_block_is_refused():
    """Autocast runs its softmax in float32, and would run the call in bfloat16 with what masks it in that dtype."""
    site = SITES["attention"]
    unsafe(
        site,
        site.model(around(site.use)).eval(),
        "own",
        "is in torch.float32, and the output in torch.bfloat16",
    )


def test_a_norm_in_float32_before_a_layer_in_bfloat16_is_refused():
    """Folded, the layer would round a large input to bfloat16 before its mean is taken off."""
    site = SITES["norm-linear"]
    model = site.model(around(site.use)).eval()
    unsafe(site, model, "own", "norm gives torch.float32, a works in torch.bfloat16")
    low_use = around(lambda m, x: m.a(m.norm(x.bfloat16())) + 1)
    assert site.pass_.explain(own_leaves(site.model(low_use).eval(), [site.x])).sites


def test_a_graph_that_chooses_dtypes_keeps_its_precision():
    site = SITES["precision"]
    unsafe(site, site.model(around(site.use)), "own", "autocast block")


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("merge", first_inside),
        ("merge", second_inside),
        ("merge", inside_a_nested_one),
        ("conv-norm", layer_inside),
        ("conv-norm", norm_inside),
        ("linear-norm", layer_inside),
        ("linear-norm", norm_inside),
        ("norm-linear", norm_first_inside),
        ("norm-linear", norm_first_outside),
    ],
)
def test_a_border_of_an_autocast_block_inside_of_the_site_is_refused(name, use):
    unsafe(SITES[name], SITES[name].model(use).eval(), "own", "has a side effect between")


@pytest.mark.parametrize("name", PRESERVING)
def test_in_an_autocast_block_around_the_graph_the_dtype_stays(name):
    site = SITES[name]
    model = randomise(site.model().eval())
    before, after = own_leaves(model, [site.x]), site.pass_(own_leaves(model, [site.x]))
    with torch.no_grad(), low():
        expected, actual = before(site.x), after(site.x)
    torch.testing.assert_close(actual, expected, rtol=0.05, atol=0.05)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", PRESERVING)
def test_one_dtype_for_all(name, dtype):
    site = SITES[name]
    model, x = randomise(site.model().eval()).to(dtype), site.x.to(dtype)
    trace = own_leaves if "own" in site.tracers else fx_leaves
    before, after = trace(model, [x]), site.pass_(trace(model, [x]))
    assert site.pass_.get_transformed_nodes(after)
    assert {p.dtype for p in after.parameters()} <= {dtype}
    wide = copy.deepcopy(model).double()
    pair = trace(wide, [x.double()]), site.pass_(trace(wide, [x.double()]))
    assert_equivalent(before, after, [x], float64=pair)
    assert_round_trip(trace(model, [x]), site.pass_(after, reverse=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_model_in_another_dtype_than_float32_keeps_its_precision(dtype):
    site = SITES["precision"]
    traced = own_leaves(site.model().to(dtype), [site.x.to(dtype)])
    code = traced.code
    assert not site.pass_.explain(traced).sites
    assert site.pass_(traced).code == code


def low_layer(site, use=None):
    model = site.model(use).eval()
    model.a.bfloat16()
    return model


@pytest.mark.parametrize(
    ("name", "tracer"), [("conv-norm", "fx"), ("conv-norm", "own"), ("linear-norm", "own")]
)
def test_a_low_layer_and_a_float32_norm_are_refused(name, tracer):
    """torch runs such a norm, in float32, on what the layer gives in bfloat16."""
    site, x = SITES[name], SITES[name].x.bfloat16()
    assert low_layer(site)(x).dtype == torch.bfloat16
    unsafe(site, low_layer(site), tracer, "the layer torch.bfloat16", x)


@pytest.mark.parametrize("name", FOLDS)
def test_a_low_layer_and_a_float32_norm_are_refused_in_an_autocast_block(name):
    site = SITES[name]
    unsafe(site, low_layer(site, around(site.use)), "own", "the layer torch.bfloat16")


def test_layers_of_two_dtypes_are_not_merged():
    """In an autocast block, torch runs both on the same input."""
    site = SITES["merge"]
    unsafe(site, low_layer(site, around(site.use)), "own", "differ in dtype")


def test_a_bias_in_another_dtype_than_the_weight_is_refused():
    site = SITES["bias"]
    model = site.model(around(site.use))
    model.a.bias = nn.Parameter(model.a.bias.detach().bfloat16())
    model(site.x)
    unsafe(site, model, "own", "differ in dtype or device")


@pytest.mark.parametrize("which", ["scale", "shift"])
@pytest.mark.parametrize("name", FOLDS)
def test_folded_weights_outside_of_float16_are_refused(name, which):
    site = SITES[name]
    model = site.model().half().eval()
    with torch.no_grad():
        model.a.weight.fill_(8)
        if which == "scale":
            model.norm.weight.fill_(60000)
        else:
            model.norm.running_mean.fill_(60000)
            model.norm.running_var.fill_(1e-4)
    unsafe(site, model, "own", "not finite in torch.float16", site.x.half())
    safe(site, copy.deepcopy(model).float(), "own")


def test_weights_outside_of_float16_saturate():
    """No finite weight becomes infinite, and undoing gives the old one back."""
    model = SITES["precision"].model()
    with torch.no_grad():
        model.a.weight.fill_(1e6)
    traced = own_leaves(model, [ROWS])
    pass_ = fxopt.ChangePrecision(torch.float16)
    after = pass_(copy.deepcopy(traced))
    assert after.a.weight.eq(torch.finfo(torch.float16).max).all()
    assert_round_trip(traced, pass_(after, reverse=True))


@pytest.mark.parametrize("name", ["merge", "bias"])
@pytest.mark.parametrize("tracer", ["fx", "own"])
def test_complex_layers_are_rewritten(name, tracer):
    site, x = SITES[name], torch.randn(5, 4, dtype=torch.complex64)
    model = site.model().to(torch.complex64)
    trace = TRACERS[tracer]
    before, after = trace(model, [x]), site.pass_(trace(model, [x]))
    assert site.pass_.get_transformed_nodes(after)
    torch.testing.assert_close(after(x), before(x))
    assert_round_trip(trace(model, [x]), site.pass_(after, reverse=True))


@pytest.mark.parametrize("name", ["division", "precision", "activation"])
def test_complex_values_are_left_alone(name):
    site = SITES[name]
    model = site.model(lambda m, x: x / 8) if name == "division" else site.model()
    if name == "activation":
        model.a = nn.Sigmoid()
    model, x = model.to(torch.complex64), site.x.to(torch.complex64)
    traced = own_leaves(model, [x])
    code, expected = traced.code, traced(x)
    after = site.pass_(traced)
    assert after.code == code
    assert torch.equal(after(x), expected)


def test_real_layers_beside_complex_values_are_rewritten():
    def use(m, x):
        return m.a(x), m.b(x), torch.view_as_real(torch.complex(x, x) * 1j)

    safe(SITES["merge"], SITES["merge"].model(use), "own")
