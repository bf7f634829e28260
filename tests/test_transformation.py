"""The contract of passes: calling, marking, signatures, and where marks survive."""

import copy
import dataclasses
import functools
import operator
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import fxopt
from fxopt import (
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
from fxopt.rewriting.record import RECORD
from fxopt.testing import assert_round_trip
from tests.example_passes import (
    THREE,
    TWO,
    BreaksTheGraph,
    ChangeMulToAdd,
    MulToMulTimesTwo,
    Product,
    product,
)
from tests.users_passes import pickled


@dataclasses.dataclass(frozen=True)
class WithOptions(ChangeMulToAdd):
    names: frozenset[str] = frozenset({"b", "a", "c"})
    table: tuple[type, ...] = (nn.Linear,)


class PlainOptions(ChangeMulToAdd):
    def __init__(self, scale, function=torch.relu):
        self.scale = scale
        self.function = function


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


@pytest.mark.parametrize("carry", [copy.deepcopy, pickled, lambda gm: pickled(copy.deepcopy(pickled(gm)))])
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
passes = [fxopt.MergeLinears(), fxopt.FuseBiasInLinear(), fxopt.ReplaceActivation(), WithOptions(),
          PlainOptions({"k": {"p", "q", "r"}}, lambda x: x), PlainOptions(local), fxopt.ChangePrecision(keep_float32=("a", torch.nn.LayerNorm)),
          fxopt.compose(fxopt.MergeLinears(), WithOptions())]
print([p.signature for p in passes])
"""


@pytest.mark.long
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


def test_a_signature_holds_no_address():
    class Slots:
        __slots__ = ()

    for option in (Slots(), functools.partial(test_a_signature_holds_no_address)):
        assert " at 0x" in repr(option)
        assert " at 0x" not in PlainOptions(1, option).signature


@pytest.mark.parametrize(
    "function", [fxopt.draw, fxopt.guards, fxopt.MergeLinears(), fxopt.MergeLinears().explain]
)
def test_a_model_in_the_place_of_a_graph_is_said_to_be_one(function):
    with pytest.raises(
        TypeError, match=r"takes|rewrites.* a torch\.fx\.GraphModule, got Linear: trace the model"
    ):
        function(torch.nn.Linear(2, 2))
