"""The oracle itself: it must fail when something is wrong, whatever it is."""

import collections
import copy
import dataclasses
import functools
import operator
import types

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

import fxopt
from fxopt.testing import Oracle, assert_equivalent, assert_round_trip, compare, leaves, randomise
from tests.modules import module

X = torch.randn(3, 4)


class Scaled(nn.Module):
    def __init__(self, layer, error=0.0):
        super().__init__()
        self.layer, self.error = layer, error

    def forward(self, x):
        return self.layer(x) * (1 + self.error)


def test_equivalence_measures():
    layer = randomise(nn.Linear(4, 3))
    result = assert_equivalent(layer, Scaled(layer), [X])
    assert result.float64.tensors == 1
    assert result.float64.values == 9
    assert result.float64.max_abs == 0
    assert 0 < result.own.max_abs < 1e-5
    assert result.own == result.baseline


@pytest.mark.parametrize("error", [1e-8, 1e-3, float("nan")])
def test_a_wrong_candidate_fails_in_float64(error):
    layer = nn.Linear(4, 3)
    with pytest.raises(AssertionError, match="in float64, output (differs|is not NaN)"):
        assert_equivalent(layer, Scaled(layer, error), [X])


def test_a_worse_candidate_fails_in_its_own_dtype():
    layer = nn.Linear(4, 3)

    class Coarse(Scaled):
        def forward(self, x):
            out = super().forward(x)
            return out if out.dtype == torch.float64 else out.bfloat16().float()

    with pytest.raises(AssertionError, match="in its own dtype"):
        assert_equivalent(layer, Coarse(layer), [X])


@pytest.mark.parametrize(
    ("inputs", "error"),
    [
        ((torch.ones(1, 4),), r"args must be a tuple of example inputs, not a tensor: write `\(x,\)`"),
        (({"input": torch.ones(1, 4)},), r"not a dict: write `kwargs=\{...\}`"),
        (((), (torch.ones(1, 4),)), "kwargs must be a dict of example inputs by name, not a tuple"),
    ],
)
def test_inputs_of_another_kind_are_refused(inputs, error):
    """A tensor would be taken row by row: with one row, as an input without its batch."""
    layer = nn.Linear(4, 4)
    for judge in (
        lambda *given: assert_equivalent(layer, layer, *given),
        lambda *given: Oracle(layer, *given),
    ):
        with pytest.raises(TypeError, match=error):
            judge(*inputs)


def test_a_function_is_no_candidate():
    layer = nn.Linear(4, 4)
    with pytest.raises(TypeError, match=r"a function is no torch.nn.Module"):
        assert_equivalent(layer, lambda x: layer(x), (torch.ones(1, 4),))


def test_given_float64_modules_are_used():
    layer = nn.Linear(4, 3)
    wide = copy.deepcopy(layer).double()
    with pytest.raises(AssertionError, match="in float64"):
        assert_equivalent(layer, layer, [X], float64=(wide, Scaled(wide, 1e-6)))


def test_inputs_and_random_numbers_are_the_same_for_both():
    writes, x = module(lambda m, x: x.add_(torch.rand(4))), X.clone()
    assert assert_equivalent(writes, copy.deepcopy(writes), kwargs={"x": x}).own.max_abs < 1e-6
    assert torch.equal(x, X)


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    states: tuple
    note: str = "same"


class Cache:
    def __init__(self, *tensors):
        self.layers = list(tensors)


def test_every_tensor_is_compared():
    one, two = torch.ones(2), torch.ones(3)
    nested = {"a": one, "b": [one, (two, None)], "c": Output(one, (two,)), "d": Cache(one)}
    assert compare(nested, copy.deepcopy(nested)).tensors == 6
    for path in range(6):
        wrong = copy.deepcopy(nested)
        tensors = [leaf for _, leaf in leaves(wrong) if isinstance(leaf, torch.Tensor)]
        tensors[path] += 1
        if path != 0:
            assert compare(nested, wrong).max_abs == 1
    wrong = copy.deepcopy(nested)
    wrong["c"].logits = one + 2
    assert compare(nested, wrong).where == "output.c.logits"


def test_model_outputs_are_walked_by_value():
    assert compare(BaseModelOutput(torch.ones(2)), BaseModelOutput(torch.zeros(2))).max_abs == 1


@pytest.mark.parametrize("empty", [None, {}, (), {"a": 1}, torch.ones(0)])
def test_nothing_to_compare_fails(empty):
    with pytest.raises(AssertionError, match="nothing was compared"):
        compare(empty, empty)


@pytest.mark.parametrize(
    ("left", "right", "error"),
    [
        ((X,), (X, X), "structure"),
        ({"a": X}, {"b": X}, "structure"),
        (X, X[:2], r"expected torch.float32 \[3, 4\], got torch.float32 \[2, 4\]"),
        (X, X.double(), "got torch.float64"),
        ((X, 1), (X, 2), "expected 1, got 2"),
        ((X, None), (X, X), "expected None"),
        ((X, float("nan")), (X, 1.0), "expected nan, got 1"),
        ([X], (X,), "expected a list, got a tuple"),
        ({"a": X}, collections.OrderedDict(a=X), "expected a dict, got a OrderedDict"),
        ({"logits": X, "states": ()}, Output(X, ()), "expected a dict, got a Output"),
        (
            BaseModelOutput(last_hidden_state=X),
            {"last_hidden_state": X},
            "expected a BaseModelOutput, got a dict",
        ),
        ({1: X, "1": X + 1}, {"1": X + 1, 1: X}, "structure"),
        ({1: X}, {"1": X}, "structure"),
        ([X], {0: X}, "expected a list, got a dict"),
        ([X, []], [X, ()], "expected a list, got a tuple"),
        ({"a": X, "b": {}}, {"a": X, "b": None}, "expected a dict, got None"),
    ],
)
def test_other_differences_fail(left, right, error):
    compare(left, copy.deepcopy(left))
    with pytest.raises(AssertionError, match=error):
        compare(left, right)


INF, NAN = float("inf"), float("nan")
CONJUGATES = torch.tensor([1 + 2j, 3 - 1j]).conj()


@pytest.mark.parametrize(
    ("left", "right", "max_abs"),
    [
        (torch.tensor([INF, NAN, 1.0]), torch.tensor([INF, NAN, 1.0]), 0),
        (torch.tensor([1.0, NAN]), torch.tensor([1.0, 1.0]), INF),
        (torch.tensor([INF]), torch.tensor([-INF]), INF),
        (torch.zeros(2), torch.ones(2), 1),
        (torch.tensor([True]), torch.tensor([False]), 1),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 5j]), 3),
        (CONJUGATES, CONJUGATES.resolve_conj(), 0),
        (CONJUGATES, CONJUGATES.conj(), 4),
        ({1: X, "1": X}, {1: X + 1, "1": X}, 1),  # two keys that read alike
        ({1: X, "1": X}, {1: X, "1": X + 1}, 1),
    ],
)
def test_special_values(left, right, max_abs):
    assert compare(left, right).max_abs == pytest.approx(max_abs)


def test_a_difference_from_zero_is_infinite():
    assert compare(torch.zeros(2), torch.ones(2)).max_rel == INF


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.a.table = torch.ones(2)  # a tensor that is neither parameter nor buffer
        self.register_buffer("kept", torch.ones(1))
        self.register_buffer("lost", torch.ones(1), persistent=False)

    def forward(self, x):
        return self.norm(self.b(self.a(x))) + self.kept + self.lost


def retarget(gm):
    next(n for n in gm.graph.nodes if n.target == "a").target = "b"


def persist(gm):
    gm._non_persistent_buffers_set.clear()


def reorder(gm):
    gm._modules["a"] = gm._modules.pop("a")


def transpose(gm):
    gm.a.weight = nn.Parameter(gm.a.weight.detach().t().contiguous().t())


def hook(module, *args):
    pass


class OtherLinear(nn.Linear):
    pass


OtherLinear.__qualname__ = "Linear"


def add(one, other):
    return one - other


add.__module__ = operator.add.__module__  # the text of a node with this function is that of `operator.add`


def first(gm):
    return next(iter(gm.graph.nodes))


def traced():
    """A graph whose layer has attributes of all kinds, with another graph in it."""
    gm = fxopt.trace(Model().eval(), (X,))  # a deepcopy of a plain GraphModule loses non-persistence
    gm.inner = torch.fx.symbolic_trace(nn.Sequential(nn.ReLU()))
    gm.a.activation, gm.a.config = torch.relu, types.SimpleNamespace(size=4)
    gm.b.register_forward_hook(functools.partial(hook, 1))
    return gm


DAMAGES = {
    "a._forward_hooks.* differs": lambda gm: gm.a.register_forward_hook(hook),
    "norm._backward_hooks.* differs": lambda gm: gm.norm.register_full_backward_hook(hook),
    "a.in_features differs": lambda gm: setattr(gm.a, "in_features", 5),
    "was_fused differs": lambda gm: setattr(gm, "was_fused", True),
    "norm.table differs": lambda gm: setattr(gm.norm, "table", {"a": [torch.ones(1)]}),
    "a.table differs": lambda gm: setattr(gm.a, "table", torch.zeros(2)),
    "a._parameters.weight differs": transpose,
    "nodes: ": retarget,
    "nodes:": lambda gm: setattr(first(gm), "name", "renamed"),
    "code: ": lambda gm: (gm.graph.call_function(torch.relu, (first(gm),)), gm.recompile()),
    "norm.training differs": lambda gm: gm.norm.train(),
    "_modules.extra differs": lambda gm: setattr(gm, "extra", nn.ReLU()),
    "the order of _modules differs": reorder,
    "a._parameters.weight differs$": lambda gm: gm.a.weight.data[0, 0].mul_(1 + 1e-6),
    "norm._buffers.running_mean differs": lambda gm: gm.norm.running_mean.add_(1),
    "a._parameters.weight differs\n": lambda gm: gm.a.requires_grad_(False),
    "a._parameters.bias differs$": lambda gm: gm.a.double(),
    "a._parameters.bias differs": lambda gm: setattr(gm.a, "bias", None),
    "ties: ": lambda gm: setattr(gm.a, "weight", gm.b.weight),
    "_non_persistent_buffers_set differs": persist,
    "a.activation differs": lambda gm: setattr(gm.a, "activation", hook),
    "a.config differs": lambda gm: setattr(gm.a, "config", types.SimpleNamespace(size=5)),
    "a.class differs": lambda gm: setattr(gm.a, "__class__", OtherLinear),
    "targets: ": lambda gm: setattr(
        next(n for n in gm.graph.nodes if n.target is operator.add), "target", add
    ),
    "marks: ": lambda gm: first(gm).meta.update(fxopt_marks=("P",)),
    "inner: nodes: ": lambda gm: setattr(first(gm.inner), "name", "renamed"),
    "inner: marks: ": lambda gm: first(gm.inner).meta.update(fxopt_marks=("P",)),
    "a._buffers.left differs": lambda gm: gm.a.register_buffer("left", None),
    "_modules.left differs": lambda gm: gm.register_module("left", None),
    "b._forward_hooks.* differs": lambda gm: gm.b._forward_hooks.update(
        dict.fromkeys(gm.b._forward_hooks, functools.partial(hook, 2))
    ),
    **{
        f"metadata: .*'{key}'": lambda gm, key=key: first(gm).meta.update({key: X.half()})
        for key in ("val", "example_value", "tensor_meta")
    },
}


def test_a_scripted_child_that_has_run_is_the_same():
    layers = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Tanh())))
    run = fxopt.trace(layers, (torch.randn(2, 4),))
    before = copy.deepcopy(run)
    run(torch.randn(2, 4))
    assert assert_round_trip(before, run) == 40


@pytest.mark.parametrize("message", DAMAGES)
def test_a_round_trip_that_is_not_exact_fails(message):
    before = traced()
    after = copy.deepcopy(before)
    assert assert_round_trip(before, after) == 59
    DAMAGES[message](after)
    with pytest.raises(AssertionError, match=f"\n  {message}"):
        assert_round_trip(before, after)


def test_randomise_changes_every_statistic_scale_and_bias():
    model, fresh = randomise(Model(), seed=3), Model()
    for name in ("norm.weight", "norm.bias", "norm.running_mean", "norm.running_var", "a.bias"):
        assert not torch.equal(model.state_dict()[name], fresh.state_dict()[name]), name
    assert (model.norm.running_var > 0).all()
    again, other = randomise(Model(), seed=3), randomise(Model(), seed=4)
    assert torch.equal(again.norm.bias, model.norm.bias)
    assert not torch.equal(other.norm.bias, model.norm.bias)


def test_randomise_is_the_same_in_every_dtype():
    narrow, wide = randomise(nn.BatchNorm1d(3)), randomise(nn.BatchNorm1d(3).double())
    assert torch.equal(narrow.weight, wide.weight.float())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_outputs_that_are_finite_nowhere_prove_nothing(value):
    x = torch.ones(2, 3)
    with pytest.raises(AssertionError, match="NaN or infinite everywhere, so nothing was compared"):
        assert_equivalent(module(lambda m, x: x * value), module(lambda m, x: 2 * x * value), [x])


def test_a_graph_with_dtype_constants_is_compared_with_another_one_in_float64():
    x = torch.randn(2, 4)
    model = module(
        lambda m, x: m.linear(x).clamp(min=torch.finfo(m.linear.weight.dtype).min), linear=nn.Linear(4, 4)
    )
    narrow, wide = fxopt.trace(model, (x,)), fxopt.trace(copy.deepcopy(model).double(), (x.double(),))
    with pytest.raises(fxopt.GuardError, match=r"Made: .*pass `float64=\(before, after\)`"):
        assert_equivalent(narrow, copy.deepcopy(narrow), (x,))
    pair = (wide, copy.deepcopy(wide))
    assert assert_equivalent(narrow, copy.deepcopy(narrow), (x,), float64=pair).grade.passes
