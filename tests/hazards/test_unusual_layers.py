"""Layers that compute something else than their type says: hooks, parametrizations, subclasses, own forwards."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import fxopt
from tests.hazards.sites import IMAGE, ROWS, SITES, Use, crossed, safe, unsafe


def first_tensor(layer):
    return next(layer.parameters())


def subclass(layer):
    def forward(self, input):
        return type(self).__mro__[1].forward(self, input) * 2

    layer.__class__ = type("LoRA", (type(layer),), {"forward": forward})


def own_forward(layer):
    plain = copy.copy(layer)
    layer.forward = lambda input: plain(input) * 2


def odd_parameter(layer):
    layer.weight.__class__ = type("Quantized", (nn.Parameter,), {})


def old_norm(function):
    def change(layer):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            function(layer)
        layer.weight = layer.weight.detach()  # so that it can be copied

    return change


HAZARDS = {
    "forward hook": (lambda m: m.register_forward_hook(lambda m, a, out: out * 2), "hooks (forward_hooks)"),
    "pre-hook": (lambda m: m.register_forward_pre_hook(lambda m, a: None), "hooks (forward_pre_hooks)"),
    "backward hook": (lambda m: m.register_full_backward_hook(lambda *a: None), "hooks (backward_hooks)"),
    "backward pre-hook": (lambda m: m.register_full_backward_pre_hook(lambda *a: None), "backward_pre_hooks"),
    "state dict hook": (lambda m: m.register_state_dict_post_hook(lambda *a: None), "state_dict_hooks"),
    "load hook": (
        lambda m: m.register_load_state_dict_pre_hook(lambda *a: None),
        "load_state_dict_pre_hooks",
    ),
    "own forward": (own_forward, "forward of the module was replaced on the instance"),
    "compiled": (lambda m: m.compile(), "forward of the module was replaced on the instance"),
    "subclass": (subclass, "LoRA"),
    "tensor hook": (lambda m: first_tensor(m).register_hook(lambda g: g), "weight has hooks"),
    "accumulated": (lambda m: first_tensor(m).register_post_accumulate_grad_hook(print), "weight has hooks"),
    "odd parameter": (odd_parameter, "weight is a Quantized, not a plain parameter"),
    "old weight norm": (old_norm(torch.nn.utils.weight_norm), "hooks"),
    "old spectral norm": (old_norm(torch.nn.utils.spectral_norm), "hooks"),
    "weight norm": (torch.nn.utils.parametrizations.weight_norm, "Parametrized"),
    "spectral norm": (torch.nn.utils.parametrizations.spectral_norm, "Parametrized"),
    "parametrization": (
        lambda m: torch.nn.utils.parametrize.register_parametrization(m, "weight", nn.Tanh()),
        "Parametrized",
    ),
}
ON_WEIGHTS = set(list(HAZARDS)[9:])
VECTORS = {"spectral norm", "old spectral norm", "weight norm"}  # which take no vector as weight


def exists(hazard, name, layer):
    """True where the layer has a weight of the kind that the hazard changes."""
    return not (layer == "norm" and hazard in VECTORS) and not (name == "activation" and hazard in ON_WEIGHTS)


CASES = [case for case in crossed(HAZARDS) if exists(*case[:3])]


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("hazard", "name", "layer", "tracer"), CASES)
def test_is_refused(hazard, name, layer, tracer):
    site = SITES[name]
    model = site.model().eval()
    change, reason = HAZARDS[hazard]
    change(getattr(model, layer))
    if name == "precision" and hazard == "weight norm":
        reason = "hooks (load_state_dict_pre_hooks)"
    elif name == "precision" and "Parametrized" in reason:  # a copy of the whole layer is no problem
        safe(site, model, tracer, picklable=False)
        return
    unsafe(site, model, tracer, reason)


@pytest.mark.parametrize(
    "name", [name for name in SITES if name not in ("attention", "copy", "division", "duplicate", "heads")]
)
def test_hooks_for_all_modules_are_refused(name):
    handle = register_module_forward_hook(lambda module, args, output: None)
    try:
        unsafe(SITES[name], SITES[name].model().eval(), SITES[name].tracers[0], "hooks for all modules")
    finally:
        handle.remove()


def test_a_lazy_layer_is_one_once_it_has_run():
    model = Use(lambda m, x: m.norm(m.a(x)), a=nn.LazyConv2d(4, 3), norm=nn.LazyBatchNorm2d()).eval()
    model(IMAGE)
    safe(SITES["conv-norm"], model, "fx")
    model = Use(lambda m, x: (m.a(x), m.b(x)), a=nn.LazyLinear(3), b=nn.LazyLinear(2))
    traced = torch.fx.symbolic_trace(model)
    assert "LazyLinear" in SITES["merge"].pass_.explain(traced).refusals[0][2]
    assert SITES["merge"].pass_(traced) is traced
    model(ROWS)
    safe(SITES["merge"], model, "fx")


def test_a_forward_on_an_instance_may_write():
    def use(m, x):
        x = x * 1
        first, second = m.a(x), torch.sin(x)
        m.relu(x)
        return first, m.b(x), second, torch.sin(x)

    model = Use(use, a=nn.Linear(4, 3), b=nn.Linear(4, 3), relu=nn.ReLU())
    model.relu.forward = lambda x: x.mul_(2)
    for name in ("merge", "duplicate"):
        traced = torch.fx.symbolic_trace(model)
        torch.testing.assert_close(SITES[name].pass_(traced)(ROWS), model(ROWS))


def test_quantized_layers_are_left_alone():
    model = torch.ao.quantization.quantize_dynamic(SITES["merge"].model(), {nn.Linear}, dtype=torch.qint8)
    for name in ("merge", "bias"):
        traced = torch.fx.symbolic_trace(model)
        assert not SITES[name].pass_.explain(traced).rows
        assert torch.equal(SITES[name].pass_(traced)(ROWS)[0], model(ROWS)[0])


def test_layers_for_quantization_aware_training_are_refused():
    model = SITES["merge"].model().train()
    model.a.qconfig = model.b.qconfig = torch.ao.quantization.default_qat_qconfig
    for name in ("a", "b"):
        setattr(model, name, torch.ao.nn.qat.Linear.from_float(getattr(model, name)))
    unsafe(SITES["merge"], model, "fx", "not exactly a Linear")
    unsafe(SITES["bias"], model, "fx", "not exactly a Linear")


def test_a_part_of_attention_is_left_alone():
    model = Use(
        lambda m, x: m.a(x, x, x)[0] + m.b(x), a=nn.MultiheadAttention(4, 2), b=nn.Linear(4, 4)
    ).eval()
    traced = fxopt.trace(model, (ROWS,))
    before = traced(ROWS)
    after = fxopt.compose(fxopt.MergeLinears(), fxopt.FuseBiasInLinear())(traced)
    torch.testing.assert_close(after(ROWS), before)
    assert after.get_submodule("a.out_proj").bias is not None


@pytest.mark.parametrize(("name", "tracer"), [(n, t) for n, site in SITES.items() for t in site.tracers])
def test_without_any_of_it_the_site_is_rewritten(name, tracer):
    safe(SITES[name], SITES[name].model(), tracer)
