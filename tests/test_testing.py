"""The oracle itself: it must fail when something is wrong, whatever it is."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

import fxopt
from fxopt.testing import Oracle, assert_equivalent, assert_round_trip, compare, leaves, randomise

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


def test_a_wrong_dtype_fails():
    layer = nn.Linear(4, 3)

    class Wide(Scaled):
        def forward(self, x):
            return super().forward(x).double()

    with pytest.raises(AssertionError, match=r"expected torch\.float32"):
        assert_equivalent(layer, Wide(layer), [X])


def test_given_float64_modules_are_used():
    layer = nn.Linear(4, 3)
    wide = copy.deepcopy(layer).double()
    with pytest.raises(AssertionError, match="in float64"):
        assert_equivalent(layer, layer, [X], float64=(wide, Scaled(wide, 1e-6)))


def test_inputs_and_random_numbers_are_the_same_for_both():
    class Writes(nn.Module):
        def forward(self, x):
            return x.add_(torch.rand(4))

    x = X.clone()
    assert assert_equivalent(Writes(), Writes(), kwargs={"x": x}).own.max_abs < 1e-6
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
    from transformers import modeling_outputs as outputs

    one = outputs.BaseModelOutput(last_hidden_state=torch.ones(2))
    two = outputs.BaseModelOutput(last_hidden_state=torch.zeros(2))
    assert compare(one, two).max_abs == 1


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
    ],
)
def test_other_differences_fail(left, right, error):
    with pytest.raises(AssertionError, match=error):
        compare(left, right)


def test_conjugates_that_are_not_computed_yet_are_compared():
    z = torch.tensor([1 + 2j, 3 - 1j])
    assert compare(z.conj(), z.conj()).max_abs == 0
    assert compare(z.conj(), z.conj().resolve_conj()).max_abs == 0
    assert compare(z.conj(), z).max_abs == 4


def test_special_values():
    inf, nan = float("inf"), float("nan")
    assert compare(torch.tensor([inf, nan, 1.0]), torch.tensor([inf, nan, 1.0])).max_abs == 0
    assert compare(torch.tensor([1.0, nan]), torch.tensor([1.0, 1.0])).max_abs == inf
    assert compare(torch.tensor([inf]), torch.tensor([-inf])).max_rel == inf
    assert compare(torch.zeros(2), torch.ones(2)).max_rel == inf
    assert compare(torch.tensor([True]), torch.tensor([False])).max_abs == 1
    assert compare(torch.tensor([1 + 2j]), torch.tensor([1 + 5j])).max_abs == 3


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


def hook(module, args, output):
    pass


DAMAGES = {
    "a._forward_hooks.* differs": lambda gm: gm.a.register_forward_hook(hook),
    "norm._backward_hooks.* differs": lambda gm: gm.norm.register_full_backward_hook(hook),
    "a.in_features differs": lambda gm: setattr(gm.a, "in_features", 5),
    "was_fused differs": lambda gm: setattr(gm, "was_fused", True),
    "norm.table differs": lambda gm: setattr(gm.norm, "table", {"a": [torch.ones(1)]}),
    "a.table differs": lambda gm: setattr(gm.a, "table", torch.zeros(2)),
    "a._parameters.weight differs": transpose,
    "nodes: ": retarget,
    "nodes:": lambda gm: setattr(next(iter(gm.graph.nodes)), "name", "renamed"),
    "code: ": lambda gm: (gm.graph.call_function(torch.relu, (next(iter(gm.graph.nodes)),)), gm.recompile()),
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
}


def test_a_scripted_child_that_has_run_is_the_same():
    layers = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Tanh())))
    traced = fxopt.trace(layers, (torch.randn(2, 4),))
    before = copy.deepcopy(traced)
    traced(torch.randn(2, 4))
    assert assert_round_trip(before, traced) == 40


@pytest.mark.parametrize("message", DAMAGES)
def test_a_round_trip_that_is_not_exact_fails(message):
    before = fxopt.trace(Model().eval(), (X,))  # a deepcopy of a plain GraphModule loses non-persistence
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
    class Fills(nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.factor = factor

        def forward(self, x):
            return x * self.factor * value

    x = torch.ones(2, 3)
    with pytest.raises(AssertionError, match="NaN or infinite everywhere, so nothing was compared"):
        assert_equivalent(Fills(1.0), Fills(2.0), [x])


class ReadsItsDtype(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).clamp(min=torch.finfo(self.linear.weight.dtype).min)


def test_a_graph_with_dtype_constants_is_compared_with_another_one_in_float64():
    x, model = torch.randn(2, 4), ReadsItsDtype().eval()
    narrow, wide = fxopt.trace(model, (x,)), fxopt.trace(copy.deepcopy(model).double(), (x.double(),))
    with pytest.raises(fxopt.GuardError, match=r"ReadsItsDtype: .*pass `float64=\(before, after\)`"):
        assert_equivalent(narrow, copy.deepcopy(narrow), (x,))
    pair = (wide, copy.deepcopy(wide))
    assert assert_equivalent(narrow, copy.deepcopy(narrow), (x,), float64=pair).grade.passes
