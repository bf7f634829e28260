"""Numbers that decide: dimensions, training mode, statistics, dtypes, divisors, writes between."""

import pytest
import torch
from torch import nn

from tests.hazards.sites import ROWS, SITES, own_leaves, safe, unsafe

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
    assert len(site.pass_.explain(own_leaves(model, [site.x])).sites) == 1


@pytest.mark.parametrize("name", ["linear-norm", "norm-linear"])
def test_three_dimensions_are_refused_also_where_all_sizes_agree(name):
    unsafe(SITES[name], SITES[name].model().eval(), "own", "have 3 dimensions", torch.randn(2, 4, 4))


@pytest.mark.parametrize("name", ["linear-norm", "norm-linear"])
def test_one_feature_is_folded(name):
    site = SITES[name]
    model = site.model()
    model.a, model.norm = nn.Linear(1, 1), nn.BatchNorm1d(1)
    safe(site, model, "own", torch.randn(5, 1))


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
        unsafe(SITES["merge"], SITES["merge"].model(use), tracer, "is between")


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
def test_writes_into_a_merged_output(write):
    """Autograd would count them as writes into all slices."""

    def use(m, x):
        first, second = m.a(x), m.b(x)
        WRITES[write](first)
        return first, second

    site = SITES["merge"]
    with torch.no_grad():
        if write == "inplace":  # the graph has a value of its own in the place of that one
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
        unsafe(SITES["merge"], SITES["merge"].model(use), "fx", "into its output")


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
