"""RemoveIdentity: what gives back its input goes, and nothing that only seems to."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

import fxopt
from fxopt.passes.remove_identity import RemoveIdentity
from tests.before_after import fxopt_trace, in_float64, refused, rewritten
from tests.modules import module

X = torch.randn(2, 3, 4)


class Uses(nn.Module):
    """A function of an input, with layers to call."""

    def __init__(self, function):
        super().__init__()
        self.function, self.layer = function, nn.Linear(4, 4)
        self.dropout, self.identity = nn.Dropout(0.5), nn.Identity()

    def forward(self, x):
        return self.function(self, self.layer(x))


@pytest.mark.parametrize(
    ("function", "sites"),
    [
        (lambda m, x: torch.relu(m.dropout(m.identity(x))), 2),
        (lambda m, x: torch.relu(F.dropout(x, 0.5, training=False)), 1),
        (lambda m, x: x.reshape(2, 3, 4).view(2, 3, 4).flatten(2) + 1, 3),
        (lambda m, x: x[:, 0:, :].expand(2, 3, 4) * 2, 2),
        (lambda m, x: x.transpose(1, 2).contiguous().reshape(2, 12).contiguous() + 1, 1),
        (lambda m, x: x.to(x.dtype).type_as(x) + 1, 1),
        (lambda m, x: m.identity(x).add_(1), 1),
        (lambda m, x: F.pad(F.pad(x, (0, 0)), (0, 0, 0, 0), mode="constant") + 1, 2),
    ],
)
def test_what_changes_nothing_goes(function, sites):
    rewritten(RemoveIdentity(), Uses(function), X, sites=sites, trace=fxopt_trace)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: x.reshape(3, 2, 4),
        lambda m, x: F.pad(x, (0, 1)),
        lambda m, x: F.pad(x[:, :1].expand(2, 3, 4), (0, 0)),
        lambda m, x: F.pad(x, (1, -1)),
        lambda m, x: x.transpose(0, 1),
        lambda m, x: x[:, 1:],
        lambda m, x: x[[1, 0]],
        lambda m, x: x.contiguous(),
        lambda m, x: x.transpose(1, 2).contiguous(),
        lambda m, x: x.clone(),
        lambda m, x: x.to(torch.device("cpu")),
        lambda m, x: x.cpu(),
        lambda m, x: x.to(x.device),
        lambda m, x: x.to(torch.float32, copy=True),
        lambda m, x: x.to(torch.float16).to(torch.float32),
        lambda m, x: x * 1 + 0,
        lambda m, x: x.detach(),
        lambda m, x: x.to(memory_format=torch.preserve_format),
        lambda m, x: (x, x.view(2, 3, 4)),
        lambda m, x: x.data,
        lambda m, x: x.as_strided(x.shape, x.stride()),
        lambda m, x: (x.view(2, 3, 4).add_(1), x)[1],
        lambda m, x: m.identity((x, x + 1))[1],
        lambda m, x: m.identity([x, x + 1]),
        lambda m, x: m.identity({"left": x, "right": x + 1})["right"],
        lambda m, x: (m.identity(None), x),
        lambda m, x: x.view(x.dtype).exp(),  # which has no gradients
    ],
)
def test_what_may_change_something_stays(function):
    rewritten(RemoveIdentity(), Uses(function), X, sites=0, trace=fxopt_trace)


@pytest.mark.parametrize(
    "function", [lambda x: x.view(2, 3, 4), lambda x: x.contiguous()[:], lambda x: [x.expand(2, 3, 4)]]
)
def test_a_view_of_an_input_that_is_returned_stays_one(function):
    reason = "or a view of an input or weight"
    refused(RemoveIdentity(), module(lambda self, x: function(x)), X, reason=reason, trace=fxopt_trace)


def test_what_gives_an_input_itself_goes_where_it_is_returned():
    model = module(lambda self, x: self.dropout(x).contiguous(), dropout=nn.Dropout())
    after = rewritten(RemoveIdentity(), model, X, sites=1, trace=fxopt_trace)
    assert after(X) is X


def test_a_cast_to_the_own_dtype_is_one_only_in_that_dtype():
    model = Uses(lambda m, x: x.to(torch.float32).exp())
    for inputs, sites in (([X], 1), (in_float64([X]), 0)):
        model = model.to(inputs[0].dtype)
        assert len(RemoveIdentity().explain(fxopt.trace(model, tuple(inputs))).sites) == sites


class Casts(nn.Module):
    """Casts of an input, before and behind a layer and another cast."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return x.float() + 1, (2 * x).to(torch.float32).float().exp(), self.layer(x.float()).float()


def test_casts_of_an_input_that_may_come_in_another_dtype_stay():
    model = Casts()
    traced = fxopt.trace(model, (X,))
    explanation = RemoveIdentity().explain(traced)
    assert len(explanation.sites) == 2, "what another cast, or a layer, gives"
    assert all("x may come in another dtype" in reason for _, _, reason in explanation.refusals)
    after = RemoveIdentity()(traced)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for left, right in zip(after(X.to(dtype)), model(X.to(dtype)), strict=True):
            assert left.dtype == right.dtype
            assert torch.equal(left, right)


class Applies(nn.Module):
    """A function of an input."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize(
    ("function", "dtype", "other"),
    [
        (lambda x: x.abs().float(), torch.complex64, torch.complex128),
        (lambda x: torch.fft.fft(x).to(torch.complex64), torch.float32, torch.float64),
    ],
)
def test_the_precision_of_a_complex_tensor_is_that_of_its_parts(function, dtype, other):
    model, x = Applies(function), torch.randn(4)
    after = RemoveIdentity()(fxopt.trace(model, (x.to(dtype),)))
    assert after(x.to(other)).dtype == model(x.to(other)).dtype


def test_the_same_memory_read_as_another_dtype_stays():
    model = Uses(lambda m, x: x.view(torch.int32).float())
    assert not RemoveIdentity().explain(fxopt.trace(model, (X,))).sites


def test_free_sizes_are_compared_without_a_guard():
    batch = torch.export.Dim("batch")
    model = Uses(lambda m, x: x.reshape(x.shape[0], 3, 4) + x.reshape(-1, 12).sum())
    traced = fxopt.trace(model, (X,), dynamic_shapes=({0: batch},))
    changed = RemoveIdentity()(traced)
    assert [node.target for node in changed.graph.nodes].count("reshape") == 1
    wide = torch.randn(5, 3, 4)
    torch.testing.assert_close(changed(wide), model(wide))


def test_active_dropout_is_refused():
    model = Uses(lambda m, x: m.dropout(x))
    refused_in_training = fxopt.trace(model.train(), (X,))
    explanation = RemoveIdentity().explain(refused_in_training)
    assert not explanation.sites
    assert "it is active" in explanation.refusals[0][2]


def test_a_hook_is_called():
    model = Uses(lambda m, x: m.identity(x)).eval()
    model.identity.register_forward_hook(lambda *_: None)
    traced = torch.fx.symbolic_trace(model)
    assert not RemoveIdentity().explain(traced).sites


def test_a_module_that_is_read_elsewhere_stays():
    model = Uses(lambda m, x: m.identity(x) * m.identity.scale).eval()
    model.identity.scale = nn.Parameter(torch.ones(4))
    refused(RemoveIdentity(), model, X, reason="reads identity.scale")


def test_a_view_without_gradients_stays():
    def function(m, x):
        with torch.no_grad():
            return x.view(2, 3, 4) * 2

    explanation = RemoveIdentity().explain(fxopt.trace(Uses(function), (X,)))
    assert not explanation.sites
    assert "side effect" in explanation.refusals[0][2]


def test_a_parameter_read_without_gradients_stays_without():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            with torch.no_grad():
                weight = self.weight.view(4)
            return x * weight + self.weight

    assert not RemoveIdentity().explain(fxopt.trace(Reads(), (X,))).sites


def test_what_depends_on_a_size_of_1_stays():
    class Squeezes(nn.Module):
        def forward(self, x):
            return x.unsqueeze(0).squeeze(1) * 1

    traced = fxopt.trace(Squeezes(), (torch.randn(6, 4),), dynamic_shapes=({0: torch.export.Dim("n")},))
    expected = traced(torch.ones(1, 4))
    assert RemoveIdentity()(traced)(torch.ones(1, 4)).shape == expected.shape


def test_sizes_that_nobody_checks_are_not_believed():
    class Reshapes(nn.Module):
        def forward(self, x):
            return x.reshape(2, 4) * 1

    traced = torch.fx.symbolic_trace(Reshapes())
    FakeTensorProp(traced, FakeTensorMode(allow_non_fake_inputs=True)).propagate(torch.ones(2, 4))
    assert not RemoveIdentity().explain(traced).sites


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda m, x: F.pad(x, (0, 0)), "which is a copy"),
        (lambda m, x: F.pad(x, (0, 0)) * x.add_(1), "may write into it"),
        (lambda m, x: F.pad(x, (0, 0)).add_(1) * x, "may write into it"),
    ],
)
def test_a_padding_of_nothing_is_a_copy(function, reason):
    refused(RemoveIdentity(), Uses(function), X, reason=reason, trace=fxopt_trace)
