"""Names: children of the root, numbers, nested paths, and names that a pass would give itself."""

import types

import pytest
import torch
from torch import nn

import fxopt
from tests.before_after import fx_trace, fxopt_trace, rewritten
from tests.hazards.sites import ROWS, SITES, Use
from tests.modules import module

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


NEW = {
    "fxopt_merged_a_b": (SITES["merge"].pass_, SITES["merge"].use, SITES["merge"].layers, nn.Linear),
    "fxopt_activation_relu": (
        fxopt.ReplaceActivation("relu", nn.SiLU),
        lambda m, x: torch.relu(x),
        dict,
        nn.SiLU,
    ),
}
"""The name of a new module, the pass that gives it, a site, its layers, and what the new module is."""


@pytest.mark.parametrize("taken", TAKEN)
@pytest.mark.parametrize("name", NEW)
@pytest.mark.parametrize("tracer", TRACES)
def test_the_name_of_a_new_module_is_taken(taken, name, tracer):
    (pass_, use, layers, kind), (take, used) = NEW[name], TAKEN[taken]
    model = Use(lambda m, x: (use(m, x), used(getattr(m, name), x * 2)), **layers())
    take(model, name)
    after = rewritten(pass_, model, ROWS, sites=1, trace=TRACES[tracer])
    assert name in {*dict(after.named_modules()), *after.state_dict()}
    assert type(after.get_submodule(f"{name}_1")) is kind


def test_two_merged_layers_of_one_name():
    """`a` with `b_c`, and `a_b` with `c`: both would be fxopt_merged_a_b_c."""

    def use(m, x):
        y = x * 2
        return m.a(x), m.b_c(x), m.a_b(y), m.c(y)

    model = Use(use, **{name: nn.Linear(4, 3) for name in ("a", "b_c", "a_b", "c")})
    after = rewritten(SITES["merge"].pass_, model, ROWS, sites=2)
    assert {"fxopt_merged_a_b_c", "fxopt_merged_a_b_c_1"} <= set(dict(after.named_modules()))


def both(m, x):
    return m.use(m, x), x * 2


GIVEN = {
    "merge": [lambda m, fxopt_merged_a_b: both(m, fxopt_merged_a_b)],
    "bias": [lambda m, pad: both(m, pad)],
    "precision": [lambda m, saturate: both(m, saturate), lambda m, to: both(m, to)],
    **{name: [lambda m, norm: both(m, norm)] for name in ("conv-norm", "linear-norm", "norm-linear")},
}
"""Forwards whose input has a name that a pass gives to a node."""


@pytest.mark.parametrize(
    ("forward", "name", "tracer"), [(f, n, t) for n in GIVEN for f in GIVEN[n] for t in SITES[n].tracers]
)
def test_an_input_has_the_name_of_a_new_node(forward, name, tracer):
    site = SITES[name]
    model = module(forward, use=site.use, **site.layers())
    rewritten(site.pass_, model, site.x, sites=1, trace=TRACES[tracer])
