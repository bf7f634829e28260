"""History and undo around transformations that users write: nested ones, copies, attributes of modules."""

import copy

import pytest
import torch
from torch import nn

import fxopt
from fxopt import (
    DeepCopy,
    FuseBatchNorm2dInConv2d,
    FuseBiasInLinear,
    MergeLinears,
    PassError,
    ReversibleTransformation,
    UndoError,
    applied,
    compose,
    history,
    undo,
)
from fxopt.testing import assert_round_trip, randomise
from tests.modules import module
from tests.users_passes import MulToSub, names, pickled


class Calls(ReversibleTransformation):
    """Calls another transformation."""

    def __init__(self, inner):
        self.inner = inner

    def transform(self, graph_module):
        return self.inner(graph_module)

    def reverse(self, graph_module):
        return self.inner(graph_module, reverse=True)


class DropNothing(ReversibleTransformation):
    """Changes an attribute of a module, and no node."""

    def transform(self, graph_module):
        graph_module.get_submodule("drop").p = 0.0
        return graph_module

    def reverse(self, graph_module):
        graph_module.get_submodule("drop").p = 0.5
        return graph_module


class Rebuilds(ReversibleTransformation):
    """Returns a new graph module, both ways."""

    def transform(self, graph_module):
        return torch.fx.GraphModule(graph_module, copy.deepcopy(graph_module.graph))

    reverse = transform


X = torch.randn(3, 4)


def traced():
    torch.manual_seed(0)
    layers = {"q": nn.Linear(4, 4), "k": nn.Linear(4, 4), "drop": nn.Dropout(0.5)}
    return torch.fx.symbolic_trace(module(lambda m, x: m.drop(m.q(x) * m.k(x)), **layers))


@pytest.mark.parametrize(
    "inner",
    [
        MulToSub(),
        MergeLinears(),
        compose(MergeLinears(), MulToSub()),
        compose(MergeLinears(), MulToSub(), inplace=False),
    ],
)
@pytest.mark.parametrize("by_itself", [False, True])
def test_what_a_transformation_calls_is_a_part_of_it(inner, by_itself):
    before, outer = traced(), Calls(inner)
    graph_module = outer(traced())
    assert names(graph_module) == [repr(outer)]
    restored = outer(graph_module, reverse=True) if by_itself else undo(graph_module)
    assert history(restored) == ()
    assert_round_trip(before, restored)


def test_what_stood_before_stays_listed():
    graph_module = MulToSub()(traced())
    before = copy.deepcopy(graph_module)
    Calls(MergeLinears())(graph_module)
    assert names(graph_module)[0] == "MulToSub()"
    assert names(undo(graph_module)) == ["MulToSub()"]
    assert_round_trip(before, graph_module)


def test_a_change_of_an_attribute_is_listed():
    graph_module = MergeLinears()(traced())
    DropNothing()(graph_module)
    assert names(DropNothing()(graph_module)) == ["MergeLinears()", "DropNothing()"]
    undo(graph_module)
    assert graph_module.drop.p == 0.5
    assert names(graph_module) == ["MergeLinears()"]


def test_an_error_takes_attributes_back():
    class Fails(DropNothing):
        def transform(self, graph_module):
            super().transform(graph_module).note = 1
            raise ValueError("on purpose")

    graph_module = traced()
    with pytest.raises(ValueError, match="on purpose"):
        Fails()(graph_module)
    assert graph_module.drop.p == 0.5
    assert not hasattr(graph_module, "note")


def test_a_new_graph_module_keeps_the_record():
    graph_module = MergeLinears()(traced())
    rebuilt = Rebuilds()(graph_module)
    assert names(rebuilt) == ["MergeLinears()", "Rebuilds()"]
    restored = MergeLinears()(rebuilt, reverse=True)
    assert names(restored) == ["Rebuilds()"]
    assert restored.code == traced().code
    assert names(graph_module) == ["MergeLinears()"]
    assert_round_trip(traced(), undo(graph_module))
    assert_round_trip(traced(), undo(Rebuilds()(MergeLinears()(traced())), 2))


@pytest.mark.parametrize(
    ("copies", "last"),
    [(DeepCopy(), MergeLinears()), (compose(FuseBiasInLinear(), inplace=False), FuseBiasInLinear())],
)
def test_what_is_copied_on_the_way_runs_as_its_history_says(copies, last):
    graph_module = traced()
    expected = graph_module(X)
    result = compose(MergeLinears(), copies)(graph_module)
    assert names(graph_module) == ["MergeLinears()"]
    torch.testing.assert_close(graph_module(X), expected)
    compose(DeepCopy(), last)(result, reverse=True)
    torch.testing.assert_close(result(X), expected)


def folded_and_pickled():
    layers = randomise(nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3))).eval()
    graph_module = torch.fx.symbolic_trace(layers)
    return copy.deepcopy(graph_module), pickled(FuseBatchNorm2dInConv2d()(graph_module))


def test_an_undo_that_failed_after_a_pickle_can_be_repeated():
    before, graph_module = folded_and_pickled()
    weight = graph_module.get_parameter("0.weight")
    values = weight.detach().clone()
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(UndoError, match="have changed since"):
        undo(graph_module)
    with torch.no_grad():
        weight.copy_(values)
    assert_round_trip(before, undo(graph_module))


def test_after_applied_refused_a_pickled_module_can_be_undone():
    before, graph_module = folded_and_pickled()
    with pytest.raises(PassError, match="gives another"), applied(graph_module, DeepCopy()):
        raise AssertionError("the block must not run")
    assert_round_trip(before, undo(graph_module))


def test_applied_with_nothing_to_undo_leaves_the_block_alone():
    graph_module = traced()
    with applied(graph_module, FuseBatchNorm2dInConv2d()):
        MergeLinears()(graph_module)
    assert names(graph_module) == ["MergeLinears()"]


def test_a_drawing_has_the_marks_that_a_pickle_dropped():
    _, graph_module = folded_and_pickled()
    assert "rewritten by" in fxopt.draw(graph_module, format="dot")
