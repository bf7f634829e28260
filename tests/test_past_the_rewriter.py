"""A change without the rewriter is an error at the call, which names the change, and everything is put back."""

import copy
import operator
import warnings

import pytest
import torch
from torch import nn

import fxopt
from fxopt import PassError, Refusal, ReversibleRewrite, ReversibleTransformation, Rewrite, UnverifiedWarning
from fxopt.testing import assert_equivalent, assert_round_trip


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.layer(x * 0.5))


X = torch.randn(3, 4)


def traced():
    return fxopt.trace(Model().eval(), (X,))


class Folds(ReversibleRewrite):
    """Folds the number into the weight, in the way that it is told."""

    preserves_computation = True

    def __init__(self, change):
        self.change = change

    def match(self, graph_module):
        for node in graph_module.graph.find_nodes(op="call_module", target="layer"):
            if node.args[0].target is operator.mul:
                yield node

    def apply(self, rewriter, node):
        mul = node.args[0]
        self.change(rewriter.graph_module, mul)
        rewriter.replace_input(node, mul, mul.args[0])
        rewriter.erase(mul)
        return node


def scaled(layer):
    layer = copy.deepcopy(layer)
    with torch.no_grad():
        layer.weight *= 0.5
    return layer


def sets_the_module(gm, mul):
    gm.set_submodule("layer", scaled(gm.layer))


def writes_the_weight(gm, mul):
    with torch.no_grad():
        gm.layer.weight *= 0.5


def writes_through_data(gm, mul):
    gm.layer.weight.data.mul_(0.5)


def writes_a_row(gm, mul):
    with torch.no_grad():
        gm.layer.weight[0] = 0


def sets_the_weight(gm, mul):
    gm.layer.weight = nn.Parameter(gm.layer.weight.detach() * 0.5)


def gives_the_weight_other_memory(gm, mul):
    gm.layer.weight.data = gm.layer.weight.data * 0.5


def casts_the_layer(gm, mul):
    gm.layer.double()


def casts_and_sets_an_option(gm, mul):
    casts_the_layer(gm, mul)
    sets_an_option(gm, mul)


def freezes(gm, mul):
    gm.layer.requires_grad_(False)


def sets_an_option(gm, mul):
    gm.drop.p = 0.0


def hooks_a_module(gm, mul):
    gm.drop.register_forward_hook(lambda *args: None)


def parametrizes(gm, mul):
    nn.utils.parametrizations.weight_norm(gm.layer)


def makes_a_node(gm, mul):
    with gm.graph.inserting_before(mul):
        gm.graph.call_function(torch.relu, (mul.args[0],))


def changes_a_node(gm, mul):
    mul.args = (mul.args[0], 0.25)


def adds_a_buffer(gm, mul):
    gm.register_buffer("number", torch.tensor(0.5))


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (sets_the_module, "changed layer without"),
        (writes_the_weight, "writes into layer.weight"),
        (writes_through_data, "writes into layer.weight"),
        (writes_a_row, "writes into layer.weight"),
        (sets_the_weight, r"changed layer\.weight without"),
        (gives_the_weight_other_memory, "the memory or dtype of layer.weight"),
        (casts_the_layer, "the memory or dtype of layer.weight"),
        (casts_and_sets_an_option, "the attribute p of drop"),
        (freezes, "requires_grad of layer.weight"),
        (sets_an_option, "the attribute p of drop"),
        (hooks_a_module, "the hooks of drop"),
        (parametrizes, "the class of layer"),
        (makes_a_node, "the node relu, which it made"),
        (changes_a_node, "args of the node mul"),
        (adds_a_buffer, "changed number without"),
    ],
)
def test_a_change_without_the_rewriter_is_an_error_that_names_it(change, named, verify):
    graph_module = traced()
    before, pass_ = copy.deepcopy(graph_module), Folds(change)
    with pytest.raises(PassError, match=named):
        pass_(graph_module, verify=verify)
    assert_round_trip(before, graph_module)
    assert type(graph_module.layer) is nn.Linear
    assert fxopt.history(graph_module) == ()
    with pytest.raises(PassError, match=named):
        pass_.commit(graph_module)
    assert_round_trip(before, graph_module)


def test_a_transform_that_fails_leaves_no_cast():
    class Fails(ReversibleTransformation):
        def transform(self, graph_module):
            casts_the_layer(graph_module, None)
            raise ValueError("stop")

        def reverse(self, graph_module):
            return graph_module

    graph_module = traced()
    before = copy.deepcopy(graph_module)
    with pytest.raises(ValueError, match="stop"):
        Fails()(graph_module)
    assert_round_trip(before, graph_module)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("output", "the output node cannot be erased"), ("mul", "mul cannot be erased: layer uses it")],
)
def test_what_is_used_is_not_erased(name, reason):
    class Erases(ReversibleRewrite):
        preserves_computation = True

        def match(self, graph_module):
            yield next(node for node in graph_module.graph.nodes if node.name == name)

        def apply(self, rewriter, node):
            rewriter.erase(node)

    graph_module = traced()
    before = copy.deepcopy(graph_module)
    with pytest.raises(PassError, match=reason):
        Erases()(graph_module)
    assert_round_trip(before, graph_module)


def test_explain_writes_into_no_weight():
    class Opens(Folds):
        def opens_sites(self, graph_module, sites):
            return False

    graph_module = traced()
    weight = graph_module.layer.weight.detach().clone()
    with pytest.raises(PassError, match="writes into"):
        Opens(writes_the_weight).explain(graph_module)
    assert torch.equal(weight, graph_module.layer.weight)


class ErasesDirectly(Folds):
    def apply(self, rewriter, node):
        mul = node.args[0]
        rewriter.replace_module("layer", scaled(rewriter.graph_module.layer))
        rewriter.replace_input(node, mul, mul.args[0])
        node.graph.erase_node(mul)
        return node


@pytest.mark.parametrize("verify", [False, True])
def test_a_node_that_is_erased_directly_comes_back(verify):
    graph_module = traced()
    before = copy.deepcopy(graph_module)
    with pytest.raises(PassError, match="the node mul, which it erased"):
        ErasesDirectly(None)(graph_module, verify=verify)
    assert_round_trip(before, graph_module)


class ByHand(ReversibleTransformation):
    """Writes a weight, as transformations for optimum.fx do."""

    preserves_computation = True

    def __init__(self, factor):
        self.factor = factor

    def transform(self, graph_module):
        for mul in graph_module.graph.find_nodes(op="call_function", target=operator.mul):
            with torch.no_grad():
                graph_module.layer.weight *= self.factor
            mul.args = (mul.args[0], 1.0)
        return graph_module

    def reverse(self, graph_module):
        with torch.no_grad():
            graph_module.layer.weight /= self.factor
        for mul in graph_module.graph.find_nodes(op="call_function", target=operator.mul):
            mul.args = (mul.args[0], 0.5)
        return graph_module


def test_weights_that_a_transform_writes_are_put_back_where_it_is_taken_back():
    graph_module = traced()
    before = copy.deepcopy(graph_module)
    with pytest.warns(fxopt.VerificationWarning, match="rolled back"):
        ByHand(0.25)(graph_module, verify=True)
    assert_round_trip(before, graph_module)
    assert_equivalent(before, graph_module, (X,))


def test_a_transform_may_write_weights_that_its_reverse_writes_back():
    graph_module = traced()
    before = copy.deepcopy(graph_module)
    after = ByHand(0.5)(graph_module)
    assert_equivalent(before, after, (X,))
    assert_round_trip(before, ByHand(0.5)(after, reverse=True))


class Copies(ReversibleRewrite):
    """Gives a layer a weight of its own."""

    preserves_computation = True

    def __init__(self, *names):
        self.names = names

    def match(self, graph_module):
        yield from (n for n in graph_module.graph.nodes if n.op == "call_module" and n.target in self.names)

    def apply(self, rewriter, node):
        rewriter.replace_module(node.target, copy.deepcopy(rewriter.graph_module.get_submodule(node.target)))
        return node


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x).relu())


@pytest.mark.parametrize("names", [("second",), ("first",), ("first", "second")])
def test_a_pass_that_parts_tied_weights_is_an_error(names):
    graph_module = fxopt.trace(Tied().eval(), (X,))
    before = copy.deepcopy(graph_module)
    with pytest.raises(fxopt.PassError, match="unties first.weight and second.weight, which were one tensor"):
        Copies(*names)(graph_module)
    assert graph_module.first.weight is graph_module.second.weight
    assert_round_trip(before, graph_module)


def halved(now, left):
    layer = copy.deepcopy(now["layer"])
    with torch.no_grad():
        layer.weight /= 2
    return {"layer": layer}


class Doubles(ReversibleRewrite):
    def match(self, graph_module):
        yield from graph_module.graph.find_nodes(op="call_module", target="layer")

    def apply(self, rewriter, node):
        layer = copy.deepcopy(rewriter.graph_module.layer)
        with torch.no_grad():
            layer.weight *= 2
        rewriter.replace_module("layer", layer, halved)
        return node


@pytest.mark.parametrize("times", [1, 2])
def test_a_restored_copy_of_a_layer_has_no_mark(times):
    graph_module = traced()
    before = copy.deepcopy(graph_module)
    for _ in range(times):
        Doubles()(graph_module)
    assert_round_trip(before, fxopt.undo(graph_module, times))


def test_a_trusted_restore_is_saved(tmp_path):
    graph_module = traced()
    before = copy.deepcopy(graph_module)
    trusted = [halved, Doubles]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fxopt.save(Doubles()(graph_module), tmp_path / "trusted", trusted=trusted)
    assert_round_trip(before, fxopt.undo(fxopt.load(tmp_path / "trusted", trusted=trusted)))
    with pytest.warns(UserWarning, match=r"cannot undo Doubles\(\) after loading.*halved"):
        fxopt.save(graph_module, tmp_path / "other")


@pytest.mark.parametrize("reason", [None, "", 3])
def test_a_refusal_needs_a_reason(reason):
    class Slips(Doubles):
        def match(self, graph_module):
            yield from (Refusal(node, reason) for node in super().match(graph_module))

    with pytest.raises(PassError, match="the refusal of layer has the reason"):
        Slips().explain(traced())


class Thaws(Copies):
    def apply(self, rewriter, node):
        layer = copy.deepcopy(rewriter.graph_module.get_submodule(node.target))
        rewriter.replace_module(node.target, layer.requires_grad_())
        return node


@pytest.mark.parametrize("training", [False, True])
def test_a_frozen_layer_that_becomes_trainable_is_seen(training):
    before = fxopt.trace(nn.Sequential(nn.Linear(4, 4)).requires_grad_(False).train(training), (X,))
    with pytest.raises(AssertionError, match="output requires gradients"):
        assert_equivalent(before, Thaws("0")(copy.deepcopy(before)), (X,))
    with pytest.warns(fxopt.VerificationWarning, match="the weights of 0 require gradients now"):
        assert_equivalent(before, Thaws("0")(copy.deepcopy(before), verify=True), (X,))


class RemovesClones(ReversibleRewrite):
    preserves_computation = True

    def match(self, graph_module):
        yield from graph_module.graph.find_nodes(op="call_method", target="clone")

    def apply(self, rewriter, node):
        rewriter.replace_uses(node, node.all_input_nodes[0])
        rewriter.erase(node)


class Writes(nn.Module):
    def forward(self, x):
        y = x.clone()
        y.add_(1)
        return y * 2


class Returns(nn.Module):
    def forward(self, x):
        return x.clone()


class Computes(nn.Module):
    def forward(self, x):
        return x.clone() * 2


@pytest.mark.parametrize(
    ("model", "reason"), [(Writes(), "x differs"), (Returns(), "shares memory with x"), (Computes(), None)]
)
def test_verify_sees_memory_that_a_removed_copy_kept_apart(model, reason):
    before = fxopt.trace(model, (X,))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        after = RemovesClones()(copy.deepcopy(before), verify=True)
    assert_equivalent(before, after, (X,))
    assert len(fxopt.history(after)) == (reason is None)
    assert reason is None or reason in str(caught[0].message)


class ToClamp(ReversibleRewrite):
    preserves_computation = True

    def match(self, graph_module):
        yield from graph_module.graph.find_nodes(op="call_function", target=torch.relu)

    def apply(self, rewriter, node):
        new = rewriter.create("call_function", torch.clamp_min, (node.args[0], 0), before=node)
        rewriter.replace_uses(node, new)
        rewriter.erase(node)
        return new


class Attention(nn.Module):
    def forward(self, query, key, value):
        return (torch.relu(query) @ key.transpose(-2, -1) / 2).softmax(-1) @ value


def test_a_created_node_has_a_description_of_its_value():
    graph_module = ToClamp()(fxopt.trace(Attention(), (torch.ones(1, 2, 5, 4),) * 3), verify=True)
    (clamp,) = graph_module.graph.find_nodes(op="call_function", target=torch.clamp_min)
    assert clamp.meta["val"].shape == (1, 2, 5, 4)
    assert len(fxopt.FuseAttention().explain(graph_module).sites) == 1


class ToZeros(Rewrite):
    def __init__(self, tolerance=None):
        self.tolerance = tolerance

    def match(self, graph_module):
        yield from graph_module.graph.find_nodes(op="call_module", target="layer")

    def apply(self, rewriter, node):
        rewriter.set(node, op="call_function", target=torch.zeros_like)


def test_verify_warns_of_what_it_cannot_judge():
    with pytest.warns(UnverifiedWarning, match="neither `preserves_computation = True` nor a `tolerance`"):
        ToZeros()(traced(), verify=True)


def test_verify_warns_of_weights_that_transform_writes():
    class Doubles(ReversibleTransformation):
        preserves_computation = True

        def transform(self, graph_module):
            with torch.no_grad():
                graph_module.get_parameter("layer.weight").mul_(2)
            return graph_module

        def reverse(self, graph_module):
            return graph_module

    with pytest.warns(UnverifiedWarning, match="it writes into layer.weight"):
        Doubles()(traced(), verify=True)


def test_verify_holds_a_pass_to_its_tolerance():
    with pytest.warns(fxopt.VerificationWarning, match="layer moves by 1 of its norm; the tolerance is 0.5"):
        assert fxopt.history(ToZeros(0.5)(traced(), verify=True)) == ()
    assert len(fxopt.history(ToZeros(1.5)(traced(), verify=True))) == 1
