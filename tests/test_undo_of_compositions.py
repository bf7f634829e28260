"""Undone too much or not at all by the first version: compositions, signatures, hand-written transformations."""

import copy
import operator

import pytest
import torch
from torch import nn

import fxopt
from fxopt import (
    FuseBiasInLinear,
    PassError,
    ReplaceActivation,
    ReversibleTransformation,
    Transformation,
    UndoError,
    compose,
    history,
    undo,
)
from fxopt.testing import assert_round_trip, randomise
from tests.modules import module
from tests.users_passes import names, pickled

X = torch.randn(5, 4)


def test_a_pass_that_stands_twice_in_a_composition_is_undone_in_order():
    model = nn.Sequential(nn.ReLU(), nn.Linear(4, 3), nn.GELU())
    graph_module = fxopt.trace(randomise(model).eval(), (X,))
    before = copy.deepcopy(graph_module)
    first, second = ReplaceActivation("relu", "silu"), ReplaceActivation("gelu", "relu")
    passes = compose(first, second, first)
    passes(graph_module)
    assert names(graph_module) == [repr(first), repr(second), repr(first)]
    assert passes.reversible
    assert_round_trip(before, passes(graph_module, reverse=True))


def two():
    layers = {"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "other": nn.Linear(4, 2), "act": nn.ReLU()}
    model = module(lambda m, x: (m.b(m.a(x)), m.other(x), m.act(x)), **layers)
    return torch.fx.symbolic_trace(randomise(model))


def test_a_composition_undoes_its_own_steps_alone():
    graph_module = two()
    before = copy.deepcopy(graph_module)
    FuseBiasInLinear()(graph_module)
    once = copy.deepcopy(graph_module)
    passes = compose(FuseBiasInLinear(), ReplaceActivation("relu", "silu"))
    restored = passes(passes(graph_module), reverse=True)
    assert names(restored) == ["FuseBiasInLinear()"]
    assert_round_trip(once, restored)
    assert_round_trip(before, undo(restored))


class Replaces(ReversibleTransformation):
    """Replaces one function by another, in both directions."""

    def __init__(self, function=operator.mul, other=operator.add, tag=None):
        self.pair, self.tag = (function, other), tag

    def transform(self, graph_module):
        return self.change(graph_module, *self.pair)

    def reverse(self, graph_module):
        return self.change(graph_module, *reversed(self.pair))

    def change(self, graph_module, old, new):
        for node in graph_module.graph.find_nodes(op="call_function", target=old):
            node.target = new
            if self.transformed(node):
                self.mark_as_restored(node)
            else:
                self.mark_as_transformed(node)
        return graph_module


class Arithmetic(nn.Module):
    def forward(self, x):
        return torch.relu(x * 2) - 3


def arithmetic():
    return torch.fx.symbolic_trace(Arithmetic())


def scaled(factor):
    def function(x):
        return x * factor

    return function


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda x: x, lambda x: -x),
        (scaled(2), scaled(3)),
        (torch.arange(5000), torch.cat([torch.arange(4999), torch.zeros(1, dtype=torch.int64)])),
        ({"weights": torch.zeros(2000)}, {"weights": torch.ones(2000) * (torch.arange(2000) == 1000)}),
        (nn.Linear(2, 2), nn.Linear(2, 2)),
        (scaled, 1),
    ],
)
def test_options_that_differ_have_signatures_that_differ(one, other):
    signatures = [Replaces(tag=tag).signature for tag in (one, other)]
    assert signatures[0] != signatures[1]
    assert signatures == [Replaces(tag=tag).signature for tag in (one, other)]
    first, second = Replaces(tag=one), Replaces(operator.sub, operator.floordiv, tag=other)
    graph_module = second(first(arithmetic()))
    first(graph_module, reverse=True)
    assert len(history(graph_module)) == 1


def test_local_classes_of_one_name_are_not_one_transformation():
    def made(target):
        class Local(Transformation):
            def transform(self, graph_module):
                for node in graph_module.graph.find_nodes(op="call_function", target=operator.mul):
                    node.target = target
                return graph_module

        return Local()

    assert made(operator.add).signature != made(operator.sub).signature
    assert made(operator.add).signature == made(operator.add).signature


def test_an_option_without_a_stable_text_is_refused():
    with pytest.raises(PassError, match=r"no signature: give the pass a property `signature`"):
        _ = Replaces(tag=(n for n in range(3))).signature


class MarkLayers(ReversibleTransformation):
    """Marks, and changes nothing; with an argument it is another transformation."""

    def __init__(self, argument=None):
        self.argument = argument

    def transform(self, graph_module):
        for node in graph_module.graph.find_nodes(op="call_module", target="a"):
            self.mark_as_transformed(node)
        return graph_module

    def reverse(self, graph_module):
        for node in graph_module.graph.find_nodes(op="call_module", target="a"):
            self.mark_as_restored(node)
        return graph_module


@pytest.mark.parametrize("carry", [lambda gm: gm, copy.deepcopy, pickled])
def test_marks_of_two_transformations_are_taken_off_in_any_order(carry):
    one, two_ = MarkLayers(), MarkLayers("argument")
    graph_module = carry(two_(one(two())))
    node = next(iter(graph_module.graph.find_nodes(op="call_module", target="a")))
    assert one.get_transformed_nodes(graph_module) == two_.get_transformed_nodes(graph_module) == [node]
    one(graph_module, reverse=True)
    assert not one.transformed(node)
    assert two_.transformed(node)
    two_(graph_module, reverse=True)
    assert not two_.transformed(node)


class ForgetsAConstant(Replaces):
    """Its reverse is inexact: a subtraction that was there before becomes an addition, too."""

    def __init__(self):
        super().__init__(operator.mul, operator.sub)


class RemovesIdentity(ReversibleTransformation):
    """Its reverse is the obvious one, and inexact: all uses of what the layer took become uses of the layer."""

    def transform(self, graph_module):
        for node in graph_module.graph.find_nodes(op="call_module", target="i"):
            self.mark_as_transformed(node.args[0])
            node.replace_all_uses_with(node.args[0])
            graph_module.graph.erase_node(node)
        return graph_module

    def reverse(self, graph_module):
        for node in self.get_transformed_nodes(graph_module):
            with graph_module.graph.inserting_after(node):
                identity = graph_module.graph.call_module("i", (node,))
            node.replace_all_uses_with(identity, delete_user_cb=lambda user, new=identity: user is not new)
            self.mark_as_restored(node)
        return graph_module


class Beside(nn.Module):
    def __init__(self):
        super().__init__()
        self.i = nn.Identity()

    def forward(self, x):
        y = torch.relu(x)
        return self.i(y) + y


@pytest.mark.parametrize(
    ("model", "pass_", "changed"),
    [(Arithmetic, ForgetsAConstant, "sub"), (Beside, RemovesIdentity, "args of the node add")],
)
def test_a_reverse_that_gives_back_another_graph_is_an_error(model, pass_, changed):
    graph_module = pass_()(torch.fx.symbolic_trace(model()))
    before = copy.deepcopy(graph_module)
    message = rf"some changes are not undone by {pass_.__name__}.reverse.*{changed}"
    for undoing in (undo, lambda gm: pass_()(gm, reverse=True)):
        with pytest.raises(UndoError, match=message):
            undoing(graph_module)
        assert_round_trip(before, graph_module)


@pytest.mark.parametrize("training", [False, True])
def test_the_record_is_in_the_mode_of_the_model(training):
    graph_module = FuseBiasInLinear()(torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2)).train(training)))
    assert "fxopt_record" in dict(graph_module.named_children())
    for carried in (graph_module, copy.deepcopy(graph_module), pickled(graph_module)):
        assert {module.training for module in carried.modules()} == {training}


@pytest.mark.parametrize("name", ["relu", nn.ReLU])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_a_new_activation_has_the_dtype_and_device_of_the_model(name, dtype):
    graph_module = fxopt.trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()).to(dtype), (X[:, :2].to(dtype),))
    ReplaceActivation(name, nn.PReLU)(graph_module)
    assert {parameter.dtype for parameter in graph_module.parameters()} == {dtype}
    assert graph_module(X[:, :2].to(dtype)).dtype == dtype


@pytest.mark.parametrize("trace", [torch.fx.symbolic_trace, lambda m: fxopt.trace(m, (torch.ones(1, 2),))])
def test_a_new_activation_of_a_function_call_is_where_the_model_is(trace):
    model = module(lambda m, x: torch.relu(m.layer(x)), layer=nn.Linear(2, 2))
    graph_module = trace(model)
    graph_module = graph_module.to("meta") if trace is torch.fx.symbolic_trace else graph_module
    ReplaceActivation("relu", nn.PReLU)(graph_module)
    assert {p.device for p in graph_module.parameters()} == {graph_module.layer.weight.device}
