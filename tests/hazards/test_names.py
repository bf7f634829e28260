"""Names: children of the root, numbers, nested paths, and names that a pass would give itself."""

import types

import pytest
import torch
from torch import nn

import fxopt
from tests.before_after import fx_trace, fxopt_trace, rewritten
from tests.hazards.sites import ROWS, SITES, Use, safe

WITH_LAYERS = [(name, tracer) for name, site in SITES.items() if site.names for tracer in site.tracers]
TRACES = {"fx": fx_trace, "own": fxopt_trace}

PATHS = {
    "a number": "{number}",
    "a number below a number": "0.{number}",
    "numbers and names": "stack.{number}.0.{name}",
    "a word of the generated code": "self.{name}.forward_{number}",
}


def renamed(site, pattern):
    """The model of a site with its layers at other paths."""
    model, paths = Use(None), {}
    for number, (name, layer) in enumerate(site.layers().items()):
        path = paths[name] = pattern.format(number=number, name=name)
        *parents, last = path.split(".")
        owner = model
        for parent in parents:
            if parent not in owner._modules:
                owner.add_module(parent, nn.Module())
            owner = owner._modules[parent]
        owner.add_module(last, layer)

    def use(m, x):
        at = {name: m.get_submodule(path) for name, path in paths.items()}
        return site.use(types.SimpleNamespace(**at), x)

    model.use = use
    return model, list(paths.values())


@pytest.mark.sweep(4)
@pytest.mark.parametrize(("name", "tracer"), WITH_LAYERS)
@pytest.mark.parametrize("pattern", PATHS)
def test_layers_of_any_name_are_rewritten_and_come_back(pattern, name, tracer):
    site = SITES[name]
    model, paths = renamed(site, PATHS[pattern])
    after = rewritten(site.pass_, model, site.x, sites=1, trace=TRACES[tracer])
    assert {path for path, _ in site.pass_(after, reverse=True).named_modules()} >= set(paths)


# --- Names that a pass gives: fxopt_merged_a_b, fxopt_activation_relu, pad, saturate, to

TAKEN = {
    "a module": (lambda m, name: m.add_module(name, nn.Identity()), lambda taken, x: taken(x)),
    "a parameter": (
        lambda m, name: m.register_parameter(name, nn.Parameter(torch.ones(1))),
        lambda taken, x: x * taken,
    ),
    "a buffer": (lambda m, name: m.register_buffer(name, torch.ones(1)), lambda taken, x: x * taken),
    "a container": (
        lambda m, name: m.add_module(name, nn.ModuleDict({"inner": nn.Linear(4, 2)})),
        lambda taken, x: taken["inner"](x),
    ),
}
"""Owners of a name, and how the graph uses them, so that they are kept."""


@pytest.mark.parametrize("taken", TAKEN)
@pytest.mark.parametrize("tracer", ["fx", "own"])
def test_the_name_of_a_merged_layer_is_taken(taken, tracer):
    name, site, (take, used) = "fxopt_merged_a_b", SITES["merge"], TAKEN[taken]
    model = site.model(lambda m, x: (site.use(m, x), used(getattr(m, name), x * 2)))
    take(model, name)
    after = safe(site, model, tracer)
    assert {name, f"{name}_1"} <= set(dict(after.named_modules())) | set(after.state_dict())


@pytest.mark.parametrize("taken", TAKEN)
@pytest.mark.parametrize("tracer", ["fx", "own"])
def test_the_name_of_an_activation_for_a_function_is_taken(taken, tracer):
    name, pass_, (take, used) = (
        "fxopt_activation_relu",
        fxopt.ReplaceActivation("relu", nn.SiLU),
        TAKEN[taken],
    )
    model = Use(lambda m, x: (torch.relu(x), used(getattr(m, name), x)))
    take(model, name)
    after = rewritten(pass_, model, ROWS, sites=1, trace=TRACES[tracer])
    assert type(after.get_submodule(f"{name}_1")) is nn.SiLU


def test_two_merged_layers_of_one_name():
    """`a` with `b_c`, and `a_b` with `c`: both would be fxopt_merged_a_b_c."""

    def use(m, x):
        y = x * 2
        return m.a(x), m.b_c(x), m.a_b(y), m.c(y)

    model = Use(use, **{name: nn.Linear(4, 3) for name in ("a", "b_c", "a_b", "c")})
    after = rewritten(SITES["merge"].pass_, model, ROWS, sites=2)
    assert {"fxopt_merged_a_b_c", "fxopt_merged_a_b_c_1"} <= set(dict(after.named_modules()))


class Named(nn.Module):
    """An input whose name is one that a pass gives to a node."""

    def __init__(self, site):
        super().__init__()
        for name, layer in site.layers().items():
            setattr(self, name, layer)
        self.use = site.use


class Pad(Named):
    def forward(self, pad):
        return self.use(self, pad), pad * 2


class Saturate(Named):
    def forward(self, saturate):
        return self.use(self, saturate), saturate * 2


class To(Named):
    def forward(self, to):
        return self.use(self, to), to * 2


class Merged(Named):
    def forward(self, fxopt_merged_a_b):
        return self.use(self, fxopt_merged_a_b), fxopt_merged_a_b * 2


class Norm(Named):
    def forward(self, norm):
        return self.use(self, norm), norm * 2


GIVEN = {
    "merge": [Merged],
    "bias": [Pad],
    "precision": [Saturate, To],
    **{name: [Norm] for name in ("conv-norm", "linear-norm", "norm-linear")},
}


@pytest.mark.parametrize(
    ("kind", "name", "tracer"), [(k, n, t) for n in GIVEN for k in GIVEN[n] for t in SITES[n].tracers]
)
def test_an_input_has_the_name_of_a_new_node(kind, name, tracer):
    site = SITES[name]
    rewritten(site.pass_, kind(site), site.x, sites=1, trace=TRACES[tracer])
