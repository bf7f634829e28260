"""Undo beside other passes, edits of the user and failures: what a review with fresh eyes found wrong."""

import copy
import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxopt
from fxopt import (
    FuseBatchNorm1dInLinear,
    FuseBatchNorm2dInConv2d,
    FuseBiasInLinear,
    MergeLinears,
    PassError,
    ReversibleRewrite,
    ReversibleTransformation,
    Transformation,
    UndoError,
    UnverifiedWarning,
    VerificationWarning,
    history,
    undo,
)
from fxopt.testing import assert_round_trip, randomise
from tests.modules import module
from tests.users_passes import pickled

X = torch.randn(5, 4)


@pytest.mark.parametrize("frozen", [False, True])
def test_undo_leaves_users_alone_that_came_back_in_between(frozen):
    layers = {"norm": nn.BatchNorm1d(4), "a": nn.Linear(4, 4), "b": nn.Linear(4, 3), "c": nn.Linear(4, 3)}
    model = randomise(module(lambda m, x: (m.a(m.norm(x)), m.b(x), m.c(x)), **layers))
    model.a.bias.requires_grad_(not frozen)
    graph_module = fxopt.trace(model, (X,))
    before = copy.deepcopy(graph_module)
    merge, fold = MergeLinears(), FuseBatchNorm1dInLinear()
    for first, second, undone in ((merge, fold, merge), (fold, merge, fold)):
        changed = second(first(copy.deepcopy(before)))
        try:
            undone(changed, reverse=True)
        except UndoError as error:
            refused = str(error)
            assert refused.endswith(" first")
        for expected, actual in zip(before(X), changed(X), strict=True):
            torch.testing.assert_close(actual, expected)
        assert_round_trip(before, undo(changed, len(history(changed))))


def test_a_use_that_the_user_adds_of_the_input_of_a_folded_norm_stays():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))
    graph_module = FuseBatchNorm1dInLinear()(fxopt.trace(randomise(model).eval(), (X,)))
    output = next(iter(graph_module.graph.find_nodes(op="output")))
    (x,) = graph_module.graph.find_nodes(op="placeholder")
    with graph_module.graph.inserting_before(output):
        relu = graph_module.graph.call_function(torch.relu, (x,))
    undo(graph_module)
    assert relu.args == (x,)


def test_what_the_user_edited_after_loading_stays():
    model = module(lambda m, x: m.layer(x) * 2, layer=nn.Linear(4, 4))
    graph_module = pickled(FuseBiasInLinear()(torch.fx.symbolic_trace(model)))
    (mul,) = graph_module.graph.find_nodes(op="call_function", target=operator.mul)
    mul.args = (mul.args[0], 5)
    assert len(history(graph_module)) == 1
    assert mul.args[1] == 5
    undo(graph_module)
    torch.testing.assert_close(graph_module(X), graph_module.layer(X) * 5)


def test_an_option_that_the_user_adds_after_loading_stays():
    model = module(lambda m, x: F.leaky_relu(m.layer(x)), layer=nn.Linear(4, 4))
    graph_module = FuseBiasInLinear()(torch.fx.symbolic_trace(model))
    (relu,) = graph_module.graph.find_nodes(op="call_function", target=F.leaky_relu)
    relu.kwargs = {}
    graph_module = pickled(graph_module)
    (relu,) = graph_module.graph.find_nodes(op="call_function", target=F.leaky_relu)
    relu.kwargs = {**relu.kwargs, "negative_slope": 0.5}
    undo(graph_module)
    torch.testing.assert_close(graph_module(X), F.leaky_relu(graph_module.layer(X), 0.5))


class Remove(ReversibleRewrite):
    """Takes a module out."""

    def __init__(self, name):
        self.name = name

    def match(self, graph_module):
        yield from graph_module.graph.find_nodes(op="call_module", target=self.name)

    def apply(self, rewriter, node):
        rewriter.replace_uses(node, node.args[0])
        rewriter.erase(node)


def test_nodes_come_back_in_their_places_whatever_is_undone_first():
    layers = {"layer": nn.Linear(4, 4), "p": nn.Identity(), "q": nn.Identity()}
    before = torch.fx.symbolic_trace(module(lambda m, x: (m.p(m.layer(x)), m.q(x)), **layers))
    graph_module = Remove("p")(Remove("q")(copy.deepcopy(before)))
    with pytest.raises(UndoError, match=r"Undo Remove\(name='p'\) first"):
        Remove("q")(graph_module, reverse=True)
    assert_round_trip(before, Remove("q")(Remove("p")(graph_module, reverse=True), reverse=True))


def test_uses_beside_a_module_that_is_taken_out_stay():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.i = nn.Identity()

        def forward(self, x):
            y = torch.relu(x)
            return self.i(y) + y

    before = torch.fx.symbolic_trace(Model())
    assert_round_trip(before, undo(Remove("i")(copy.deepcopy(before))))


def test_a_fused_layer_that_was_changed_by_hand_is_not_dropped():
    layers = randomise(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))).eval()
    for change in (
        lambda layer: setattr(layer, "padding", (1, 1)),
        lambda layer: layer.register_forward_hook(lambda *args: None),
    ):
        graph_module = FuseBatchNorm2dInConv2d()(torch.fx.symbolic_trace(copy.deepcopy(layers)))
        change(graph_module.get_submodule("0"))
        with pytest.raises(UndoError, match="0 was changed since"):
            undo(graph_module)


class CannotRestore(ReversibleRewrite):
    def match(self, graph_module):
        yield from graph_module.graph.find_nodes(op="call_module", target="0")

    def apply(self, rewriter, node):
        def restore(now, left):
            raise ValueError("lost")

        rewriter.swap({"0": nn.SiLU()}, restore=restore)
        new = rewriter.create("call_function", torch.abs, (node.args[0],), before=node)
        rewriter.replace_input(node, node.args[0], new)


def test_any_error_of_an_undo_leaves_all_applied():
    graph_module = CannotRestore()(torch.fx.symbolic_trace(nn.Sequential(nn.ReLU())))
    after = copy.deepcopy(graph_module)
    with pytest.raises(UndoError, match="ValueError: lost"):
        undo(graph_module)
    assert_round_trip(after, graph_module)
    assert len(history(graph_module)) == 1


class TakesAnother(ReversibleRewrite):
    """Puts a module that is there already in the place of another."""

    def match(self, graph_module):
        yield from graph_module.graph.find_nodes(op="call_module", target="0")

    def apply(self, rewriter, node):
        rewriter.replace_module("0", rewriter.graph_module.get_submodule("1"))


def test_nothing_is_written_on_a_module_that_was_there_before():
    model = nn.Sequential(nn.ReLU(), nn.SiLU())
    graph_module = torch.fx.symbolic_trace(model)
    before = copy.deepcopy(graph_module)
    TakesAnother()(graph_module)
    assert "fxopt_rewritten_by" not in vars(model[1])
    assert_round_trip(before, undo(graph_module))


class Renames(ReversibleTransformation):
    """Hand-written; its reverse leaves the modules in another order."""

    def transform(self, graph_module):
        return self.rename(graph_module, "0", "late")

    def reverse(self, graph_module):
        return self.rename(graph_module, "late", "0")

    def rename(self, graph_module, old, new):
        (node,) = graph_module.graph.find_nodes(op="call_module", target=old)
        layer = graph_module.get_submodule(old)
        graph_module.delete_submodule(old)
        graph_module.add_submodule(new, layer)
        node.target = new
        return graph_module


def test_a_hand_written_reverse_may_leave_modules_in_another_order():
    graph_module = Renames()(torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))))
    expected = graph_module(X)
    torch.testing.assert_close(Renames()(graph_module, reverse=True)(X), expected)
    assert history(graph_module) == ()


class RemovesOnes(ReversibleTransformation):
    """Hand-written; its reverse creates the nodes again that it erased."""

    def transform(self, graph_module):
        for node in graph_module.graph.find_nodes(op="call_function", target=operator.mul):
            if node.args[1] == 1:
                value = node.args[0]
                node.replace_all_uses_with(value)
                graph_module.graph.erase_node(node)
                self.mark_as_transformed(value)
        return graph_module

    def reverse(self, graph_module):
        for node in self.get_transformed_nodes(graph_module):
            with graph_module.graph.inserting_after(node):
                product = graph_module.graph.call_function(operator.mul, (node, 1))
            node.replace_all_uses_with(product, delete_user_cb=lambda user, new=product: user is not new)
            self.mark_as_restored(node)
        return graph_module


@pytest.mark.parametrize("before", [0, 2])
def test_nodes_that_a_hand_written_reverse_creates_have_their_names_again(before):
    def forward(m, x):
        for _ in range(before):
            x = x * 2
        return torch.relu(m.layer(x) * 1) * 3

    graph_module = fxopt.trace(module(forward, layer=nn.Linear(4, 4)), (X,))
    expected = graph_module.code
    RemovesOnes()(graph_module)
    assert RemovesOnes()(graph_module, reverse=True).code == expected


class Swaps(ReversibleRewrite):
    """Wrong: subtracts the other way round."""

    preserves_computation = True

    def match(self, graph_module):
        for node in graph_module.graph.find_nodes(op="call_function", target=operator.sub):
            if not self.transformed(node):
                yield node

    def apply(self, rewriter, node):
        rewriter.set(node, args=node.args[::-1])
        return node


class Subtracts(nn.Module):
    def forward(self, x, y):
        return x - y


def test_inputs_with_names_of_one_length_have_different_values():
    graph_module = fxopt.trace(Subtracts(), (torch.ones(3, 4), torch.ones(3, 4)))
    with pytest.warns(VerificationWarning, match="sub differs"):
        Swaps()(graph_module, verify=True)


class NewGraph(Transformation):
    """Wrong, and makes a new graph."""

    preserves_computation = True

    def transform(self, graph_module):
        graph = copy.deepcopy(graph_module.graph)
        for node in graph.find_nodes(op="call_function", target=operator.sub):
            node.target = operator.add
        graph_module.graph = graph
        return graph_module


class NewModule(NewGraph):
    def transform(self, graph_module):
        return super().transform(copy.deepcopy(graph_module))


def test_hand_written_transformations_that_make_new_graphs_are_verified_or_it_says_so():
    inputs = (torch.ones(3, 4), torch.ones(3, 4))
    with pytest.warns(VerificationWarning, match="sub differs"):
        NewGraph()(fxopt.trace(Subtracts(), inputs), verify=True)
    with pytest.warns(UnverifiedWarning, match="gives another graph module"):
        NewModule()(fxopt.trace(Subtracts(), inputs), verify=True)
    with pytest.warns(UnverifiedWarning, match="its shape is unknown"):
        NewGraph()(torch.fx.symbolic_trace(Subtracts()), verify=True)


@pytest.mark.parametrize(
    ("verify", "error", "text"),
    [
        (X, TypeError, "verify is of type Tensor; give True, or a tuple"),
        ((X, X[:2]), PassError, "does not take these"),
    ],
)
def test_example_inputs_that_are_none(verify, error, text):
    with pytest.raises(error, match=text):
        Swaps()(torch.fx.symbolic_trace(Subtracts()), verify=verify)
