"""The skeleton of passes: explaining, recording, and raising where the record of a rewrite is lost."""

import copy
import dataclasses
import inspect
import operator
import os

import pytest
import torch
from torch import nn

import fxopt
from fxopt import (
    ChangePrecision,
    ChangeTrueDivToMulByInverse,
    EliminateCommonSubexpressions,
    EliminateDeadCode,
    FoldConstants,
    FuseAttention,
    FuseBiasInLinear,
    MergeLinears,
    PassError,
    RemoveIdentity,
    RemoveRepeatedHeads,
    ReplaceActivation,
    ReversibleRewrite,
    UndoError,
    undo,
)
from fxopt.passes import available
from fxopt.rewriting.explanation import Explanation, Refusal, Row
from fxopt.rewriting.rewrite import Rewrite
from fxopt.testing import assert_round_trip, randomise
from tests.modules import module
from tests.users_passes import pickled


class Model(nn.Module):
    """Something for every pass."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(4, 4), nn.Linear(4, 4)
        self.act = nn.GELU()
        self.last, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.conv, self.norm2d = nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2)

    def forward(self, x):
        image = self.norm2d(self.conv(x[None, None]))
        return self.act(self.q(x)) / 8, self.k(x) / 3, image, self.norm(self.last(self.other(x)))

    def other(self, x):
        return x + 1


X = torch.randn(3, 4)
IDLE = (
    EliminateCommonSubexpressions,
    EliminateDeadCode,
    FoldConstants,
    fxopt.FoldNormWeights,
    fxopt.FoldPadding,
    FuseAttention,
    fxopt.FuseEpilogues,
    fxopt.FuseActivations,
    fxopt.FuseMultiplyAdd,
    fxopt.MakeLayers,
    fxopt.MergeConvs,
    fxopt.QuantizeLinears,
    fxopt.RemoveCopies,
    RemoveIdentity,
    RemoveRepeatedHeads,
)
"""Passes with nothing to do in the model here."""

REVERSIBLE = [cls for cls in available().values() if cls.reversible]
NEED_EVAL_OR_METADATA = (
    ChangePrecision,
    fxopt.FoldBatchNorms,
    fxopt.FoldScaleAndShift,
    fxopt.FuseBatchNorm1dInLinear,
    fxopt.FuseBatchNorm2dInConv2d,
    fxopt.PackConvs,
    fxopt.PackLinears,
)


def traced():
    return fxopt.trace(randomise(Model()).eval(), (X,))


@dataclasses.dataclass(frozen=True)
class Site:
    node: torch.fx.Node


class Negate(Rewrite[Site]):
    """A pass of a user on the skeleton: a function whose input is not a module becomes its negative."""

    def match(self, graph_module):
        for node in graph_module.graph.find_nodes(op="call_function", target=operator.pos):
            if node.args[0].op == "placeholder":
                yield Refusal(node, "it works on an input")
            else:
                yield Site(node)

    def apply(self, rewriter, site):
        rewriter.set(site.node, target=operator.neg)
        return site.node


class Signs(nn.Module):
    def forward(self, x):
        return operator.pos(x), operator.pos(x + 1)


def test_explain_gives_a_table():
    graph_module = torch.fx.symbolic_trace(Signs())
    explanation = Negate().explain(graph_module)
    assert explanation == Explanation(
        "Negate", (Row("pos", "", "it works on an input"), Row("pos_1", "", None))
    )
    assert explanation.sites == (("pos_1", ""),)
    assert explanation.refusals == (("pos", "", "it works on an input"),)
    assert str(explanation) == ("Negate: 1 sites, 1 refused\n  pos    it works on an input\n  pos_1  site")
    after = Negate()(graph_module)
    assert [node.name for node in Negate().get_transformed_nodes(after)] == ["pos_1"]


def line_of(function, text):
    lines, first = inspect.getsourcelines(function)
    return f"{__file__}:{first + next(i for i, line in enumerate(lines) if text in line)}"


def traced_by_fx(model):
    tracer = torch.fx.Tracer()
    tracer.record_stack_traces = True
    return torch.fx.GraphModule(model, tracer.trace(model))


@pytest.mark.parametrize("trace", [lambda model: fxopt.trace(model, (X,)), traced_by_fx])
def test_explain_and_errors_give_the_line_of_the_model(trace):
    row, refusal = (
        ChangeTrueDivToMulByInverse().explain(trace(Model().eval())).rows[0],
        FuseBiasInLinear().explain(trace(Hooked())).rows[0],
    )
    assert (row.reason, row.source) == (None, line_of(Model.forward, "/ 8"))
    assert refusal.reason == "the module has hooks (forward_hooks)"
    assert refusal.source == line_of(Hooked.forward, "self.layer(x)")
    text = str(FuseBiasInLinear().explain(trace(Hooked())))
    assert f"  layer  layer  {os.path.basename(refusal.source)}  the module has hooks" in text


class Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.layer.register_forward_hook(lambda module, args, output: output)

    def forward(self, x):
        x = x + 1
        return self.layer(x)


class CannotApply(ChangeTrueDivToMulByInverse):
    def apply(self, rewriter, site):
        raise ZeroDivisionError


def test_an_error_of_a_pass_names_the_node_and_its_line():
    with pytest.raises(ZeroDivisionError) as caught:
        CannotApply()(traced())
    line = line_of(Model.forward, "/ 8")
    assert f"CannotApply was rewriting truediv (from {line})" in caught.value.__notes__
    assert "raised by CannotApply() in transform()" in caught.value.__notes__


def test_an_undo_that_is_refused_names_the_node_and_its_line():
    after = ChangeTrueDivToMulByInverse()(traced())
    node = ChangeTrueDivToMulByInverse().get_transformed_nodes(after)[0]
    node.args = (node.args[0], 3)
    with pytest.raises(UndoError) as caught:
        ChangeTrueDivToMulByInverse()(after, reverse=True)
    assert f"truediv was changed since, at truediv (from {line_of(Model.forward, '/ 8')})" in str(
        caught.value
    )


@pytest.mark.parametrize("cls", REVERSIBLE)
def test_undo_of_what_was_never_rewritten_returns_it_unchanged(cls):
    graph_module = traced()
    before = copy.deepcopy(graph_module)
    assert cls()(graph_module, reverse=True) is graph_module
    assert_round_trip(before, graph_module)


def without_record(graph_module):
    return torch.fx.GraphModule(graph_module, graph_module.graph)


def without_unused_modules(graph_module):
    graph_module.delete_all_unused_submodules()
    return graph_module


def retraced(graph_module):
    return torch.fx.symbolic_trace(graph_module)


@pytest.mark.parametrize("lose", [without_record, without_unused_modules])
@pytest.mark.parametrize("cls", [cls for cls in REVERSIBLE if cls not in IDLE])
def test_a_lost_record_is_an_error(cls, lose):
    model = traced() if cls in NEED_EVAL_OR_METADATA else torch.fx.symbolic_trace(nn.Sequential(Model()))
    after = cls()(model)
    assert cls().get_transformed_nodes(after)
    lost = lose(after)
    code = lost.code
    with pytest.raises(UndoError, match="the record of its changes is gone"):
        cls()(lost, reverse=True)
    assert lost.code == code


@pytest.mark.parametrize(
    "cls", [MergeLinears, FuseBiasInLinear, fxopt.FuseBatchNorm2dInConv2d, ReplaceActivation]
)
def test_new_modules_tell_of_a_rewrite_also_after_retracing(cls):
    after = retraced(cls()(torch.fx.symbolic_trace(Model().eval())))
    assert not cls().get_transformed_nodes(after)
    with pytest.raises(UndoError, match="the record of its changes is gone"):
        cls()(after, reverse=True)


def test_a_copy_of_a_rewritten_node_stays_as_it_is():
    after = ChangeTrueDivToMulByInverse()(torch.fx.symbolic_trace(Model()))
    node = ChangeTrueDivToMulByInverse().get_transformed_nodes(after)[0]
    with after.graph.inserting_after(node):
        after.graph.node_copy(node)
    before = ChangeTrueDivToMulByInverse()(after, reverse=True)
    assert node.target is operator.truediv
    copies = before.graph.find_nodes(op="call_function", target=operator.mul)
    assert [copied.name for copied in copies if copied.args[1] == 0.125] == ["truediv_2"]
    assert not ChangeTrueDivToMulByInverse().get_transformed_nodes(before)


def test_a_graph_that_was_edited_and_pickled_is_undone():
    graph_module = torch.fx.symbolic_trace(Model().eval())
    before = copy.deepcopy(graph_module)
    after = ChangeTrueDivToMulByInverse()(graph_module)
    with after.graph.inserting_before(next(n for n in after.graph.nodes if n.op == "output")):
        after.graph.call_function(operator.neg, (next(iter(after.graph.nodes)),))
    after.recompile()
    restored = ChangeTrueDivToMulByInverse()(pickled(after), reverse=True)
    (neg,) = restored.graph.find_nodes(op="call_function", target=operator.neg)
    restored.graph.erase_node(neg)
    restored.recompile()
    assert_round_trip(before, restored)


class Endless(Negate):
    """Matches what it makes."""

    def opens_sites(self, graph_module, sites):
        return True

    def match(self, graph_module):
        yield Site(next(n for n in graph_module.graph.nodes if n.op == "call_function"))


def test_a_pass_that_matches_what_it_makes_is_stopped():
    with pytest.raises(PassError, match="does not terminate"):
        Endless()(traced())


class Grows(ReversibleRewrite):
    """Makes two ReLUs of one; behind another one, by mistake, a sigmoid."""

    preserves_computation = True

    def match(self, graph_module):
        yield from graph_module.graph.find_nodes(op="call_function", target=torch.relu)

    def opens_sites(self, graph_module, sites):
        return True

    def apply(self, rewriter, node):
        (value,) = node.all_input_nodes
        functions = (torch.sigmoid,) if value.target is torch.relu else (torch.relu, torch.relu)
        for function in functions:
            value = rewriter.create("call_function", function, (value,), {}, before=node)
        rewriter.replace_uses(node, value)
        rewriter.erase(node)
        return value


def test_rounds_that_take_a_site_back_and_keep_another_one_come_to_an_end():
    traced = fxopt.trace(module(lambda m, x: torch.relu(x)), (torch.randn(2, 3),))
    before = copy.deepcopy(traced)
    with (
        pytest.warns(fxopt.VerificationWarning, match="rolled back its rewrite"),
        pytest.raises(PassError, match="does not terminate"),
    ):
        Grows()(traced, verify=True)
    assert_round_trip(before, traced)


@pytest.mark.parametrize(("found", "kind"), [("relu", "str"), ([("a", "b")], "tuple")])
def test_what_is_no_site_is_an_error(found, kind):
    class Finds(ReversibleRewrite):
        def match(self, graph_module):
            return found

        def apply(self, rewriter, site):
            raise AssertionError

    graph_module = torch.fx.symbolic_trace(nn.ReLU())
    for call in (Finds(), Finds().explain):
        with pytest.raises(PassError, match=rf"match of .*Finds\(\) gave a {kind}: it has to yield nodes"):
            call(graph_module)


def test_roles_of_a_lost_record_are_not_taken_for_new_ones():
    graph_module = MergeLinears()(torch.fx.symbolic_trace(Model()))
    graph_module.delete_all_unused_submodules()
    code = graph_module.code
    FuseBiasInLinear()(graph_module)
    assert undo(graph_module).code == code
    with pytest.raises(UndoError, match="the record of its changes is gone"):
        MergeLinears()(graph_module, reverse=True)


def test_marks_do_not_move_to_other_nodes_when_a_graph_is_edited_before_a_pickle():
    layers = {"a": torch.nn.Linear(4, 4), "b": torch.nn.Linear(4, 4)}
    model = module(lambda m, x: torch.tanh(m.a(torch.relu(x)) + m.b(x)), **layers)
    fuse = FuseBiasInLinear()
    fused = fuse(torch.fx.symbolic_trace(model))
    (tanh,) = fused.graph.find_nodes(op="call_function", target=torch.tanh)
    tanh.replace_all_uses_with(tanh.args[0])
    fused.graph.erase_node(tanh)
    (relu,) = fused.graph.find_nodes(op="call_function", target=torch.relu)
    with fused.graph.inserting_before(relu):
        relu.replace_input_with(relu.args[0], fused.graph.call_function(torch.sigmoid, relu.args))
    fused.recompile()
    for carried in (fused, pickled(fused)):
        assert [node.target for node in fuse.get_transformed_nodes(carried)] == ["a", "b"]
        restored = fuse(carried, reverse=True)
        assert restored.a.bias is not None
        assert [node.name for node in restored.graph.nodes] == [
            "x",
            "sigmoid",
            "relu",
            "a",
            "b",
            "add",
            "output",
        ]
