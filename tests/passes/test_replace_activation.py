"""ReplaceActivation: any activation for another, however it is called."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxopt import ReplaceActivation
from fxopt.passes.replace_activation import ACTIVATIONS
from fxopt.testing import compare
from tests.before_after import fxopt_trace, refused, rewritten
from tests.modules import module

X = torch.randn(2, 3)


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x) + 1


def test_gelu_becomes_its_tanh_form():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = nn.GELU()

        def forward(self, x):
            return self.act(x), F.gelu(x), F.gelu(x, approximate="none"), F.gelu(x, approximate="tanh")

    after = rewritten(ReplaceActivation(), Both(), X, sites=3)
    tanh = F.gelu(X, approximate="tanh")
    for out in after(X):
        assert torch.equal(out, tanh)
    assert not torch.equal(Both()(X)[0], tanh)


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_every_name_works_as_source_and_as_target(name):
    activation = ACTIVATIONS[name]
    other = "relu" if name != "relu" else "silu"
    expected = ACTIVATIONS[other].make()(X)
    after = rewritten(ReplaceActivation(name, other), nn.Sequential(activation.make()), X, sites=1)
    assert torch.equal(after(X), expected)
    call = Function(lambda x: activation.function(x, **activation.options))
    after = rewritten(ReplaceActivation(name, other), call, X, sites=1)
    assert torch.equal(after(X), expected + 1)
    after = ReplaceActivation(other, name)(torch.fx.symbolic_trace(nn.Sequential(ACTIVATIONS[other].make())))
    assert torch.equal(after(X), activation.make()(X))


@pytest.mark.parametrize(
    "function",
    [lambda x: x.relu(), torch.relu, F.relu, lambda x: F.relu(input=x), lambda x: F.relu(x, False)],
)
def test_every_spelling_comes_back(function):
    rewritten(ReplaceActivation("relu", "gelu"), Function(function), X, sites=1)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.ops.aten.elu.default(x, 1.0, 2.0),
        lambda x: torch._C._nn.elu(x, 1.0, 2.0),
        lambda x: torch.ops.aten.elu(x, 1.0, 1.0, 3.0),
        lambda x: F.elu_(x + 0, 1.0),
    ],
)
def test_functions_with_other_options_are_others(function):
    traced = torch.fx.symbolic_trace(Function(function))
    assert not ReplaceActivation("elu", "relu").explain(traced).sites


def test_with_metadata():
    rewritten(ReplaceActivation(), Function(F.gelu), X, sites=1, trace=fxopt_trace)


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("leaky_relu", nn.LeakyReLU(0.3)),
        ("elu", nn.ELU(2.0)),
        ("gelu", nn.GELU("tanh")),
        ("softplus", Function(lambda x: F.softplus(x, 2))),
        ("elu", Function(lambda x: F.elu(x, 2.0))),
    ],
)
def test_other_options_make_another_activation(name, module):
    traced = torch.fx.symbolic_trace(nn.Sequential(module))
    assert not ReplaceActivation(name, "relu").explain(traced).rows


def test_one_module_called_twice_under_two_names_is_one_site():
    act = nn.GELU()
    model = nn.Sequential(act, nn.Linear(3, 3), act, nn.Sequential(act))
    after = rewritten(ReplaceActivation(), model, X, sites=1)
    assert len(ReplaceActivation().get_transformed_nodes(after)) == 3


class Swish(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.5 * x)


class LeafTracer(torch.fx.Tracer):
    def is_leaf_module(self, m, name):
        return isinstance(m, Swish) or super().is_leaf_module(m, name)


def trace_leaf(model, inputs):
    return torch.fx.GraphModule(model, LeafTracer().trace(model))


def test_types_of_modules_as_options():
    after = rewritten(ReplaceActivation("gelu", Swish), nn.Sequential(nn.GELU()), X, sites=1)
    assert torch.equal(after(X), Swish()(X))
    after = rewritten(ReplaceActivation(Swish, "relu"), nn.Sequential(Swish()), X, sites=1, trace=trace_leaf)
    assert torch.equal(after(X), X.relu())


def test_every_call_by_keyword_is_one_by_position():
    model = module(lambda m, x: m.act(input=x) + m.act(input=x * 2), act=nn.GELU())
    after = rewritten(ReplaceActivation("gelu", Swish), model, X, sites=1)
    assert torch.equal(after(X), Swish()(X) + Swish()(X * 2))


def test_a_function_becomes_a_new_module_and_comes_back():
    after = ReplaceActivation("gelu", Swish)(torch.fx.symbolic_trace(Function(F.gelu)))
    assert torch.equal(after(X), Swish()(X) + 1)
    assert isinstance(after.fxopt_activation_gelu, Swish)
    restored = ReplaceActivation("gelu", Swish)(after, reverse=True)
    assert not hasattr(restored, "fxopt_activation_gelu")
    assert compare(F.gelu(X) + 1, restored(X)).max_abs == 0


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x * self.scale


@pytest.mark.parametrize("activation", [nn.GELU(), Function(F.gelu)])
@pytest.mark.parametrize("training", [True, False])
def test_a_new_module_has_the_mode_and_the_dtype_of_the_model(activation, training):
    model = nn.Sequential(nn.Linear(3, 3), activation).half().train(training)
    after = ReplaceActivation("gelu", Scaled)(torch.fx.symbolic_trace(model))
    (new,) = (module for module in after.modules() if isinstance(module, Scaled))
    assert new.training == training
    assert new.scale.dtype == torch.float16


@pytest.mark.parametrize(
    "model",
    [nn.Sequential(nn.ReLU(inplace=True)), Function(lambda x: F.relu(x * 1, inplace=True))],
)
def test_in_place_activations_are_refused(model):
    refused(ReplaceActivation("relu", "silu"), model, X, reason="writes into its input")


def test_parameters_are_refused():
    refused(ReplaceActivation(nn.PReLU, "relu"), nn.Sequential(nn.PReLU()), X, reason="has parameters")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("geluu", "relu"), "known names are"),
        (("gelu", 3), "give a name or a type"),
        (("relu", "relu"), "nothing to replace"),
    ],
)
def test_bad_options(options, error):
    with pytest.raises((ValueError, TypeError), match=error):
        ReplaceActivation(*options)


class Functions(nn.Module):
    def forward(self, x):
        return torch.relu(F.gelu(x))


@pytest.mark.parametrize(
    ("source", "target", "model"),
    [
        (nn.GELU, "gelu_tanh", nn.Sequential(nn.GELU())),
        (nn.GELU, "gelu", nn.Sequential(nn.GELU("tanh"))),
        ("gelu", nn.GELU, Functions()),
        ("relu", nn.ReLU, Functions()),
    ],
)
@pytest.mark.timeout(60)
def test_a_target_that_is_itself_a_source(source, target, model):
    rewritten(ReplaceActivation(source, target), model, torch.randn(2, 3), sites=1)


def test_a_target_that_needs_arguments():
    with pytest.raises(TypeError, match="target is Threshold, which cannot be made without arguments"):
        ReplaceActivation("relu", nn.Threshold)


def test_undo_reaches_every_name_and_keeps_the_mode():
    gelu = nn.GELU()
    traced = torch.fx.symbolic_trace(nn.Sequential(gelu, nn.Tanh(), gelu).train())
    traced.add_module("alias", traced.get_submodule("0"))
    replaced = ReplaceActivation()(traced).eval()
    restored = ReplaceActivation()(replaced, reverse=True)
    back = [
        module for name, module in restored.named_modules(remove_duplicate=False) if name in ("0", "alias")
    ]
    assert len(back) == 2
    assert back[0] is back[1]
    assert back[0].approximate == "none"
    assert not back[0].training
