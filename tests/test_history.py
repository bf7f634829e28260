"""History, undo, and transformations that are applied for a while."""

import copy
import operator
import pickle

import pytest
import torch
from torch import nn

import fxopt
from fxopt import (
    ChangePrecision,
    ChangeTrueDivToMulByInverse,
    DeepCopy,
    FuseBatchNorm2dInConv2d,
    FuseBiasInLinear,
    LintAndRecompile,
    MergeLinears,
    PassError,
    ReplaceActivation,
    ReversibleTransformation,
    Transformation,
    UndoError,
    applied,
    compose,
    history,
    undo,
)
from fxopt.rewriting.record import RECORD
from fxopt.testing import assert_round_trip
from tests.modules import module
from tests.users_passes import MulToSub, Negates, names, pickled, saved


class MulToAdd(Transformation):
    """Plain, and marks nothing."""

    def transform(self, graph_module):
        for node in graph_module.graph.find_nodes(op="call_function", target=operator.mul):
            node.target = operator.add
        return graph_module


class NegToAbs(MulToSub):
    before, after = operator.neg, operator.abs


class Scales(ReversibleTransformation):
    """Written by a user: writes into a weight."""

    def transform(self, graph_module, factor=2):
        with torch.no_grad():
            graph_module.q.weight.mul_(factor)
        return graph_module

    def reverse(self, graph_module):
        return self.transform(graph_module, 0.25)


class Fails(Negates):
    def reverse(self, graph_module):
        super().reverse(graph_module)
        raise ValueError("cannot be undone")


X = torch.randn(3, 4)
ALL = compose(
    MergeLinears(),
    compose(FuseBiasInLinear(), ReplaceActivation()),
    ChangeTrueDivToMulByInverse(),
    MulToSub(),
)


def traced(trace=fxopt.trace):
    torch.manual_seed(0)
    layers = {"q": nn.Linear(4, 4), "k": nn.Linear(4, 4), "out": nn.Linear(4, 4), "act": nn.GELU()}
    model = module(lambda m, x: m.out(m.act(m.q(x) * m.k(x) / 8)), **layers)
    return fxopt.trace(model, (X,)) if trace is fxopt.trace else trace(model)


TRACES = pytest.mark.parametrize("trace", [fxopt.trace, torch.fx.symbolic_trace])


@TRACES
def test_the_parts_of_a_composition_stand_in_order(trace):
    graph_module = ALL(traced(trace))
    steps = history(graph_module)
    assert [(step.name, step.nodes, step.reversible) for step in steps] == [
        ("MergeLinears()", 1, True),
        ("FuseBiasInLinear()", 2, True),
        ("ReplaceActivation(source='gelu', target='gelu_tanh')", 1, True),
        ("ChangeTrueDivToMulByInverse()", 1, True),
        ("MulToSub()", 0, True),
    ]
    assert [step.signature for step in steps][:2] == [MergeLinears().signature, FuseBiasInLinear().signature]
    assert str(steps).splitlines()[:2] == [
        "5 applied",
        "  1  MergeLinears()                                        1 nodes",
    ]


def test_what_did_nothing_is_not_listed():
    graph_module = torch.fx.symbolic_trace(nn.Sequential(nn.ReLU()))
    passes = compose(MergeLinears(), MulToAdd(), MulToSub(), DeepCopy(), LintAndRecompile())
    assert history(passes(graph_module)) == ()
    assert RECORD not in dict(graph_module.named_children())
    assert str(history(graph_module)) == "0 applied"


def test_a_plain_transformation_is_listed_and_says_so():
    graph_module = MulToAdd()(MergeLinears()(traced()))
    assert names(graph_module) == ["MergeLinears()", "MulToAdd()"]
    assert str(history(graph_module)).endswith("2  MulToAdd()      0 nodes, cannot be undone")


def test_a_write_into_a_weight_is_listed():
    class Halves(Transformation):
        def transform(self, graph_module):
            with torch.no_grad():
                graph_module.q.weight.mul_(0.5)
            return graph_module

    assert names(Halves()(traced())) == [
        "test_a_write_into_a_weight_is_listed.<locals>.Halves()",
    ]


@TRACES
def test_undo_takes_back_one_step_after_the_other(trace):
    graph_module = traced(trace)
    stages = []
    for pass_ in (MergeLinears(), FuseBiasInLinear(), MulToSub(), Negates(), ChangeTrueDivToMulByInverse()):
        stages.append(copy.deepcopy(graph_module))
        pass_(graph_module)
    while stages:
        assert undo(graph_module) is graph_module
        assert_round_trip(stages[-1], graph_module)
        assert names(graph_module) == names(stages.pop())
    assert RECORD not in dict(graph_module.named_children())


@pytest.mark.parametrize("steps", [2, 3])
def test_more_steps_than_there_are(steps):
    graph_module = MergeLinears()(traced())
    before = copy.deepcopy(graph_module)
    with pytest.raises(UndoError, match=f"steps is {steps}, but 1 are recorded"):
        undo(graph_module, steps)
    assert_round_trip(before, graph_module)
    assert undo(graph_module, 0) is graph_module
    assert_round_trip(before, graph_module)
    for wrong in (-1, "all"):
        with pytest.raises(ValueError, match=f"steps is {wrong!r}"):
            undo(graph_module, wrong)


def test_undo_of_what_was_not_rewritten():
    with pytest.raises(UndoError, match="0 are recorded: a pass that finds no site is not recorded"):
        undo(FuseBatchNorm2dInConv2d()(traced()))
    for other in (nn.Linear(2, 2), None):
        with pytest.raises(TypeError, match=f"not {type(other).__name__}"):
            undo(other)


def test_a_lost_record_is_an_error():
    graph_module = MergeLinears()(traced())
    graph_module.delete_all_unused_submodules()
    with pytest.raises(UndoError, match="delete_all_unused_submodules"):
        undo(graph_module)


def converted(graph_module):
    return graph_module.to(torch.float64).to(torch.float32)


@TRACES
@pytest.mark.parametrize("carry", [copy.deepcopy, pickled, saved, converted])
def test_history_survives(carry, trace):
    graph_module = traced(trace)
    before = copy.deepcopy(graph_module)
    compose(ALL, Negates())(graph_module)
    carried = carry(carry(graph_module))
    assert history(carried) == history(graph_module)
    assert_round_trip(before, undo(carried, 6))
    assert len(history(graph_module)) == (0 if carry is converted else 6)


def test_the_same_pass_at_different_times():
    graph_module = traced()
    first, second = ReplaceActivation("gelu", "relu"), FuseBiasInLinear()
    second(first(graph_module))
    stage = copy.deepcopy(graph_module)
    graph_module.add_module("late", nn.Linear(4, 4))
    output = next(iter(graph_module.graph.find_nodes(op="output")))
    with graph_module.graph.inserting_before(output):
        late = graph_module.graph.call_module("late", (output.args[0],))
    output.args = (late,)
    second(graph_module)
    assert names(graph_module) == [repr(first), repr(second), repr(second)]
    both = second(copy.deepcopy(graph_module), reverse=True)
    assert names(both) == [repr(first)]
    assert None not in (both.late.bias, both.out.bias)
    undo(graph_module)
    assert graph_module.late.bias is not None
    assert graph_module.out.bias is None
    output.args = late.args
    graph_module.graph.erase_node(late)
    del graph_module.late
    graph_module.recompile()
    assert_round_trip(stage, graph_module)
    undo(graph_module)
    assert graph_module.out.bias is not None


def test_a_plain_transformation_blocks_undo():
    graph_module = MulToAdd()(MergeLinears()(traced()))
    before = copy.deepcopy(graph_module)
    for steps in (1, 2):
        with pytest.raises(
            UndoError, match=r"^MulToAdd\(\) cannot be undone, so earlier steps cannot be undone in order"
        ):
            undo(graph_module, steps)
        assert_round_trip(before, graph_module)
    assert names(MergeLinears()(graph_module, reverse=True)) == ["MulToAdd()"]


def test_the_wrong_order_names_the_right_one():
    graph_module = compose(MergeLinears(), FuseBiasInLinear(), ChangePrecision())(traced())
    before = copy.deepcopy(graph_module)
    with pytest.raises(UndoError, match=r"Undo ChangePrecision\(.*\), then FuseBiasInLinear\(\) first"):
        MergeLinears()(graph_module, reverse=True)
    assert_round_trip(before, graph_module)
    assert len(history(graph_module)) == 3


def test_hand_written_transformations_are_undone_in_any_order_where_they_do_not_meet():
    before = traced()
    graph_module = compose(MulToSub(), MergeLinears(), Negates())(traced())
    MulToSub()(graph_module, reverse=True)
    assert names(graph_module) == ["MergeLinears()", "Negates()"]
    MergeLinears()(graph_module, reverse=True)
    assert_round_trip(before, undo(graph_module))


def test_hand_written_transformations_that_meet_are_undone_in_order():
    graph_module = compose(Negates(), NegToAbs())(traced())
    before = copy.deepcopy(graph_module)
    with pytest.raises(UndoError, match=r"Undo NegToAbs\(\) first"):
        Negates()(graph_module, reverse=True)
    assert_round_trip(before, graph_module)


def test_applications_that_reverse_undoes_together_are_undone_together():
    graph_module = compose(Scales(), Negates(), Negates(), Scales())(traced())
    with pytest.raises(UndoError, match=r"Scales\(\) was applied 2 times"):
        undo(graph_module)
    assert torch.equal(undo(copy.deepcopy(graph_module), 4).q.weight, traced().q.weight)
    assert names(Negates()(graph_module, reverse=True)) == ["Scales()", "Scales()"]


def test_an_undo_that_fails_in_the_middle_leaves_all_applied():
    graph_module = compose(Fails(), MergeLinears(), Negates())(traced())
    before = copy.deepcopy(graph_module)
    with pytest.raises(ValueError, match="cannot be undone"):
        undo(graph_module, 3)
    assert_round_trip(before, graph_module)
    assert names(graph_module) == ["Fails()", "MergeLinears()", "Negates()"]
    undo(graph_module, 2)


def test_a_transformation_that_cannot_be_pickled():
    class Local(MulToSub):
        pass

    graph_module = Local()(traced())
    before = copy.deepcopy(graph_module)
    carried = pickled(pickled(graph_module))
    assert names(carried) == names(graph_module)
    with pytest.raises(UndoError, match="it was not pickled or saved with the graph module"):
        undo(carried)
    assert_round_trip(before, carried)
    assert undo(copy.deepcopy(graph_module))(X) is not None
    assert history(Local()(carried, reverse=True)) == ()


def test_a_class_that_is_gone(monkeypatch):
    data = pickle.dumps(Scales()(traced()))
    monkeypatch.delitem(globals(), "Scales")
    with pytest.raises(UndoError, match="cannot be unpickled .*AttributeError"):
        undo(pickle.loads(data))


class SubToMul(MulToSub):
    before, after = operator.sub, operator.mul


def test_a_reverse_of_what_was_never_applied_changes_nothing():
    graph_module = MulToSub()(MulToAdd()(traced()), reverse=True)
    assert names(graph_module) == ["MulToAdd()"]
    before = traced()
    graph_module = copy.deepcopy(before)
    with pytest.raises(UndoError, match="the graph module has no record of it"):
        SubToMul()(graph_module, reverse=True)
    assert_round_trip(before, graph_module)


@TRACES
def test_applied_for_a_while(trace):
    graph_module = traced(trace)
    MergeLinears()(graph_module)
    before = copy.deepcopy(graph_module)
    plain = graph_module(X)
    with applied(graph_module, compose(ReplaceActivation("gelu", "relu"), Negates())) as same:
        assert same is graph_module
        assert len(history(graph_module)) == 3
        assert not torch.allclose(graph_module(X), plain)
    assert_round_trip(before, graph_module)
    assert torch.equal(graph_module(X), plain)
    assert names(graph_module) == ["MergeLinears()"]


def test_applied_is_undone_after_an_error():
    graph_module = traced()
    before = copy.deepcopy(graph_module)
    with pytest.raises(KeyboardInterrupt), applied(graph_module, ALL):
        raise KeyboardInterrupt
    assert_round_trip(before, graph_module)


@pytest.mark.parametrize("pipeline", [MulToAdd(), compose(MergeLinears(), compose(MulToSub(), MulToAdd()))])
def test_applied_refuses_what_cannot_be_undone(pipeline):
    graph_module = traced()
    before, nodes = copy.deepcopy(graph_module), list(graph_module.graph.nodes)
    with pytest.raises(UndoError, match=r"^MulToAdd\(\) cannot be undone"), applied(graph_module, pipeline):
        raise AssertionError("the block must not run")
    assert_round_trip(before, graph_module)
    assert list(graph_module.graph.nodes) == nodes


@pytest.mark.parametrize(
    "pipeline", [compose(MergeLinears(), inplace=False), compose(MergeLinears(), DeepCopy())]
)
def test_applied_works_in_place(pipeline):
    graph_module = traced()
    before = copy.deepcopy(graph_module)
    with pytest.raises(PassError, match="gives another graph module"), applied(graph_module, pipeline):
        raise AssertionError("the block must not run")
    assert_round_trip(before, graph_module)


def test_applied_and_undone_in_the_block():
    graph_module = traced()
    before = copy.deepcopy(graph_module)
    with applied(graph_module, ALL):
        undo(graph_module, 5)
    assert_round_trip(before, graph_module)


def test_applied_does_not_undo_what_the_block_did():
    graph_module = traced()
    with pytest.raises(UndoError, match="the block applied or undid something else"):  # noqa: SIM117
        with applied(graph_module, MergeLinears()):
            Negates()(graph_module)
    assert names(graph_module) == ["MergeLinears()", "Negates()"]


def test_applied_keeps_what_was_trained():
    graph_module = traced()
    with applied(graph_module, compose(MergeLinears(), FuseBiasInLinear())), torch.no_grad():
        for parameter in graph_module.parameters():
            parameter.add_(1)
    original = dict(traced().named_parameters())
    for name, parameter in graph_module.named_parameters():
        assert torch.equal(parameter, original[name] + 1)


@pytest.mark.parametrize("last", [FuseBiasInLinear(), fxopt.MakeLayers()])
def test_what_was_undone_in_between_and_applied_again_does_not_stand_in_the_way(last):
    def forward(self, x):
        return self.k(x), self.v(x) + torch.arange(4) * 2, nn.functional.linear(x, self.weight)

    parts = {"k": nn.Linear(4, 4), "v": nn.Linear(4, 4), "weight": nn.Parameter(torch.ones(2, 4))}
    graph_module = fxopt.trace(module(forward, **parts).eval(), (torch.ones(2, 4),))
    before, merge = copy.deepcopy(graph_module), MergeLinears()
    merge(graph_module)
    fxopt.FoldConstants()(graph_module)
    merge(graph_module, reverse=True)
    merge(graph_module)
    middle = copy.deepcopy(graph_module)
    last(graph_module)
    assert_round_trip(middle, undo(graph_module))
    assert_round_trip(before, undo(graph_module, len(fxopt.history(graph_module))))
