"""The contract of passes: calling, marking, composing, signatures, and where marks survive."""

import copy
import dataclasses
import functools
import operator
import os
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

import fxopt
from fxopt import (
    ChangeTrueDivToMulByInverse,
    DeepCopy,
    FuseBiasInLinear,
    LintAndRecompile,
    MergeLinears,
    PassError,
    ReplaceActivation,
    ReversibleTransformation,
    Transformation,
    compose,
)
from fxopt.record import RECORD
from fxopt.testing import assert_round_trip


class Product(nn.Module):
    def forward(self, x, y):
        return x * y


class ChangeMulToAdd(Transformation):
    """The first example of the guide."""

    def transform(self, graph_module):
        for node in graph_module.graph.nodes:
            if node.op == "call_function" and node.target == operator.mul:
                node.target = operator.add
                self.mark_as_transformed(node)
        return graph_module


class MulToMulTimesTwo(ReversibleTransformation):
    """The second example of the guide, with nodes where it computes with a Node as if it were a number."""

    def transform(self, graph_module):
        for node in list(graph_module.graph.nodes):
            if node.op == "call_function" and node.target == operator.mul and not self.transformed(node):
                x, y = node.args
                with graph_module.graph.inserting_before(node):
                    doubled = graph_module.graph.call_function(operator.mul, (2, x))
                self.mark_as_transformed(doubled)
                node.args = (doubled, y)
        return graph_module

    def reverse(self, graph_module):
        for node in self.get_transformed_nodes(graph_module):
            node.replace_all_uses_with(node.args[1])
            graph_module.graph.erase_node(node)
        return graph_module


@dataclasses.dataclass(frozen=True)
class WithOptions(ChangeMulToAdd):
    names: frozenset[str] = frozenset({"b", "a", "c"})
    table: tuple[type, ...] = (nn.Linear,)


class PlainOptions(ChangeMulToAdd):
    def __init__(self, scale, function=torch.relu):
        self.scale = scale
        self.function = function


def product():
    return torch.fx.symbolic_trace(Product())


TWO, THREE = torch.tensor(2.0), torch.tensor(3.0)


def test_a_user_writes_only_transform():
    assert ChangeMulToAdd()(product())(TWO, THREE) == 5
    assert ChangeMulToAdd().preserves_computation is False


def test_a_user_writes_transform_and_reverse():
    traced = product()
    before = copy.deepcopy(traced)
    doubled = MulToMulTimesTwo()(traced)
    assert doubled(TWO, THREE) == 12
    assert_round_trip(before, MulToMulTimesTwo()(doubled, reverse=True))


@pytest.mark.parametrize("cls", [Transformation, ReversibleTransformation])
def test_abstract_methods_must_be_written(cls):
    with pytest.raises(TypeError, match="abstract"):
        cls()


def test_lint_and_recompile_can_wait():
    traced = product()
    code = traced.code
    ChangeMulToAdd()(traced, lint_and_recompile=False)
    assert traced.code == code
    LintAndRecompile()(traced, lint_and_recompile=False)
    assert traced(TWO, THREE) == 5


def test_marks():
    pass_, traced = ChangeMulToAdd(), product()
    (node,) = traced.graph.find_nodes(op="call_function", target=operator.mul)
    assert not pass_.transformed(node)
    pass_.mark_as_transformed(node)
    pass_.mark_as_transformed(node)
    assert pass_.transformed(node)
    assert pass_.get_transformed_nodes(traced) == [node]
    assert not MulToMulTimesTwo().get_transformed_nodes(traced)


def test_mark_as_restored():
    pass_, traced = MulToMulTimesTwo(), product()
    (node,) = traced.graph.find_nodes(op="call_function", target=operator.mul)
    with pytest.raises(ValueError, match="'mul' was not transformed by"):
        pass_.mark_as_restored(node)
    pass_.mark_as_transformed(node)
    ChangeMulToAdd().mark_as_transformed(node)
    pass_.mark_as_restored(node)
    assert not pass_.transformed(node)
    assert ChangeMulToAdd().transformed(node)
    with pytest.raises(ValueError, match="was not transformed"):
        pass_.mark_as_restored(node)


def deepcopied(graph_module):
    return copy.deepcopy(graph_module)


def pickled(graph_module):
    return pickle.loads(pickle.dumps(graph_module))


def pickled_twice(graph_module):
    return pickled(copy.deepcopy(pickled(graph_module)))


@pytest.mark.parametrize("carry", [deepcopied, pickled, pickled_twice])
@pytest.mark.parametrize("trace", [torch.fx.symbolic_trace, lambda m: fxopt.trace(m, (TWO, THREE))])
def test_marks_survive(carry, trace):
    carried = carry(MulToMulTimesTwo()(trace(Product())))
    assert [node.name for node in MulToMulTimesTwo().get_transformed_nodes(carried)] == ["mul_1"]
    (node,) = [n for n in carried.graph.nodes if n.name == "mul_1"]
    assert MulToMulTimesTwo().transformed(node)
    assert MulToMulTimesTwo()(carried, reverse=True)(TWO, THREE) == 6


def test_copies_do_not_share_marks():
    traced = MulToMulTimesTwo()(product())
    copied = copy.deepcopy(traced)
    MulToMulTimesTwo()(copied, reverse=True)
    assert MulToMulTimesTwo().get_transformed_nodes(traced)


def test_the_record_is_no_state_and_goes_with_the_last_mark():
    traced = MulToMulTimesTwo()(product())
    assert RECORD in dict(traced.named_children())
    assert not traced.state_dict()
    traced.load_state_dict({}, strict=True)
    MulToMulTimesTwo()(traced, reverse=True)
    assert RECORD not in dict(traced.named_children())


def test_marks_of_an_edited_graph_are_not_guessed():
    traced = MulToMulTimesTwo()(product())
    (node,) = MulToMulTimesTwo().get_transformed_nodes(traced)
    with traced.graph.inserting_before(node):
        traced.graph.call_function(operator.neg, (node.args[1],))
    traced.recompile()
    assert not MulToMulTimesTwo().get_transformed_nodes(pickled(traced))


def test_a_taken_record_name_is_an_error():
    class Clash(Product):
        def __init__(self):
            super().__init__()
            self.fxopt_record = nn.Linear(1, 1)

        def forward(self, x, y):
            return self.fxopt_record(x) * y

    with pytest.raises(PassError, match="'fxopt_record', a name that fxopt needs"):
        ChangeMulToAdd()(torch.fx.symbolic_trace(Clash()))


def test_signatures_depend_on_class_and_options():
    assert MergeLinears().signature == MergeLinears().signature
    assert MergeLinears().signature != FuseBiasInLinear().signature
    assert ReplaceActivation("relu", "gelu").signature != ReplaceActivation("gelu", "relu").signature
    assert PlainOptions(1).signature != PlainOptions(2).signature
    assert PlainOptions(1).signature == PlainOptions(1).signature
    assert PlainOptions(1, print).signature != PlainOptions(1).signature


def test_a_signature_adds_nothing_to_the_instance():
    pass_ = PlainOptions(1)
    assert pass_.signature
    assert vars(pass_) == {"scale": 1, "function": torch.relu}


SIGNATURES = """
import fxopt, torch
from tests.test_transformation import PlainOptions, WithOptions
class Local: pass
local = Local()
local.tags = {"x", "y", "z"}
passes = [fxopt.MergeLinears(), WithOptions(), PlainOptions({"k": {"p", "q", "r"}}, lambda x: x),
          PlainOptions(local), fxopt.ChangePrecision(keep_float32=("a", torch.nn.LayerNorm)),
          fxopt.compose(fxopt.MergeLinears(), WithOptions())]
print([p.signature for p in passes])
"""


def test_signatures_are_the_same_in_every_process():
    outputs = [
        subprocess.run(
            [sys.executable, "-c", SIGNATURES],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert "MergeLinears" in outputs[0]
    assert " at 0x" not in outputs[0]


def test_repr_says_how_to_make_it():
    assert repr(MergeLinears()) == "MergeLinears()"
    assert repr(ChangeMulToAdd()) == "ChangeMulToAdd()"
    assert repr(PlainOptions(3, None)) == "PlainOptions(function=None, scale=3)"
    assert repr(compose(MergeLinears(), DeepCopy())) == "compose(MergeLinears(), DeepCopy(), inplace=True)"


class Fails(Transformation):
    def transform(self, graph_module):
        raise KeyError("no such thing")


class ReturnsNothing(Transformation):
    def transform(self, graph_module):
        return None


class BreaksTheGraph(Transformation):
    def transform(self, graph_module):
        nodes = list(graph_module.graph.nodes)
        nodes[-2].append(nodes[0])  # a placeholder behind its use
        return graph_module


def test_errors_name_the_pass():
    with pytest.raises(KeyError) as caught:
        compose(ChangeMulToAdd(), Fails())(product())
    assert "raised by Fails() in transform()" in caught.value.__notes__
    assert "applied before it: ChangeMulToAdd()" in caught.value.__notes__
    with pytest.raises(PassError, match=r"ReturnsNothing.transform returned NoneType"):
        ReturnsNothing()(product())
    with pytest.raises(PassError, match=r"BreaksTheGraph\(\) left an invalid graph"):
        BreaksTheGraph()(product())
    with pytest.raises(TypeError, match="got Product: trace the model first"):
        MergeLinears()(Product())


def test_compose_applies_in_order():
    assert compose(MulToMulTimesTwo(), ChangeMulToAdd())(product())(TWO, THREE) == 2 + 2 + 3
    assert compose(ChangeMulToAdd(), MulToMulTimesTwo())(product())(TWO, THREE) == 5


def test_what_a_composition_is_follows_from_its_parts():
    keeps = compose(MergeLinears(), ChangeTrueDivToMulByInverse())
    assert keeps.preserves_computation
    assert isinstance(keeps, ReversibleTransformation)
    changes = compose(MergeLinears(), ReplaceActivation())
    assert not changes.preserves_computation
    assert isinstance(changes, ReversibleTransformation)
    assert not isinstance(compose(MergeLinears(), ChangeMulToAdd()), ReversibleTransformation)
    assert compose().preserves_computation


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        return self.q(x) / 2, self.k(x)


def test_a_nested_composition_is_undone_in_reverse_order():
    traced = torch.fx.symbolic_trace(Head())
    before = copy.deepcopy(traced)
    passes = compose(MergeLinears(), compose(FuseBiasInLinear(), ChangeTrueDivToMulByInverse()))
    after = passes(traced)
    assert after is traced
    assert len(passes.get_transformed_nodes(after)) == 2
    assert_round_trip(before, passes(after, reverse=True))


def test_not_in_place_leaves_the_module_alone():
    traced = torch.fx.symbolic_trace(Head())
    before = copy.deepcopy(traced)
    passes = compose(MergeLinears(), FuseBiasInLinear(), inplace=False)
    after = passes(traced)
    assert_round_trip(before, traced)
    merged = copy.deepcopy(after)
    restored = passes(after, reverse=True)
    assert_round_trip(before, restored)
    assert_round_trip(merged, after)


def test_a_composition_lints_and_recompiles_once(monkeypatch):
    calls = []
    traced = torch.fx.symbolic_trace(Head())
    monkeypatch.setattr(type(traced), "recompile", lambda self: calls.append(self))
    compose(MergeLinears(), compose(FuseBiasInLinear(), ChangeTrueDivToMulByInverse()))(traced)
    assert len(calls) == 1
    compose(MergeLinears(), FuseBiasInLinear())(traced, lint_and_recompile=False)
    assert len(calls) == 1


def test_compose_takes_instances():
    with pytest.raises(TypeError, match=r"write MergeLinears\(\)"):
        compose(MergeLinears)
    with pytest.raises(TypeError, match="got 3"):
        compose(3)


def test_deep_copy_and_lint_and_recompile():
    traced = product()
    for reverse in (False, True):
        assert DeepCopy()(traced, reverse=reverse) is not traced
        assert LintAndRecompile()(traced, reverse=reverse) is traced
    assert DeepCopy().preserves_computation
    assert LintAndRecompile().preserves_computation
    with pytest.raises(PassError, match="left an invalid graph"):
        LintAndRecompile()(BreaksTheGraph()(product(), lint_and_recompile=False))


class Twins(nn.Module):
    def __init__(self):
        super().__init__()
        self.k, self.q = nn.Linear(4, 4), nn.Linear(4, 4)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        h = self.k(x) + self.q(x)
        return self.a(h), self.b(h) / 8


class BreaksAll(ReversibleTransformation):
    """Breaks all that a pass can break, and raises."""

    def transform(self, graph_module):
        graph_module.graph.erase_node(next(n for n in reversed(graph_module.graph.nodes) if n.op == "output"))
        del graph_module.k
        graph_module.q.weight = None
        graph_module.register_buffer("new", torch.ones(1))
        raise KeyboardInterrupt

    def reverse(self, graph_module):
        raise ValueError("cannot be undone")


class LeavesGarbage(Transformation):
    def transform(self, graph_module):
        del graph_module.k
        return graph_module


@pytest.mark.parametrize("trace", [torch.fx.symbolic_trace, lambda m: fxopt.trace(m, (torch.ones(1, 4),))])
@pytest.mark.parametrize(
    ("pass_", "error"),
    [
        (BreaksAll(), KeyboardInterrupt),
        (LeavesGarbage(), PassError),
        (compose(MergeLinears(), LeavesGarbage(), LeavesGarbage()), AttributeError),
        (compose(MergeLinears(), ChangeMulToAdd(), BreaksAll()), AttributeError),
    ],
)
def test_a_pass_that_fails_leaves_the_graph_module_as_it_was(pass_, error, trace):
    traced = trace(Twins())
    before = copy.deepcopy(traced)
    with pytest.raises(error):
        pass_(traced)
    assert_round_trip(before, traced)


def test_an_undo_that_fails_leaves_the_graph_module_as_it_was():
    traced = MergeLinears()(torch.fx.symbolic_trace(Twins()))
    merged = next(name for name, _ in traced.named_children() if name.startswith("fxopt_merged_k"))
    traced.get_submodule(merged).bias = None
    before, x = copy.deepcopy(traced), torch.randn(2, 4)
    with pytest.raises(fxopt.UndoError):
        MergeLinears()(traced, reverse=True)
    assert_round_trip(before, traced)
    assert torch.equal(before(x)[0], traced(x)[0])
    assert len(MergeLinears().get_transformed_nodes(traced)) == 2


def test_a_composition_that_cannot_be_undone_stays_applied():
    passes = compose(MergeLinears(), FuseBiasInLinear())
    traced = passes(torch.fx.symbolic_trace(Twins()))
    before = copy.deepcopy(traced)
    with pytest.raises(ValueError, match="cannot be undone"):
        compose(BreaksAll(), MergeLinears(), FuseBiasInLinear())(traced, reverse=True)
    assert_round_trip(before, traced)
    restored = passes(traced, reverse=True)
    assert_round_trip(passes(copy.deepcopy(before), reverse=True), restored)
    assert "fxopt" not in str(restored)


class Counts(ChangeMulToAdd):
    def __init__(self):
        self.count = 0

    def transform(self, graph_module):
        self.count += 1
        return super().transform(graph_module)


def test_a_pass_that_changes_its_signature_is_an_error():
    with pytest.raises(PassError, match="changed its own signature"):
        Counts()(product())


def test_attributes_beside_the_fields_of_a_dataclass_are_options():
    class Named(MergeLinears):
        def __init__(self, name):
            object.__setattr__(self, "name", name)

    assert Named("a").signature != Named("b").signature
    assert Named("a").signature == Named("a").signature


def test_a_composition_takes_the_marks_of_its_parts_off():
    traced = FuseBiasInLinear()(torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU())))
    passes = compose(FuseBiasInLinear(), MergeLinears())
    node = passes.get_transformed_nodes(traced)[0]
    passes.mark_as_restored(node)
    assert not passes.transformed(node)
    with pytest.raises(ValueError, match="was not transformed"):
        passes.mark_as_restored(node)


def test_a_signature_holds_no_address():
    class Slots:
        __slots__ = ()

    for option in (Slots(), functools.partial(test_a_signature_holds_no_address)):
        assert " at 0x" in repr(option)
        assert " at 0x" not in PlainOptions(1, option).signature
