"""ChangePrecision: what runs in which dtype, what is kept, and the exact way back."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxopt
from fxopt import ChangePrecision, PassError, undo
from fxopt.passes.change_precision import saturate
from fxopt.testing import assert_round_trip, compare, randomise
from tests.before_after import assert_untouched, fxopt_trace, refused
from tests.modules import module
from tests.passes.precision import HALF, Use, X, changed, layers


@pytest.mark.parametrize("dtype", HALF)
def test_layers_run_in_the_lower_precision(dtype):
    after = changed(layers(), X, dtype=dtype)
    assert {p.dtype for p in after.parameters()} == {dtype}
    seen = []
    after.get_submodule("3").register_forward_hook(
        lambda m, args, out: seen.append((args[0].dtype, out.dtype))
    )
    after(X)
    assert seen == [(dtype, dtype)]


@pytest.mark.parametrize("keep", [("2",), ("[2]",), (nn.LayerNorm,), ["2*"]])
def test_kept_modules(keep):
    after = changed(layers(), X, keep_float32=keep)
    assert after.get_submodule("2").weight.dtype == torch.float32
    assert after.get_submodule("3").weight.dtype == torch.bfloat16


def test_a_name_keeps_what_is_below_it():
    model = nn.Sequential(layers(), nn.Linear(3, 2))
    after = changed(model, X, keep_float32=("0",))
    dtypes = [p.dtype for p in after.parameters()]
    assert dtypes == [torch.float32] * 6 + [torch.bfloat16] * 2


def test_a_name_that_matches_nothing_is_an_error():
    traced = fxopt_trace(layers(), [X])
    with pytest.raises(PassError, match="keep_float32 names nowhere"):
        ChangePrecision(keep_float32=("nowhere",))(traced)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"dtype": torch.float32}, ValueError),
        ({"dtype": "bfloat16"}, ValueError),
        ({"keep_float32": "0"}, TypeError),
    ],
)
def test_bad_options(options, error):
    with pytest.raises(error, match="give"):
        ChangePrecision(**options)


def test_saturate_keeps_finite_numbers_finite():
    values = torch.tensor([1e30, -1e30, float("inf"), float("nan"), 1.0])
    low = saturate(values, torch.float16)
    assert low[:3].tolist() == [65504.0, -65504.0, float("inf")]
    assert low[3].isnan()
    assert torch.finfo(torch.float32).min == -torch.finfo(torch.float32).max
    assert saturate(torch.tensor(torch.finfo(torch.float32).min), torch.bfloat16).isfinite()


def test_the_model_is_not_changed():
    model = randomise(layers()).eval()
    untouched = copy.deepcopy(model)
    traced = fxopt_trace(model, [X])
    ChangePrecision()(ChangePrecision()(traced), reverse=True).get_parameter("0.weight").data.zero_()
    assert_untouched(untouched, copy.deepcopy(untouched))
    assert model[0].weight.dtype == torch.float32


class Recurrent(nn.Module):
    """Layers with several, nested outputs."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 6, 2, batch_first=True)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)

    def forward(self, x):
        y, (hidden, cell) = self.lstm(x)
        y, weights = self.attention(y, y, y)
        return self.encoder(y), hidden + cell, weights


def test_layers_with_nested_outputs():
    changed(Recurrent(), torch.randn(2, 5, 4))


def test_ties_stay_ties():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    after = changed(model, X)
    assert after.get_parameter("0.weight") is after.get_parameter("1.weight")


def test_one_module_called_twice_under_two_names():
    linear = nn.Linear(4, 4)
    after = changed(nn.Sequential(linear, nn.ReLU(), linear), X)
    assert after.get_submodule("0") is after.get_submodule("2")


def test_a_tie_to_a_kept_module_is_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    refused(ChangePrecision(keep_float32=("1",)), model, X, reason="stays in float32", trace=fxopt_trace)


def test_training_in_between_is_kept():
    model = randomise(layers()).eval()
    after = ChangePrecision()(fxopt_trace(model, [X]))
    with torch.no_grad():
        after.get_parameter("0.weight").mul_(2)
    restored = ChangePrecision()(after, reverse=True)
    low = model[0].weight.detach().bfloat16()
    assert torch.equal(restored.get_parameter("0.weight"), (low * 2).float())
    assert torch.equal(restored.get_parameter("0.bias"), model[0].bias)


def test_flags_set_in_between_are_kept():
    after = ChangePrecision()(fxopt_trace(layers().eval(), [X]))
    after.get_submodule("1").train()
    after.get_parameter("0.weight").requires_grad_(False)
    restored = ChangePrecision()(after, reverse=True)
    assert not restored.get_parameter("0.weight").requires_grad
    assert restored.get_parameter("0.bias").requires_grad


def functional(m, x):
    return F.linear(m.other(x), m.inner.weight, m.inner.bias)


@pytest.mark.parametrize("trace", [None, "foreign"])
def test_a_layer_that_is_only_read_is_not_written(trace):
    model = randomise(Use(functional, inner=nn.Linear(4, 4), other=nn.Linear(4, 4))).eval()
    untouched = copy.deepcopy(model)
    traced = fxopt_trace(model, [X])
    if trace:  # as fx shares a layer with the model
        traced.inner = model.inner
    before = copy.deepcopy(traced)
    after = ChangePrecision()(traced)
    assert after.inner.weight.dtype == after.inner.bias.dtype == torch.bfloat16
    assert_untouched(untouched, model)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert 0 < compare(model(X), after(X)).max_rel < 0.05
    assert_round_trip(before, ChangePrecision()(after, reverse=True))
    assert_untouched(untouched, model)


def test_a_buffer_of_a_layer_that_changes_is_read_as_before():
    def forward(self, x):
        return self.norm(x) @ self.norm.running_var.diag(), self.norm.running_mean

    before = fxopt.trace(randomise(module(forward, norm=nn.BatchNorm1d(4))), (X,))
    after = ChangePrecision()(copy.deepcopy(before))
    for found, wanted in zip(after(X), before(X), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.05)
    assert_round_trip(before, undo(after))


def test_a_read_of_a_kept_layer_stays_in_float32():
    model = Use(lambda m, x: m.linear(x) + m.other(x) @ m.linear.weight, other=nn.Linear(4, 4))
    after = changed(model, X, keep_float32=("linear",))
    assert after.get_parameter("linear.weight").dtype == torch.float32


def test_a_kept_parameter_of_a_layer_that_changes_is_refused():
    model = Use(lambda m, x: m.linear(x) @ m.linear.weight)
    pass_ = ChangePrecision(keep_float32=("linear.weight",))
    refused(pass_, model, X, reason="linear.weight stays in float32", trace=fxopt_trace)


@pytest.mark.parametrize("change", ["double", "half", "train"])
def test_what_happens_to_the_model_does_not_reach_the_record(change):
    model = randomise(layers()).eval()
    weight = model[0].weight.detach().clone()
    after = ChangePrecision()(fxopt_trace(model, [X]))
    if change == "train":
        with torch.no_grad():
            model[0].weight.add_(1)
    else:
        getattr(model, change)()
    restored = ChangePrecision()(after, reverse=True).get_parameter("0.weight")
    assert restored.dtype == torch.float32
    assert torch.equal(restored, weight)


def test_undo_after_double():
    model = randomise(layers()).eval()
    after = ChangePrecision()(fxopt_trace(model, [X])).double()
    restored = ChangePrecision()(after, reverse=True)
    assert torch.equal(restored.get_parameter("0.weight"), model[0].weight)


def test_undo_keeps_counters():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    after = ChangePrecision()(fxopt_trace(model, [X]))
    after(X), after(X)
    assert ChangePrecision()(after, reverse=True).get_buffer("1.num_batches_tracked") == 2


class Named(nn.Module):
    """A parameter with a second name that no node reads, as the decoder's bias in BertForMaskedLM."""

    def __init__(self):
        super().__init__()
        self.predictions = nn.Module()
        self.predictions.bias = nn.Parameter(torch.rand(4))
        self.predictions.decoder = nn.Linear(4, 4)
        self.predictions.decoder.bias = self.predictions.bias

    def forward(self, x):
        return self.predictions.decoder(x)


def test_an_unused_second_name_of_a_parameter_changes_with_it():
    after = changed(Named(), X)
    bias = after.get_parameter("predictions.bias")
    assert bias.dtype == torch.bfloat16
    assert bias is after.get_parameter("predictions.decoder.bias")


def test_a_layer_with_hooks_is_kept():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].register_forward_hook(lambda m, args, out: out)
    after = ChangePrecision()(fxopt_trace(model, [X]))
    assert after.get_parameter("0.weight").dtype == torch.float32
    assert after.get_parameter("1.weight").dtype == torch.bfloat16


def test_a_float64_model_has_no_site():
    traced = fxopt_trace(layers().double(), [X.double()])
    assert not ChangePrecision().explain(traced).rows


def test_a_tensor_beside_a_parameter_that_is_read_stays_tied():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.other, self.layer = nn.Linear(4, 4), nn.Linear(4, 4)
            self.layer.bias = self.other.bias

        def forward(self, x):
            return x * self.layer.weight.mean()

    before = fxopt.trace(randomise(Reads()), (torch.randn(3, 4),))
    changed = ChangePrecision()(copy.deepcopy(before))
    assert changed.layer.weight.dtype == torch.bfloat16
    assert_round_trip(before, undo(changed))


def force(self, x):
    with torch.enable_grad():
        x = x.clone().requires_grad_()
        return torch.autograd.grad(self.layer(x).pow(2).sum(), x)[0]


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: self.layer(torch.inverse(self.layer(x))),
        lambda self, x: self.layer(x).inverse(),
        lambda self, x: self.layer(torch.cdist(self.layer(x), x)),
        lambda self, x: torch.sparse.mm(x.to_sparse(), self.layer(x)),
        lambda self, x: self.margin(self.layer(x), torch.tensor([0, 1, 2])),
        lambda self, x: (self.layer(x).view(torch.int32) >> 16).float(),
        lambda self, x: self.layer(x).view(torch.float32),
        force,
    ],
)
def test_what_has_no_kernel_for_the_lower_dtype_stays_in_float32(forward):
    x = torch.eye(3) + 0.1 * torch.randn(3, 3)
    model = module(forward, layer=nn.Linear(3, 3), margin=nn.MultiMarginLoss())
    before = fxopt.trace(model, (x,))
    after = ChangePrecision()(copy.deepcopy(before))
    assert after.layer.weight.dtype == torch.bfloat16
    assert after(x).isfinite().all()
    assert after(x).shape == before(x).shape
    assert_round_trip(before, undo(after))


@torch.library.custom_op("fxopt_tests::wants_float32", mutates_args=())
def wants_float32(x: torch.Tensor) -> torch.Tensor:
    """A kernel for one dtype."""
    assert x.dtype == torch.float32
    return x * 2


@wants_float32.register_fake
def _(x):
    return torch.empty_like(x)


def test_an_operator_that_is_registered_by_others_gets_float32():
    model = module(lambda m, x: wants_float32(m.layer(x)), layer=nn.Linear(4, 4))
    after = ChangePrecision()(fxopt.trace(model, (X,)))
    torch.testing.assert_close(after(X), model(X), rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    "use",
    [
        lambda y: y.masked_fill(y > 0, -100_000).softmax(-1),
        lambda y: (y + 100_000).clamp(max=100_000) - 100_000,
        lambda y: torch.where(y > 0, y, torch.full_like(y, -100_000)).softmax(-1),
        lambda y: y[:1].expand(70_000, 4),
    ],
)
def test_integers_beyond_the_range_of_float16_saturate(use):
    model = module(lambda m, x: use(m.layer(x)), layer=nn.Linear(4, 4))
    after = ChangePrecision(torch.float16)(fxopt.trace(model, (X,)))
    assert after(X).shape == model(X).shape
    assert after(X).isfinite().all()
