"""The oracle calls a module on more than one input: what is right on the example alone is wrong."""

import copy
import itertools
import math
import operator
import random

import pytest
import torch
from torch import nn

import fxopt
from fxopt import FuseBatchNorm2dInConv2d, FuseBiasInLinear, MergeLinears, compose
from fxopt.testing import Grade, Oracle, assert_equivalent, compare, randomise, ulps
from tests.modules import module

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def layer():
    return randomise(nn.Linear(4, 3))


class Wrapped(nn.Module):
    """A candidate: a layer, and something done to its output."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.after(x, self.layer(x))


class AddsNoise(Wrapped):
    def after(self, x, out):
        return out + random.random()


def test_sizes_that_a_graph_leaves_free_are_varied():
    model = module(lambda m, x, mask: (x * mask[..., None]).sum(1) / x.shape[1])
    inputs = {"x": torch.randn(2, 16, 4), "mask": torch.ones(2, 16)}
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    free = {"x": {0: batch, 1: length}, "mask": {0: batch, 1: length}}
    traced = fxopt.trace(model, kwargs=inputs, dynamic_shapes=free)
    oracle = Oracle(model, kwargs=inputs, captured=traced)
    assert oracle.probes == ("the given inputs", "other values", "NaN and infinities", "other sizes")
    assert oracle.judge(traced).grade is Grade.BIT_EXACT
    (division,) = traced.graph.find_nodes(op="call_function", target=operator.truediv)
    division.args = (division.args[0], 16)
    traced.recompile()
    assert "with other sizes" in oracle.judge(traced).reason
    fixed = fxopt.trace(model, kwargs=inputs)
    assert "other sizes" not in Oracle(model, kwargs=inputs, captured=fixed).probes


def test_a_graph_is_not_asked_for_what_it_refuses():
    branch = module(lambda m, x: x * 2 if x.sum() > 0 else x * 3)
    x = X.abs()
    traced = fxopt.trace(branch, (x,), specialize=True)
    oracle = Oracle(branch, [x], captured=copy.deepcopy(traced))
    assert oracle.judge(traced).grade is Grade.BIT_EXACT
    assert "other values" in Oracle(branch, [x]).probes


class Counts(nn.Module):
    """Writes into its buffers, as a batch normalisation does in training."""

    def __init__(self, step=1):
        super().__init__()
        self.step = step
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("other", torch.zeros(1))

    def forward(self, x):
        if self.step:
            self.calls += self.step
        return x + 1


def test_buffers_are_compared_after_the_calls_and_put_back():
    model = Counts()
    assert_equivalent(model, Counts(), [X])
    assert model.calls == 0
    with pytest.raises(AssertionError, match=r"buffer\.calls differs by 1 "):
        assert_equivalent(model, Counts(2), [X])
    with pytest.raises(AssertionError, match="does not write the buffer calls"):
        assert_equivalent(model, Counts(0), [X])
    with pytest.raises(AssertionError, match="writes the buffer calls, unlike"):
        assert_equivalent(Counts(0), model, [X])


def test_a_model_that_does_not_repeat_itself_is_unstable():
    model = AddsNoise(layer())
    verdict = Oracle(model, [X]).judge(model)
    assert verdict.grade is Grade.UNSTABLE
    with pytest.raises(AssertionError, match="the original does not repeat itself"):
        assert_equivalent(model, model, [X])


def test_grades():
    model = layer()
    assert str(Oracle(model, [X]).judge(Steps(model, 0))) == "bit-exact"
    assert str(Oracle(model, [X]).judge(Steps(model, 2))).startswith("within 2 ULP")
    assert Oracle(model, [X], floor=100).judge(Steps(model, 50)).grade is Grade.ULP
    assert Oracle(model, [X]).judge(Steps(model, 50)).grade is Grade.WRONG
    assert Oracle(model, [X]).judge(Steps(model, 50), tolerance=1e-4).grade is Grade.TOLERANCE
    assert Oracle(model, [X]).judge(Steps(model, 50), tolerance=1e-9).grade is Grade.WRONG
    assert Oracle(model, [X]).judge(Steps(model, 0), tolerance=1e-4).grade is Grade.BIT_EXACT


class Steps(Wrapped):
    """So many units in the last place off in float32, and right in float64."""

    def __init__(self, layer, steps):
        super().__init__(layer)
        self.steps = steps

    def after(self, x, out):
        return out if out.dtype == torch.float64 else (out.view(torch.int32) + self.steps).view(torch.float32)


def test_in_its_own_dtype_an_output_may_be_twice_as_far_off_and_no_farther():
    class Off(nn.Module):
        """So far off in float32, at one place or the other."""

        def __init__(self, place, error):
            super().__init__()
            self.place, self.error = place, error

        def forward(self, x):
            out = torch.ones(3, dtype=x.dtype)
            if x.dtype == torch.float32:
                out[self.place] += self.error
            return out

    oracle = Oracle(Off(0, 1e-4), [X])
    for factor, grade in [(1.0, Grade.ACCURATE), (1.9, Grade.ACCURATE), (2.2, Grade.WRONG)]:
        assert oracle.judge(Off(1, factor * 1e-4)).grade is grade


def test_where_the_original_overflows_the_candidate_overflows_at_the_same_places():
    class Overflows(Steps):
        def after(self, x, out):
            return super().after(x, out) if out.dtype == torch.float64 else out / 0.0

    model = layer()
    assert Oracle(model, [X]).judge(Overflows(model, 0)).grade is Grade.WRONG
    oracle = Oracle(Overflows(model, 0), [X])
    assert oracle.unproved == "output"
    assert oracle.judge(Overflows(model, 0)).grade is Grade.BIT_EXACT
    assert oracle.judge(model).grade is Grade.WRONG


@pytest.mark.parametrize(
    ("dtype", "one", "other", "steps"),
    [
        (torch.float32, [1.0, 0.0, math.nan], [1.0, 0.0, math.nan], 0),
        (torch.float32, [1.0, 0.0, math.nan], [1.0, -0.0, math.nan], 1),
        (torch.float32, [1.0, math.nan], [1.0, 1.0], math.inf),
        (torch.float32, [1e-45], [-1e-45], 2),
        (torch.float64, [1.0], [1 + 2**-50], 4),
        (torch.bfloat16, [1.0], [1 + 2**-6], 2),
        (torch.float64, [-1e308], [1e308], 18428729675200069632),
        (torch.int64, [1], [2], math.inf),
    ],
)
def test_units_in_the_last_place(dtype, one, other, steps):
    assert ulps(*(torch.tensor(each, dtype=dtype) for each in (one, other))) == pytest.approx(steps, 0.01)


def test_the_fold_of_a_batch_normalisation_is_judged_in_float32():
    torch.manual_seed(0)
    model = randomise(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())).eval()
    image = torch.randn(2, 3, 8, 8)
    traced, wide = fxopt.trace(model, (image,)), fxopt.trace(copy.deepcopy(model).double(), (image.double(),))
    folded = FuseBatchNorm2dInConv2d()(copy.deepcopy(traced))
    verdict = assert_equivalent(traced, folded, [image])
    assert verdict.grade is Grade.ACCURATE
    assert "weights were computed in float32" in verdict.reason
    assert "apply the pass to the model in float64" in verdict.reason
    oracle = Oracle(traced, [image], float64=wide)
    assert not oracle.judge(folded, FuseBatchNorm2dInConv2d()(copy.deepcopy(wide))).reason
    with torch.no_grad():
        folded.get_submodule("0").weight.mul_(1 + 1e-5)  # such as an epsilon that was left out
    with pytest.raises(AssertionError, match="in float64, output differs"):
        assert_equivalent(model, folded, [image])


def test_strides_are_compared_where_they_are_promised():
    image = torch.randn(2, 3, 4, 4)
    last = image.contiguous(memory_format=torch.channels_last)
    assert compare(image, last).max_abs == 0
    with pytest.raises(AssertionError, match="expected the strides"):
        compare(image, last, strides=True)
    compare(image[:1, :1], last[:1, :1].clone(), strides=True)


def test_strides_of_views_count_and_those_of_a_model_that_varies_them_do_not():
    calls = itertools.count()
    view = module(lambda m, x: (x + 1).t())
    copies = module(lambda m, x: (x + 1).t().contiguous())
    varies = module(lambda m, x: (x + 1).t().contiguous() if next(calls) % 3 == 0 else (x + 1).t())
    assert "output: expected the strides" in Oracle(view, [X], strides=True).judge(copies).reason
    assert Oracle(view, [X], strides=True).judge(view).grade is Grade.BIT_EXACT
    assert Oracle(view, [X]).judge(copies).grade is Grade.BIT_EXACT
    assert Oracle(varies, [X], strides=True).judge(copies).grade is Grade.BIT_EXACT


@pytest.mark.parametrize("fill", [torch.finfo(torch.float32).min, -1e30, -1e9])
def test_the_filling_of_masked_places_hides_no_error(fill):
    def masked(off=0.0):
        return module(lambda m, x, mask: (m.layer(x) + off).masked_fill(mask == 0, fill), layer=layer)

    layer, mask = nn.Linear(4, 6), torch.ones(3, 6)
    mask[1, 4:] = 0
    oracle = Oracle(masked(), [torch.randn(3, 4), mask])
    assert oracle.judge(masked()).grade is Grade.BIT_EXACT
    assert oracle.judge(masked(1e-7)).grade is Grade.WRONG
    verdict = oracle.judge(masked(1e-12))
    assert verdict.grade.passes, verdict


class Branches(nn.Module):
    """Adds what two branches compute, each of which needs gradients."""

    def __init__(self, cut: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.cut = nn.Linear(3, 3), nn.Linear(3, 3), cut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        return (first.detach() if self.cut else first) + self.second(x)


class Detached(Branches):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).detach()


@pytest.mark.parametrize(
    ("candidate", "reason"),
    [
        (Branches(), ""),
        (Branches(cut=True), "in float64, the gradient of floating input 0 is"),
        (Detached(), "output gives no gradients, unlike that of the original"),
    ],
)
def test_gradients_that_are_cut_are_seen_in_training(candidate: nn.Module, reason: str) -> None:
    model = Branches()
    candidate.load_state_dict(model.state_dict())
    verdict = Oracle(model, [torch.randn(4, 3)]).judge(candidate)
    assert verdict.grade is (Grade.WRONG if reason else Grade.BIT_EXACT)
    assert reason in verdict.reason
    assert all(parameter.grad is None for parameter in (*model.parameters(), *candidate.parameters()))
    assert Oracle(model.eval(), [torch.randn(4, 3)]).judge(candidate).grade is Grade.BIT_EXACT


def test_infinite_gradients_are_alike() -> None:
    root = module(lambda m, x: x.sqrt())
    oracle = Oracle(root, [torch.tensor([0.0, 4.0])], gradients=True)
    assert oracle.judge(nn.Sequential(root)).grade is Grade.BIT_EXACT


def test_buffers_hold_no_graph_after_gradients_were_compared() -> None:
    """The module writes an average into a buffer, and does not say that the average needs no gradients."""
    average = nn.Buffer(torch.zeros(3, dtype=torch.float64))
    model = module(lambda m, x: x - m.average.mul_(0.9).add_(x.mean(0), alpha=0.1), average=average)
    candidate = copy.deepcopy(model)
    oracle = Oracle(model, [torch.randn(4, 3, dtype=torch.float64)], float64=model, gradients=True)
    assert oracle.judge(candidate, candidate).grade is Grade.BIT_EXACT
    for each in (model, candidate):
        assert not each.average.requires_grad
        assert not each.average.any()


def test_a_graph_for_calls_without_gradients_is_judged_by_its_outputs() -> None:
    x = torch.randn(2)
    by_mode = module(lambda m, x: {"a": x * 2} if torch.is_grad_enabled() else {"a": x * 2, "b": x})
    with torch.no_grad():
        traced = fxopt.trace(by_mode, (x,))
    assert Oracle(by_mode, [x], gradients=True).judge(traced).grade is Grade.BIT_EXACT


def test_a_module_without_weights_is_its_own_in_float64() -> None:
    root = module(lambda m, x: x.sqrt())
    oracle = Oracle(root, [torch.rand(4)], float64=root)
    assert oracle.expected[0].output.dtype is torch.float32
    assert oracle.judge(root, root).grade is Grade.BIT_EXACT


def test_a_lower_precision_may_keep_written_buffers_in_its_dtype():
    model = randomise(nn.Sequential(nn.BatchNorm1d(3))).train()
    traced = fxopt.trace(model, (x := torch.randn(4, 3),))
    oracle = Oracle(traced, (x,))
    lower = fxopt.ChangePrecision()(copy.deepcopy(traced))
    assert lower.get_buffer("0.running_mean").dtype == torch.bfloat16
    assert oracle.fault(oracle.observe(lower)) == ""
    narrow = copy.deepcopy(traced)
    narrow.get_submodule("0").num_batches_tracked = torch.tensor(0, dtype=torch.int32)
    assert oracle.fault(oracle.observe(narrow)) == ""
    assert "num_batches_tracked" in str(oracle.judge(narrow, copy.deepcopy(narrow).double()))


class Spectrum(nn.Module):
    """Complex weights, complex inputs, and a layer of floating numbers behind them."""

    def __init__(self):
        super().__init__()
        self.mix, self.other = (nn.Linear(4, 3, dtype=torch.complex64) for _ in range(2))
        self.out = layer()

    def forward(self, x):
        return self.other(x), self.out(torch.cat([self.mix(x).abs(), x.real[:, :1]], 1))


@pytest.mark.parametrize(
    "trace", [lambda model, x: torch.fx.symbolic_trace(model), lambda m, x: fxopt.trace(m, (x,))]
)
def test_complex_numbers_are_widened_as_floating_ones_are(trace):
    model, x = Spectrum(), torch.complex(X, -X)
    rewritten = compose(MergeLinears(), FuseBiasInLinear())(trace(model, x))
    assert assert_equivalent(model, rewritten, [x]).float64.max_rel < 1e-12
    with torch.no_grad():
        next(weight for weight in rewritten.parameters() if weight.is_complex())[0, 0] *= 1 + 1e-5j
    with pytest.raises(AssertionError, match="in float64"):
        assert_equivalent(model, rewritten, [x])


def test_a_buffer_of_two_layers_is_one_in_float64() -> None:
    first, second = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    second._buffers |= {name: first._buffers[name] for name in ("running_mean", "running_var")}
    norms = nn.Sequential(first, second)
    assert Oracle(norms, [X]).judge(copy.deepcopy(norms)).grade is Grade.BIT_EXACT


def test_graphs_print_no_errors_that_probes_are_to_raise(capsys):
    graph = fxopt.trace(module(lambda m, x: x.view(3, -1) * 2), (torch.randn(6, 4),))
    assert assert_equivalent(graph, copy.deepcopy(graph), (torch.randn(6, 4),)).grade.passes
    assert "Call using an FX-traced Module" not in capsys.readouterr().err


def test_an_output_may_name_the_dtype_in_which_it_was_computed():
    layer = randomise(nn.Linear(4, 4))
    reference = module(lambda m, x: (m.layer(x), m.layer(x).dtype), layer=layer)
    assert assert_equivalent(reference, copy.deepcopy(reference), (X,)).grade.passes
    with pytest.raises(AssertionError, match="dtype|float"):
        assert_equivalent(reference, module(lambda m, x: (m.layer(x), torch.float16), layer=layer), (X,))
