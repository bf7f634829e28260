"""One layer at two call sites, under two names, tied, or read by the graph itself; and what is only near that."""

import pytest
import torch
from torch import nn

import fxopt
from tests.before_after import refused
from tests.hazards.sites import LAYERS, PACKING, ROWS, SITES, TRACED, Use, crossed, fx_leaves, safe, unsafe

FOLDED = [
    (name, layer)
    for name, layer in LAYERS
    if layer == "a" and name not in ("activation", "precision", *PACKING)
]
EACH = pytest.mark.parametrize(
    ("name", "tracer"), [(name, tracer) for _, name, _, tracer in crossed([""], FOLDED)]
)


def also(use, other):
    def forward(m, x):
        return use(m, x), other(m, x)

    return forward


@EACH
@pytest.mark.parametrize(
    ("other", "reason"),
    [(lambda m, x: m.a(x * 2), "also called by"), (lambda m, x: m.a.weight * 2, "reads a.weight")],
)
def test_another_call_and_a_read_of_the_weight_are_refused(name, tracer, other, reason):
    site = SITES[name]
    unsafe(site, site.model(also(site.use, other)).eval(), tracer, reason)


@EACH
@pytest.mark.parametrize("alias", [False, True], ids=["tied", "the same memory"])
def test_a_weight_tied_to_the_outside_is_refused(name, tracer, alias):
    site = SITES[name]
    model = site.model(also(site.use, lambda m, x: m.other(x * 2)))
    model.other = site.layers()["a"]
    model.other.weight = nn.Parameter(model.a.weight.detach()) if alias else model.a.weight
    unsafe(site, model.eval(), tracer, "weight shares memory with other.weight")


@EACH
def test_a_layer_under_two_names_is_refused_where_both_are_called(name, tracer):
    site = SITES[name]
    model = site.model(also(site.use, lambda m, x: m.again(x * 2)))
    model.again = model.a
    # fx writes both calls under one name
    unsafe(site, model.eval(), tracer, "also called by" if tracer == "fx" else "several names")


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("name", "tracer"), TRACED)
def test_a_layer_of_the_same_values_elsewhere_is_no_obstacle(name, tracer):
    site = SITES[name]
    model = site.model(also(site.use, lambda m, x: x.tanh() * 2))
    safe(site, model, tracer)


def test_an_activation_called_with_two_tensors_is_refused():
    class Gate(nn.Module):
        def forward(self, x, gate=None):
            return x if gate is None else x * gate

    model = Use(lambda m, x: m.a(x, x * 2), a=Gate())
    pass_ = fxopt.ReplaceActivation(Gate, "relu")
    refused(pass_, model, ROWS, reason="does not call it with one tensor alone", trace=fx_leaves)


@pytest.mark.parametrize("tracer", ["fx", "own"])
def test_layers_called_by_keyword_are_rewritten(tracer):
    for name, use in {
        "merge": lambda m, x: (m.a(input=x), m.b(input=x)),
        "bias": lambda m, x: m.a(input=x) + 1,
        "conv-norm": lambda m, x: m.norm(input=m.a(input=x)) + 1,
        "activation": lambda m, x: m.a(input=x) + 1,
    }.items():
        safe(SITES[name], SITES[name].model(use), tracer)


OUTPUTS = {
    "tuple": lambda value: (value, 1),
    "dict": lambda value: {"key": [value]},
    "slice": lambda value: value[..., 1:],
    "twice": lambda value: (value, value),
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize(("output", "name", "tracer"), [(o, n, t) for o in OUTPUTS for n, t in TRACED])
def test_outputs_of_every_kind_keep_their_values(output, name, tracer):
    site = SITES[name]

    def use(m, x):
        return OUTPUTS[output](
            site.use(m, x)[0] if name in ("merge", "conv-merge") else site.use(m, x)
        ), torch.relu(x)

    safe(site, site.model(use), tracer)
