"""FoldConstants: what no input changes is computed once; what might change stays."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.nn.utils import parametrize, prune

import fxopt
from fxopt import PassError, graph, undo
from fxopt.capture.runtime.input_guard import guard_of
from fxopt.passes.fold_constants import FoldConstants
from fxopt.testing import assert_round_trip, randomise
from tests.before_after import fxopt_trace, refused, rewritten
from tests.modules import module

X = torch.randn(3, 4)


class Uses(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.scale = function, nn.Parameter(torch.ones(4))
        self.register_buffer("table", torch.arange(12.0).reshape(3, 4), persistent=False)
        self.register_buffer("saved", torch.arange(12.0).reshape(3, 4))

    def forward(self, x):
        return self.function(self, x)


@pytest.mark.parametrize(
    ("function", "sites"),
    [
        (lambda m, x: x + torch.arange(4, device=x.device) * 2, 1),
        (lambda m, x: x * m.table[:, :1].cos() + m.table.sin(), 2),
        (lambda m, x: x.masked_fill(torch.ones(3, 4, dtype=torch.bool).tril(), 0.0), 1),
        (lambda m, x: x + x.new_zeros(3, 4, dtype=torch.float32).add(1) + torch.full((4,), 0.5), 2),
        (lambda m, x: x + torch.stack(torch.arange(8).reshape(2, 4).split(1)).sum(0), 1),
    ],
)
def test_constants_become_buffers(function, sites):
    model = Uses(function)
    after = rewritten(FoldConstants(), model, X, sites=sites, trace=fxopt_trace)
    assert list(after.state_dict()) == list(model.state_dict())
    assert not any(node.target is torch.arange for node in after.graph.nodes)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: x + m.saved.cos(),
        lambda m, x: x * m.scale.exp(),
        lambda m, x: x + torch.rand(4),
        lambda m, x: x + torch.zeros_like(x).add_(1),
        lambda m, x: (x, torch.arange(4) + 1),
        lambda m, x: (x, (torch.arange(4) + 1)[1:]),
        lambda m, x: x + m.table.add_(1).cos(),
        lambda m, x: x + torch.arange(x.shape[0] * 4).reshape(3, 4) if x.sum() > 1e9 else x,
    ],
)
def test_what_might_change_stays(function):
    traced = fxopt.trace(Uses(function), (X,), specialize=True)
    assert not FoldConstants().explain(traced).sites


def _filled(write):
    def function(m, x):
        table = torch.zeros(4, 4)
        write(table, x)
        return x + (table * 2 - table.mT).sum(0)

    return function


@pytest.mark.parametrize(
    "write",
    [
        lambda table, x: table.__setitem__(0, x[0]),
        lambda table, x: table[1:].add_(x[0]),
        lambda table, x: table.diagonal().copy_(x[0]),
        lambda table, x: table.chunk(2)[1].mul_(2).add_(x[0]),
        lambda table, x: table.masked_fill_(x[0] > 0, 3),
    ],
)
@pytest.mark.parametrize("example", [X, torch.zeros_like(X)])
def test_what_is_read_of_a_written_table_is_not_folded(write, example):
    """The zeros of an example that leaves the table as it was made must hide nothing."""
    model = Uses(_filled(write))
    folded = FoldConstants()(fxopt.trace(model, (example,)))
    other = X.flip(0) + 1
    torch.testing.assert_close(folded(other), model(other))


def test_a_buffer_that_is_written_is_no_constant():
    traced = fxopt.trace(Uses(lambda m, x: (m.table.add_(1), x + m.table.cos())[1]), (X,))
    (read,), (cos,) = (
        traced.graph.find_nodes(op=op, target=t) for op, t in (("get_attr", "table"), ("call_method", "cos"))
    )
    cos.args = (read,)  # and not the value that was written, which is the same
    assert not FoldConstants().explain(traced).sites


def test_a_constant_has_memory_of_its_own():
    changed = FoldConstants()(fxopt.trace(Uses(lambda m, x: x[:, :2] + m.table[:, :2]), (X,)))
    table = changed.get_buffer("table")
    assert changed.constant.value.untyped_storage()._cdata != table.untyped_storage()._cdata
    assert torch.equal(changed.constant.value, table[:, :2])


def test_sizes_that_are_free_are_no_constants():
    model = Uses(lambda m, x: x + torch.arange(x.shape[0], device=x.device)[:, None] + torch.arange(4))
    traced = fxopt.trace(model, (X,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    changed = FoldConstants()(traced)
    wide = torch.randn(7, 4)
    assert torch.equal(changed(wide), model(wide))
    assert [node.target for node in changed.graph.nodes].count(torch.arange) == 1


def test_a_constant_has_the_layout_of_what_it_is_like():
    x, y = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.randn(2, 3, 4, 5)
    model = module(
        lambda self, x, y: (torch.zeros_like(x, dtype=torch.float32) + 2 + y).permute(0, 2, 3, 1).view(-1)
    )
    rewritten(FoldConstants(), model, x, y, sites=1, trace=fxopt_trace)


def test_a_constant_that_requires_gradients_is_refused():
    model = module(lambda self, x: x * (torch.ones(4, requires_grad=True) * 2))
    refused(FoldConstants(), model, X, reason="it requires gradients", trace=fxopt_trace)


def test_a_large_constant_is_refused():
    traced = fxopt.trace(Uses(lambda m, x: x + m.table.cos()), (X,))
    explanation = FoldConstants(max_bytes=8).explain(traced)
    assert explanation.refusals[0][2] == "it takes 48 bytes: more than max_bytes=8"


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: x * (x.new_ones(4) * 3),
        lambda m, x: x * (torch.ones_like(x) * 0.1),
    ],
)
def test_a_constant_in_the_dtype_of_an_input_stays_where_the_input_may_have_another(function):
    model = Uses(function)
    refused(
        FoldConstants(),
        model,
        X,
        reason="x may come in another dtype, and gives this its own",
        trace=fxopt_trace,
    )
    traced = fxopt.trace(model.eval(), (X,))
    guard_of(traced).fix_dtypes()
    assert FoldConstants().explain(traced).sites


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_constants_keep_their_dtype_and_are_undone(dtype):
    def function(m, x):
        return x + torch.full((4,), torch.finfo(torch.float32).min, device=x.device).cos()

    traced = fxopt.trace(Uses(function), (X,))
    before = copy.deepcopy(traced).to(dtype)
    changed = FoldConstants()(traced).to(dtype)
    x = X.to(dtype)
    assert changed(x).dtype == before(x).dtype
    assert torch.equal(changed(x), before(x))
    assert_round_trip(before, undo(changed))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "constant",
    [
        lambda m: m.table * 2 + 0.5,
        lambda m: m.table.float() * 2,
        lambda m: m.table + torch.arange(4.0),
        lambda m: (m.table * 2 > 3).float(),
    ],
)
def test_constants_made_of_buffers_get_the_dtype_that_these_would_give_them(constant, dtype):
    traced = fxopt.trace(Uses(lambda m, x: x * constant(m)), (X,))
    before = copy.deepcopy(traced).to(dtype)
    changed = FoldConstants()(copy.deepcopy(traced))
    assert len(fxopt.history(changed)) == 1
    x = X.to(dtype)
    for made in (changed, FoldConstants()(copy.deepcopy(changed)), copy.deepcopy(changed)):
        assert made.to(dtype)(x).dtype == before(x).dtype
        torch.testing.assert_close(made(x), before(x))
    assert_round_trip(before, undo(changed))


def test_a_buffer_that_is_tied_to_a_parameter_is_no_constant():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.register_buffer("table", self.weight.data, persistent=False)

        def forward(self, x):
            return x * (self.table * 2) + self.weight

    assert not FoldConstants().explain(fxopt.trace(Tied(), (X,))).sites


def test_constants_under_autocast_stay():
    def function(m, x):
        with torch.autocast("cpu", torch.bfloat16):
            constant = torch.arange(1, 5, dtype=torch.bfloat16).prod()
        return x * constant

    assert not FoldConstants().explain(fxopt.trace(Uses(function), (X,))).sites


def test_constants_beside_a_block_that_switches_autocast_off_are_folded():
    def function(m, x):
        with torch.autocast("cpu", enabled=False):
            constant = torch.arange(1, 5, dtype=torch.bfloat16).prod()
        return x * constant

    traced = fxopt.trace(Uses(function), (X,))
    folded = FoldConstants()(copy.deepcopy(traced))
    assert not any(graph.function_name(node) == "prod" for node in folded.graph.nodes)
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            assert torch.equal(folded(X), traced(X))


def test_a_constant_of_another_default_dtype_is_an_error():
    traced = fxopt.trace(Uses(lambda m, x: x + torch.ones(4) * 2), (X,))
    before = copy.deepcopy(traced)
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(PassError, match="apply the pass under the default dtype of the trace"):
            FoldConstants()(traced)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_round_trip(before, traced)


def test_sizes_that_nobody_checks_are_no_constants():
    traced = torch.fx.symbolic_trace(Uses(lambda m, x: x + x.new_ones(4)))
    FakeTensorProp(traced, FakeTensorMode(allow_non_fake_inputs=True)).propagate(X)
    assert not FoldConstants().explain(traced).sites


def test_constants_on_the_meta_device_are_refused():
    with torch.device("meta"):
        traced = fxopt.trace(Uses(lambda m, x: x + torch.arange(4, device=x.device) * 2), (X.to("meta"),))
    explanation = FoldConstants().explain(traced)
    assert not explanation.sites
    assert "it is on the meta device" in explanation.refusals[0][2]


def test_a_constant_whose_size_only_a_run_knows_is_refused():
    def repeated(m, x):
        ids = torch.repeat_interleave(torch.arange(3), torch.tensor([1, 2, 3]))
        return x + x.flatten()[ids].sum()

    traced = fxopt.trace(Uses(repeated), (X,))
    reasons = {reason for _, _, reason in FoldConstants().explain(traced).refusals}
    assert "its size is known only when the graph runs" in reasons


class Frozen(nn.Module):
    """Computes values of its weights alone, by functions and layers."""

    def __init__(self):
        super().__init__()
        self.table, self.key, self.norm = nn.Embedding(6, 4), nn.Linear(4, 4), nn.LayerNorm(4)
        self.scale, self.first = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(1, 1, 4))
        self.register_buffer("saved", torch.randn(4))

    def forward(self, x):
        keys = self.key(self.norm(self.table.weight)).transpose(0, 1)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) * self.scale.exp()
        return (x + self.table(torch.arange(4)) + self.saved.cos()) @ keys


def test_frozen_weights_are_constants_and_views_of_them_stay():
    x = torch.randn(2, 3, 4)
    model = randomise(Frozen()).eval()
    traced = fxopt.trace(model, (x,))
    before = copy.deepcopy(traced)
    assert len(FoldConstants().explain(traced).sites) == 1  # the positions
    FoldConstants(freeze=True)(traced, verify=True)
    assert not traced.graph.find_nodes(op="call_module", target="key")
    assert traced.graph.find_nodes(op="get_attr", target="first")
    assert len(FoldConstants(freeze=True).get_transformed_nodes(traced)) == 4
    torch.testing.assert_close(traced(x), model(x))
    with torch.no_grad():
        model.scale.add_(1)
    assert not torch.allclose(traced(x), model(x))  # as the docstring says
    undo(traced)
    torch.testing.assert_close(traced(x), model(x))
    before.scale.data.add_(1)
    assert_round_trip(before, traced)


def test_a_frozen_value_takes_no_more_than_its_weights():
    model = module(
        lambda m, x: x + m.weight.exp() + m.weight.repeat(3, 1).cos(), weight=nn.Parameter(torch.randn(1, 4))
    )
    explanation = FoldConstants(max_bytes=1, freeze=True).explain(fxopt.trace(model, (X,)))
    assert [name for name, _ in explanation.sites] == ["exp"]
    assert [reason for _, _, reason in explanation.refusals] == ["it takes 48 bytes: more than max_bytes=1"]


def test_what_a_frozen_graph_writes_is_no_constant():
    def forward(m, x):
        m.saved.add_(1)
        return x * m.saved.cos() + m.dropout(m.scale) + torch.rand(4)

    model = module(forward, dropout=nn.Dropout(0.5), scale=nn.Parameter(torch.randn(4)))
    model.register_buffer("saved", torch.randn(4))
    traced = fxopt.trace(model.train(), (X,))
    assert not FoldConstants(freeze=True).explain(traced).sites


def weight_norms():
    parametrizations = nn.utils.parametrizations
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the old ones, which models use
        old = [nn.utils.weight_norm(nn.Conv1d(4, 4, 1)), nn.utils.spectral_norm(nn.Linear(4, 4))]
    new = [parametrizations.weight_norm(nn.Linear(4, 4)), parametrizations.orthogonal(nn.Linear(4, 4))]
    pruned = nn.Linear(4, 4)
    prune.l1_unstructured(pruned, "weight", 0.5)
    return nn.Sequential(*old, *new, pruned).eval()


def test_parametrized_layers_become_plain_ones_and_come_back():
    model, x = weight_norms(), torch.randn(2, 4, 4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        model[2].parametrizations.weight.original0.mul_(2)
        expected = model(x)
        traced = fxopt.trace(model, (x,))
        before = copy.deepcopy(traced)
        assert len(FoldConstants(freeze=True).explain(traced).sites) == 5
        FoldConstants(freeze=True)(traced, verify=True)
        kinds = [type(traced.get_submodule(str(n))) for n in range(5)]
        assert kinds == [nn.Conv1d, *[nn.Linear] * 4]
        assert not any(layer._forward_pre_hooks for layer in traced.modules())
        assert torch.equal(traced(x), expected)
        assert torch.equal(model(x), expected)
        assert_round_trip(before, undo(traced))


def test_a_hook_of_a_user_keeps_the_parametrization():
    model = weight_norms()
    model[0].register_forward_hook(lambda module, args, output: output + 1)
    traced = fxopt.trace(model, (torch.randn(2, 4, 4),))
    explanation = FoldConstants(freeze=True).explain(traced)
    assert len(explanation.sites) == 4
    assert "hooks" in explanation.refusals[0][2]


def _parametrized(layer=None):
    return nn.utils.parametrizations.weight_norm(nn.Linear(4, 4) if layer is None else layer)


class Noise(nn.Module):
    def forward(self, weight):
        return weight + torch.rand_like(weight)


def _noisy():
    layer = nn.Linear(4, 4)
    parametrize.register_parametrization(layer, "weight", Noise())
    return layer


def _tied():
    first, second = _parametrized(), _parametrized()
    second.parametrizations.weight.original1 = first.parametrizations.weight.original1
    return nn.Sequential(first, second)


def _with_backward_hook():
    layer = _parametrized()
    layer.register_full_backward_hook(lambda *_: None)
    return nn.Sequential(layer)


def _sliced():
    layer = _parametrized()
    layer.out_features = 3
    return nn.Sequential(layer)


def _inference():
    with torch.inference_mode():
        return nn.Sequential(_parametrized())


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nn.Sequential(_noisy()), "not torch's own"),
        (
            lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.LSTM(4, 4), "weight_hh_l0")),
            "is no linear layer",
        ),
        (_tied, "shares memory"),
        (_with_backward_hook, "it has hooks"),
        (lambda: nn.Sequential(_parametrized()).train(), "training mode"),
        (_inference, "inference_mode"),
        (_sliced, "do not have the shapes that the layer tells"),
    ],
)
def test_parametrized_layers_that_stay(make, reason):
    traced = torch.fx.symbolic_trace(make() if reason == "training mode" else make().eval())
    explanation = FoldConstants(freeze=True).explain(traced)
    assert not explanation.sites
    assert reason in explanation.refusals[0][2]


def test_a_parametrized_layer_called_twice_stays():
    layer = _parametrized()
    traced = torch.fx.symbolic_trace(nn.Sequential(layer, layer).eval())
    assert "also called by" in FoldConstants(freeze=True).explain(traced).refusals[0][2]


def test_a_parametrized_layer_may_compute_its_bias_as_well():
    layer = _parametrized()
    prune.random_unstructured(layer, "bias", 0.5)
    model, x = nn.Sequential(layer).eval(), torch.randn(3, 4)
    with torch.no_grad():
        expected = model(x)
        traced = FoldConstants(freeze=True)(fxopt.trace(model, (x,)))
        assert type(traced.get_submodule("0")) is nn.Linear
        assert traced.get_submodule("0").bias is not None
        torch.testing.assert_close(fxopt.PackLinears()(traced)(x), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_frozen_constants_have_the_dtype_of_the_weights(dtype):
    model, x = Frozen().eval(), torch.randn(2, 3, 4)
    traced = FoldConstants(freeze=True)(fxopt.trace(model, (x,)))
    assert traced.to(dtype)(x.to(dtype)).dtype == dtype
    wide = module(
        lambda m, x: x.float() + m.norm(m.weight).float(),
        norm=nn.LayerNorm(4),
        weight=nn.Parameter(torch.randn(4)),
    )
    folded = FoldConstants(freeze=True)(fxopt.trace(wide, (x,)))
    assert folded.to(dtype)(x.to(dtype)).dtype == torch.float32


def test_a_weight_whose_writes_nobody_notices_is_no_constant():
    with torch.inference_mode():
        weight = nn.Parameter(torch.randn(4))
    model = module(lambda m, x: x + m.weight.exp())
    model.weight = weight
    assert not FoldConstants(freeze=True).explain(torch.fx.symbolic_trace(model)).sites


def test_what_a_mask_describes_counts_for_no_weight_of_it():
    def forward(m, x):
        h = m.table(x)
        return h + torch.zeros_like(h).add(1)

    model = module(forward, table=nn.Embedding(1000, 4))
    traced = fxopt.trace(model, (torch.arange(3),))
    explanation = FoldConstants(max_bytes=8, freeze=True).explain(traced)
    assert not explanation.sites
    assert "max_bytes=8" in explanation.refusals[0][2]


def test_optimize_follows_weights_that_its_graph_has_folded():
    model, x = weight_norms(), torch.randn(2, 4, 4)
    with torch.no_grad():
        fast = fxopt.optimize(model, (x,), tune=False)
        assert "FoldConstants 5" in str(fast.report)
        for parameter in (
            model[2].parametrizations.weight.original0,
            model[0].weight_g,
            model[4].weight_orig,
        ):
            torch.testing.assert_close(fast(x), model(x))
            parameter.mul_(1.5)
        torch.testing.assert_close(fast(x), model(x))


@pytest.mark.parametrize("normed", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_a_weight_that_was_computed_with_gradients_is_folded_and_comes_back(normed):
    model = nn.Sequential(normed(nn.Linear(4, 4)), nn.ReLU()).eval()
    model(X)
    traced = fxopt.trace(model, (X,))
    code, layer = traced.code, traced.get_submodule("0")
    FoldConstants(freeze=True)(traced)
    assert type(traced.get_submodule("0")) is nn.Linear
    assert not [*traced.get_submodule("0")._forward_pre_hooks]
    torch.testing.assert_close(traced(X), model(X))
    assert undo(traced).code == code
    assert [*traced.get_submodule("0").state_dict()] == [*layer.state_dict()]
    torch.testing.assert_close(traced(X), model(X))


def test_constants_that_share_a_computation_with_arange_are_verified_on_its_values():
    class Angles(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("frequencies", torch.rand(4))

        def forward(self, x):
            angles = torch.arange(4) * self.frequencies
            return x * angles.cos() + x.flip(-1) * angles.sin()

    traced = fxopt.trace(Angles(), (torch.randn(2, 4),))
    with warnings.catch_warnings():
        warnings.simplefilter("error", fxopt.VerificationWarning)
        FoldConstants(freeze=True)(traced, verify=True)
    assert not traced.graph.find_nodes(op="call_method", target="cos")


def test_a_folded_constant_shared_with_another_is_computed_right():
    def function(m, x):
        positions = torch.arange(4)
        return x * positions + (positions + 1) * x + (positions * 2).cos()

    rewritten(FoldConstants(), Uses(function), X, sites=3, trace=fxopt_trace)


def test_undo_needs_no_folded_values():
    traced = fxopt.trace(Uses(lambda m, x: x + torch.arange(4) * 2), (X,))
    before = copy.deepcopy(traced).to("meta")
    assert_round_trip(before, undo(FoldConstants()(traced).to("meta")))
