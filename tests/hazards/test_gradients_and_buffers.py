"""Frozen weights, gradients, optimizers and observers that hold the old parameters, and buffers that change."""

import copy

import pytest
import torch
from torch import nn

from fxopt.testing import assert_round_trip, randomise
from tests.before_after import assert_untouched
from tests.hazards.sites import PACKING, SITES, TRACED, TRACERS, own_leaves, safe, unsafe

FOLDS = ["conv-norm", "conv1d-norm", "transposed-norm", "linear-norm", "norm-linear"]
PRESERVING = [
    (name, tracer)
    for name, tracer in TRACED
    if SITES[name].pass_.preserves_computation and name not in PACKING
]
NEW_WEIGHTS = ["merge", "bias", *FOLDS, "precision"]


def frozen(*names):
    def change(model):
        for name in names:
            if "." in name:
                model.get_parameter(name).requires_grad_(False)
            else:
                model.get_submodule(name).requires_grad_(False)

    return change


SAFE_MIXES = [
    *(("merge", mix) for mix in [("a.weight", "b.weight"), ("a.bias", "b.bias"), ("a", "b")]),
    ("bias", ("a",)),
    *(
        (name, mix)
        for name in FOLDS
        for mix in [("a.weight",), ("a.bias",), ("a",), ("norm",), ("norm.bias",)]
    ),
    *(("precision", mix) for mix in [("a.weight",), ("a.bias",), ("a",)]),
]
REFUSED_MIXES = [
    *(("merge", mix, "gradients") for mix in [("a",), ("a.weight",), ("b.bias",), ("a.weight", "b.bias")]),
    *(("bias", mix, "only one of its weight and bias") for mix in [("a.weight",), ("a.bias",)]),
]


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("name", "mix"), SAFE_MIXES)
def test_frozen_parameters_that_are_no_obstacle(name, mix):
    site = SITES[name]
    model = site.model()
    frozen(*mix)(model)
    after = safe(site, model, "own")
    layer = after.get_submodule("fxopt_merged_a_b" if name == "merge" else "a")
    assert layer.weight.requires_grad == model.a.weight.requires_grad
    if layer.bias is not None:
        assert layer.bias.requires_grad == model.a.bias.requires_grad


@pytest.mark.parametrize(("name", "mix", "reason"), REFUSED_MIXES)
@pytest.mark.parametrize("tracer", ["fx", "own"])
def test_frozen_parameters_that_one_parameter_cannot_be(name, mix, reason, tracer):
    site = SITES[name]
    model = site.model()
    frozen(*mix)(model)
    unsafe(site, model, tracer, reason)


def total(output):
    return sum((part.double() ** 2).sum() for part in (output if isinstance(output, tuple) else (output,)))


@pytest.mark.parametrize(("name", "tracer"), PRESERVING)
def test_gradients_to_inputs_stay(name, tracer):
    site = SITES[name]
    x = site.x.double().requires_grad_()
    traced = TRACERS[tracer](randomise(site.model().double().eval()), [x])
    (expected,) = torch.autograd.grad(total(traced(x)), x)
    after = site.pass_(traced)
    assert site.pass_.get_transformed_nodes(after)
    (actual,) = torch.autograd.grad(total(after(x)), x)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", NEW_WEIGHTS)
def test_an_input_without_gradients_gets_none_from_a_frozen_layer(name):
    site = SITES[name]
    model = site.model().eval().requires_grad_(False)
    after = site.pass_(own_leaves(model, [site.x]))
    outputs = after(site.x)
    assert not any(part.requires_grad for part in (outputs if isinstance(outputs, tuple) else (outputs,)))


def trained(site):
    """A model in eval mode after one step, the optimizer, and the gradients of one more."""
    model = randomise(site.model().eval())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.step()
        optimizer.zero_grad()
        total(model(site.x)).backward()
    return model, optimizer


@pytest.mark.parametrize("name", NEW_WEIGHTS)
def test_the_model_and_its_optimizer_are_not_touched(name):
    site = SITES[name]
    model, optimizer = trained(site)
    parameters, untouched = dict(model.named_parameters()), copy.deepcopy(model)
    facts = {key: (id(p), p._version, p.grad, p.grad.clone()) for key, p in parameters.items()}
    state = copy.deepcopy(optimizer.state_dict())

    after = site.pass_(own_leaves(model, [site.x]))
    site.pass_(copy.deepcopy(after), reverse=True)
    restored = site.pass_(after, reverse=True)

    assert_untouched(untouched, model)
    for key, parameter in model.named_parameters():
        identity, version, gradient, values = facts[key]
        assert (id(parameter), parameter._version) == (identity, version)
        assert parameter.grad is gradient
        assert torch.equal(gradient, values)
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert [id(parameter) for parameter in held] == [id(parameter) for parameter in parameters.values()]
    torch.testing.assert_close(optimizer.state_dict()["state"], state["state"], rtol=0, atol=0)
    assert_round_trip(own_leaves(model, [site.x]), restored)


@pytest.mark.parametrize("name", NEW_WEIGHTS)
def test_a_step_on_the_old_parameters_does_not_reach_the_new_ones(name):
    """Nor the record: undoing gives the weights that were rewritten."""
    site = SITES[name]
    model, optimizer = trained(site)
    before = copy.deepcopy(own_leaves(model, [site.x]))
    after = site.pass_(own_leaves(model, [site.x]))
    with torch.no_grad():
        expected = after(site.x)
        old = [parameter.clone() for parameter in model.parameters()]
        optimizer.step()
        assert not any(map(torch.equal, old, model.parameters()))
        torch.testing.assert_close(after(site.x), expected, rtol=0, atol=0)
    assert_round_trip(before, site.pass_(after, reverse=True))


class Spy(nn.Module):
    """Looks at a layer that it does not own."""

    def __init__(self, layer):
        super().__init__()
        self.held = [layer]
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        return x * self.held[0].weight.detach().abs().sum()


@pytest.mark.parametrize("name", ["bias", *FOLDS])
def test_an_observer_that_holds_a_layer_sees_the_old_one(name):
    site = SITES[name]
    model = randomise(site.model(lambda m, x: (site.use(m, x), m.spy(x * 2))).eval())
    model.spy = Spy(model.a)
    traced = TRACERS["own"](model, [site.x])
    with torch.no_grad():
        expected = traced(site.x)
        after = site.pass_(traced)
        assert site.pass_.get_transformed_nodes(after)
        actual = after(site.x)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert model.spy.held[0] is model.a


@pytest.mark.parametrize("name", FOLDS)
def test_an_observer_between_the_layers_is_no_site(name):
    site = SITES[name]

    def use(m, x):
        return m.a(m.observer(m.norm(x))) if name == "norm-linear" else m.norm(m.observer(m.a(x)))

    model = site.model(use, observer=torch.ao.quantization.MinMaxObserver()).eval()
    traced = TRACERS["own"](model, [site.x])
    code = traced.code
    assert not site.pass_.explain(traced).sites
    assert site.pass_(traced).code == code


def features(output):
    first = output[0] if isinstance(output, tuple) else output
    return first if first.ndim == 2 else first.flatten(2).mean(2)


@pytest.mark.parametrize("name", ["merge", "bias", *FOLDS, "division"])
def test_a_norm_that_trains_behind_the_site_counts_as_before(name):
    site = SITES[name]

    def use(m, x):
        y = features(site.use(m, x))
        return m.late(y), y

    model = site.model(use)
    with torch.no_grad():
        width = features(site.model().eval()(site.x)).shape[1]
    model.late = nn.BatchNorm1d(width)
    randomise(model.eval()).late.train()
    traced = own_leaves(model, [site.x])
    before, after = copy.deepcopy(traced), site.pass_(copy.deepcopy(traced))
    assert site.pass_.get_transformed_nodes(after)
    for _ in range(2):
        torch.testing.assert_close(after(site.x), before(site.x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(after.late.state_dict(), before.late.state_dict(), rtol=1e-4, atol=1e-5)
    assert after.late.num_batches_tracked == model.late.num_batches_tracked + 2
    undone = site.pass_(after, reverse=True)
    assert undone.late.num_batches_tracked == before.late.num_batches_tracked


@pytest.mark.parametrize("name", FOLDS)
@pytest.mark.parametrize("tensor", ["running_mean", "running_var"])
def test_statistics_that_a_norm_in_training_updates_are_refused(name, tensor):
    site = SITES[name]
    model = site.model(lambda m, x: (m.late(torch.cat([x, x], 1)[:, :4]), site.use(m, x))).eval()
    model.late = type(model.norm)(4).train()
    safe_variant = site.pass_.explain(own_leaves(model, [site.x]))
    setattr(model.late, tensor, getattr(model.norm, tensor))
    assert len(safe_variant.sites) == 1
    unsafe(site, model, "own", "may write into the statistics")
