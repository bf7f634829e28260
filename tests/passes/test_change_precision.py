"""ChangePrecision: what runs in which dtype, what is kept, and the exact way back."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxopt
from fxopt import ChangePrecision, PassError, UndoError
from fxopt.passes.change_precision import saturate
from fxopt.testing import assert_round_trip, compare, randomise
from tests.before_after import assert_untouched, fxopt_trace, refused, rewritten

X = torch.randn(2, 4)
HALF = [torch.bfloat16, torch.float16]


def changed(model, *inputs, **options):
    """The rewritten graph module of a model, checked for its outputs' dtypes and its way back."""
    after = rewritten(ChangePrecision(**options), model, *inputs, sites=1, trace=fxopt_trace)
    difference = compare(model(*inputs), after(*inputs))  # the same dtypes, too
    assert 0 < difference.max_rel < 0.05
    return after


def layers():
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))


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


class Use(nn.Module):
    def __init__(self, use, **modules):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.rand(4))
        self.register_buffer("shift", torch.rand(4))
        for name, module in modules.items():
            setattr(self, name, module)
        self.use = use

    def forward(self, x):
        return self.use(self, x)


def written_target(m, x):
    out = torch.zeros(2, 4)
    out[0] = m.linear(x)[0]
    view = out[1]
    out[1] = m.linear(x)[1]
    return m.linear(out), view


def masked(m, x):
    scores = m.linear(x)
    mask = torch.full((2, 4), torch.finfo(torch.float32).min).triu(1)
    return (scores + mask).softmax(-1), scores.masked_fill(x > 0, torch.finfo(torch.float32).min).softmax(-1)


USES = {
    "parameter": lambda m, x: m.linear(x) * m.scale,
    "buffer": lambda m, x: m.linear(x) + m.shift,
    "functional weights": lambda m, x: F.linear(x, m.linear.weight[:2]) + 0 * m.linear(x)[:, :2],
    "residual of the input": lambda m, x: x + m.linear(x),
    "explicit float32": lambda m, x: m.scale * m.linear(x).to(torch.float32).pow(2).mean(-1, keepdim=True),
    "softmax in float32": lambda m, x: F.softmax(m.linear(x), -1, dtype=torch.float32) @ m.scale,
    "tuple": lambda m, x: m.linear(x).chunk(2, -1),
    "dict": lambda m, x: {"a": m.linear(x), "b": [x, m.linear(x).argmax(-1) * 0]},
    "factory": lambda m, x: m.linear(x) * torch.arange(4.0),
    "linalg": lambda m, x: torch.linalg.inv(m.linear.weight + 9 * torch.eye(4)) + 0 * m.linear(x)[0],
    "fft": lambda m, x: torch.fft.rfft(m.linear(x)).abs(),
    "integer": lambda m, x: (m.linear(x), x.argmax(-1)),
    "float64": lambda m, x: m.linear(x).double() * 2,
    "written target": written_target,
    "written value": lambda m, x: m.linear(x).add_(m.shift).mul_(2),
    "mask": masked,
}


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", USES)
def test_dtypes_meet(name, dtype):
    changed(Use(USES[name]), X, dtype=dtype)


def test_metadata_tells_the_new_dtypes():
    traced = fxopt_trace(Use(USES["residual of the input"]), [X])
    after = ChangePrecision()(traced)
    values = {node.name: node.meta["val"] for node in after.graph.nodes}
    dtypes = {name: value.dtype for name, value in values.items() if value is not None}
    assert dtypes["linear"] == dtypes["add"] == dtypes["saturate"] == torch.bfloat16
    assert dtypes["x"] == torch.float32
    restored = ChangePrecision()(after, reverse=True)
    assert {n.meta["val"].dtype for n in restored.graph.nodes if n.name in ("linear", "add")} == {
        torch.float32
    }


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


def test_no_metadata_is_refused():
    refused(ChangePrecision(), layers(), X, reason="its dtype is unknown")


def test_graphs_that_choose_dtypes_are_refused():
    def autocast(m, x):
        with torch.autocast("cpu", torch.bfloat16):
            return m.linear(x)

    refused(ChangePrecision(), Use(autocast), X, reason="autocast", trace=fxopt_trace)
    mixed = Use(lambda m, x: m.linear(x).half())
    refused(ChangePrecision(), mixed, X, reason="already works in torch.float16", trace=fxopt_trace)


def test_a_written_parameter_is_refused():
    def write(m, x):
        with torch.no_grad():
            m.scale.mul_(2)
        return m.linear(x) * m.scale

    refused(ChangePrecision(), Use(write), X, reason="may write into the parameter scale", trace=fxopt_trace)


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


def test_a_read_of_a_kept_layer_stays_in_float32():
    model = Use(lambda m, x: m.linear(x) + m.other(x) @ m.linear.weight, other=nn.Linear(4, 4))
    after = changed(model, X, keep_float32=("linear",))
    assert after.get_parameter("linear.weight").dtype == torch.float32


def test_a_kept_parameter_of_a_layer_that_changes_is_refused():
    model = Use(lambda m, x: m.linear(x) @ m.linear.weight)
    pass_ = ChangePrecision(keep_float32=("linear.weight",))
    refused(pass_, model, X, reason="linear.weight stays in float32", trace=fxopt_trace)


def batch_statistics(m, x):
    return F.batch_norm(m.linear(x), m.mean, m.var, training=True)


def test_functional_batch_norm_updates_its_statistics():
    model = Use(batch_statistics)
    model.register_buffer("mean", torch.zeros(4))
    model.register_buffer("var", torch.ones(4))
    x = torch.randn(8, 4)
    before = fxopt_trace(copy.deepcopy(model), [x])
    after = ChangePrecision()(fxopt_trace(model, [x]))
    before(x), after(x)
    assert after.get_buffer("mean").abs().max() > 0
    assert compare(before.get_buffer("mean"), after.get_buffer("mean")).max_rel < 0.05
    assert compare(before.get_buffer("var"), after.get_buffer("var")).max_rel < 0.05


def several_buffers(m, x):
    torch._foreach_add_([m.shift, m.mean], [m.linear(x)[0].detach(), m.linear(x)[1].detach()])
    return m.linear(x) + m.shift


def test_a_function_that_writes_into_several_buffers():
    model = Use(several_buffers).requires_grad_(False)
    model.register_buffer("mean", torch.zeros(4))
    before, after = (fxopt_trace(copy.deepcopy(model), [X]) for _ in range(2))
    ChangePrecision()(after)
    before(X), after(X)
    assert compare(before.get_buffer("mean"), after.get_buffer("mean")).max_rel < 0.05


def write_seen_by_a_view(m, x):
    h = m.linear(x)
    view = h.view(-1)
    m.relu(h)
    return view


def test_a_write_into_a_cast_copy_is_refused():
    model = Use(write_seen_by_a_view, relu=nn.ReLU(inplace=True))
    reason = "it may write into linear, which would have to be cast"
    refused(ChangePrecision(keep_float32=(nn.ReLU,)), model, X, reason=reason, trace=fxopt_trace)


class WritesInput(nn.Module):
    def forward(self, x):
        x.add_(100)
        return x * 2


def test_a_foreign_module_that_may_write_its_input_is_refused():
    def use(m, x):
        h = m.linear(x)
        return m.leaf(h) + h

    def trace(model, inputs):
        return fxopt.trace(model, tuple(inputs), leaf_modules=(WritesInput,))

    refused(ChangePrecision(), Use(use, leaf=WritesInput()), X, reason="may write into linear", trace=trace)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradients_flow_outside_of_a_block_without(mode):
    def use(m, x):
        with mode():
            a = m.linear(x)
        return a.clone() + m.other(x)

    model = Use(use, other=nn.Linear(4, 4))
    after = ChangePrecision()(fxopt_trace(model, [X]))
    x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
    model(x).sum().backward()
    after(y).sum().backward()
    assert compare(x.grad, y.grad).max_rel < 0.05


def test_one_cast_for_several_users():
    model = Use(lambda m, x: m.linear(x) + m.other(x), other=nn.Linear(4, 4))
    after = ChangePrecision()(fxopt_trace(model, [X]))
    assert len(after.graph.find_nodes(op="call_function", target=saturate)) == 1


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


class Foreign(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4))

    def forward(self, x):
        assert x.dtype == torch.float32
        return x * self.weight


def test_foreign_modules_get_float32():
    model = Use(lambda m, x: m.foreign(m.linear(x)), foreign=Foreign())
    traced = fxopt.trace(model, (X,), leaf_modules=(Foreign,))
    before = copy.deepcopy(traced)
    explanation = ChangePrecision().explain(traced)
    assert "Foreign is not a layer of torch.nn" in explanation.refusals[0][2]
    after = ChangePrecision()(traced)
    assert 0 < compare(before(X), after(X)).max_rel < 0.05
    assert_round_trip(before, ChangePrecision()(after, reverse=True))


def test_a_layer_with_hooks_is_kept():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].register_forward_hook(lambda m, args, out: out)
    after = ChangePrecision()(fxopt_trace(model, [X]))
    assert after.get_parameter("0.weight").dtype == torch.float32
    assert after.get_parameter("1.weight").dtype == torch.bfloat16


def test_a_float64_model_has_no_site():
    traced = fxopt_trace(layers().double(), [X.double()])
    assert not ChangePrecision().explain(traced).rows


def test_undo_of_a_replaced_module_raises():
    after = ChangePrecision()(fxopt_trace(layers(), [X]))
    setattr(after, "0", nn.Linear(4, 8))
    with pytest.raises(UndoError, match="0 was replaced since"):
        ChangePrecision()(after, reverse=True)


def test_other_passes_before_and_after():
    passes = fxopt.compose(fxopt.FuseBiasInLinear(), ChangePrecision(), fxopt.ReplaceActivation())
    traced = fxopt_trace(randomise(layers()).eval(), [X])
    before = copy.deepcopy(traced)
    after = pickle.loads(pickle.dumps(passes(traced)))
    assert 0 < compare(before(X), after(X)).max_rel < 0.05
    assert_round_trip(before, passes(after, reverse=True))


def test_complex_numbers_are_made_of_float32():
    class Phase(nn.Module):
        def __init__(self):
            super().__init__()
            self.real, self.imaginary = nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x):
            number = torch.complex(self.real(x), self.imaginary(x))
            return (number * number).abs()

    model, x = Phase().eval(), torch.randn(3, 8)
    changed = ChangePrecision(torch.bfloat16)(fxopt_trace(model, [x]))
    torch.testing.assert_close(changed(x), model(x), rtol=0.1, atol=0.1)
    (number,) = changed.graph.find_nodes(op="call_function", target=torch.complex)
    assert [value.meta["val"].dtype for value in number.all_input_nodes] == [torch.float32] * 2


def test_several_tensors_in_one_value_are_not_cast():
    class Largest(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x):
            return self.layer(x).max(dim=-1)

    reason = "would have to be cast, holds several tensors"
    refused(ChangePrecision(torch.bfloat16), Largest(), torch.randn(3, 8), reason=reason, trace=fxopt_trace)
