"""PackLinears, PackConvs and FuseEpilogues: packed layers in a graph, in channels_last between convolutions."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

import fxopt
from fxopt import FuseEpilogues, PackConvs, PackLinears, tuning
from fxopt.kernels import PackedLayer, kernels_for
from fxopt.memory_formats import channels_last, contiguous
from fxopt.passes.quantize_linears import QuantizeLinears
from fxopt.testing import randomise
from tests.before_after import fx_trace, fxopt_trace, refused, rewritten
from tests.modules import module

pytestmark = pytest.mark.skipif(
    not kernels_for(nn.Linear(16, 16)), reason="this build of torch has no packed kernels"
)

X = torch.randn(5, 8)
IMAGE = torch.randn(2, 3, 12, 12)


def linears(function):
    return module(function, a=nn.Linear(8, 8), b=nn.Linear(8, 8, bias=False))


def convs(function):
    layers = {name: nn.Conv2d(3, 6, 3, padding=1) for name in "ac"}
    layers |= {"b": nn.Conv2d(6, 6, 1), "norm": nn.BatchNorm2d(6)}
    return module(
        function,
        **layers,
        pool=nn.MaxPool2d(2),
        relu=nn.ReLU(inplace=True),
        head=nn.Linear(6, 4),
        normal=nn.LayerNorm(6),
    )


def packed(traced):
    return [name for name, m in traced.named_modules() if isinstance(m, PackedLayer)]


def test_linears_are_packed_and_stay_what_they_are():
    after = rewritten(PackLinears(), linears(lambda m, x: m.b(m.a(x).relu())), X, sites=2, trace=fxopt_trace)
    assert packed(after) == ["a", "b"]
    assert [name for name, _ in after.named_parameters()] == ["a.weight", "a.bias", "b.weight"]


def test_a_layer_with_several_calls_and_a_tied_weight_is_one_site():
    model = linears(lambda m, x: m.a(m.a(x)) @ m.b.weight)
    model.b.weight = model.a.weight
    traced = PackLinears()(fxopt.trace(model.eval(), (X,)))
    assert packed(traced) == ["a"]
    assert traced.a.weight is model.a.weight
    assert len(PackLinears().get_transformed_nodes(traced)) == 2
    fxopt.undo(traced)
    assert traced.a.weight is model.a.weight
    assert type(traced.a) is nn.Linear


def test_training_after_packing_survives_undo():
    model = randomise(linears(lambda m, x: m.b(m.a(x))).eval())
    traced = PackLinears()(fxopt.trace(model, (X,)))
    traced(X).sum().backward()
    with torch.no_grad():
        for parameter in traced.parameters():
            parameter -= 0.1 * parameter.grad
        trained = traced(X)
    fxopt.undo(traced)
    with torch.no_grad():
        assert torch.allclose(traced(X), trained, atol=1e-5)


@pytest.mark.parametrize(
    ("pass_", "layer", "x"), [(PackLinears(), nn.Linear(8, 8), X), (PackConvs(), nn.Conv2d(3, 4, 1), IMAGE)]
)
def test_without_metadata_there_is_a_reason(pass_, layer, x):
    refused(pass_, nn.Sequential(layer), x, reason="FakeTensorProp", trace=fx_trace)
    traced = torch.fx.symbolic_trace(nn.Sequential(layer))
    FakeTensorProp(traced, FakeTensorMode(allow_non_fake_inputs=True)).propagate(x)
    assert len(pass_.explain(traced).sites) == 1


def chosen(self, x):
    return self.layer(x[x[:, 0] > 0])


@pytest.mark.parametrize(
    ("pass_", "model", "x", "reason"),
    [
        (
            PackLinears(),
            module(chosen, layer=nn.Linear(16, 16)),
            torch.randn(4, 16),
            "depends on the values of an input",
        ),
        (PackLinears(), nn.Sequential(nn.Linear(16, 16)), torch.randn(0, 16), "its input is empty"),
        (
            PackConvs(),
            nn.Sequential(nn.Conv1d(4, 4, 3)),
            torch.randn(4, 9),
            "its input has no batch dimension",
        ),
    ],
)
def test_inputs_for_which_no_kernel_is_measured(pass_, model, x, reason):
    refused(pass_, model, x, reason=reason, trace=fxopt_trace)


@pytest.mark.parametrize("pass_", [PackLinears(), PackConvs()])
def test_hooks_and_other_devices_are_refused(pass_):
    model = module(lambda m, x, y: (m.a(x), m.b(y)), a=nn.Linear(8, 8), b=nn.Conv2d(3, 4, 1))
    traced = fxopt.trace(model.eval(), (X, IMAGE))
    for layer in (traced.a, traced.b):
        layer.register_forward_hook(lambda *_: None)
    assert "hooks" in str(pass_.explain(traced))
    for layer in (traced.a, traced.b):
        layer._forward_hooks.clear()
    traced = fxopt.trace(model.double(), (X.double(), IMAGE.double()))
    assert "no kernel for packed weights" in str(pass_.explain(traced))


@pytest.mark.parametrize("pass_", [PackLinears(), QuantizeLinears()])
def test_a_weight_that_is_a_buffer_is_refused(pass_):
    layer = nn.Linear(8, 8)
    weight = layer.weight.detach()
    del layer.weight
    layer.register_buffer("weight", weight)
    refused(pass_, nn.Sequential(layer), X, reason="the weight and bias of a plain Linear", trace=fxopt_trace)


def test_tuning_leaves_alone_what_is_not_faster(monkeypatch):
    times = {nn.Linear: {"plain": 1.0, "onednn": 0.99}, nn.Conv2d: {"plain": 1.0, "onednn": 0.5}}
    monkeypatch.setattr(tuning, "measured", lambda layer, *_: times[type(layer)])
    monkeypatch.setattr(tuning, "copying", lambda shape: 0.1)
    model = module(lambda m, x, y: (m.a(x), m.b(y)), a=nn.Linear(8, 8), b=nn.Conv2d(3, 4, 1))
    refused(
        PackLinears(tune=True), model, X, IMAGE, reason="torch's own kernel is the fastest", trace=fxopt_trace
    )
    rewritten(PackConvs(tune=True), model, X, IMAGE, sites=1, trace=fxopt_trace)
    times[nn.Linear]["onednn"] = 0.9
    rewritten(PackLinears(tune=True), model, X, IMAGE, sites=1, trace=fxopt_trace)
    times[nn.Conv2d]["onednn"] = 0.9  # but the copy takes 0.1
    monkeypatch.setattr("fxopt.passes.pack_convs.copying", lambda shape: 0.1)
    refused(
        PackConvs(tune=True), model, X, IMAGE, reason="torch's own kernels are as fast", trace=fxopt_trace
    )


@pytest.mark.parametrize(
    ("function", "borders"),
    [
        (lambda m, x: m.b(m.pool(m.norm(m.a(x)).relu())), 1),
        (lambda m, x: m.head(m.b(m.relu(m.a(x))).mean((2, 3))), 1),
        (lambda m, x: m.head(F.adaptive_avg_pool2d(m.b(m.a(x)), 1).flatten(1)), 0),
        (lambda m, x: (m.a(x).relu(), m.b(m.c(x).relu_()).view(2, -1)), 2),
        (lambda m, x: torch.cat([m.b(m.a(x)), m.c(x)], 1), 1),
        (lambda m, x: torch.cat([m.a(x), m.c(x)], 0), 2),
        (lambda m, x: m.a(x).permute(0, 2, 3, 1).reshape(2, -1, 6), 1),
        (lambda m, x: m.b(m.a(x).transpose(2, 3)), 2),
        (lambda m, x: m.b(F.pad(m.a(x), (1, 0, 1, 0))), 1),
        (lambda m, x: m.b(F.pad(m.a(x), (1, 0, 1, 0), mode="reflect")), 2),
        (
            lambda m, x: m.head(
                F.relu_(m.b(F.hardswish(m.a(x), inplace=True)).mean((2, 3), True)).flatten(1)
            ),
            1,
        ),
        (lambda m, x: F.relu_(m.a(x)).flatten(1), 1),
        (lambda m, x: m.a(x).add_(m.c(x)).flatten(1), 1),
        (lambda m, x: (lambda y: m.b(y * y.mean((2, 3), keepdim=True)))(m.a(x)), 1),
        (lambda m, x: m.b(F.interpolate(F.group_norm(m.a(x), 2), scale_factor=2.0)), 1),
        # Where nothing behind depends on the strides, there is no copy.
        (lambda m, x: m.head(m.a(x).flatten(2).transpose(1, 2)), 0),
        (lambda m, x: m.head(F.gelu(m.b(m.a(x)).permute(0, 2, 3, 1)).reshape(2, -1, 6) * 2), 0),
        (lambda m, x: m.normal(m.a(x).flatten(2).transpose(1, 2) + 1).sum(-1), 0),
        (lambda m, x: m.head(m.a(x).view(2, 6, -1).transpose(1, 2)), 0),
        (lambda m, x: m.head(m.a(x).view(2, -1, 6)), 1),
        (lambda m, x: m.a(x).as_strided((2, 144 * 6), (144 * 6, 1)) * 2, 1),
        (lambda m, x: m.head((m.a(x).permute(0, 2, 3, 1) + m.c(x).permute(0, 2, 3, 1)).relu()), 2),
        (lambda m, x: (m.a(x).flatten(2).transpose(1, 2) + 1).cos(), 1),
        (lambda m, x: (lambda y: (y.reshape(2, -1, 6), y.reshape(2, -1)))(m.a(x).permute(0, 2, 3, 1)), 1),
        (lambda m, x: m.a(x.to(memory_format=torch.channels_last)).permute(0, 2, 3, 1), 1),
        (lambda m, x: (lambda y: (y.add_(m.a(x)).flatten(1), y.sum()))(m.c(x).sigmoid() * 1), 1),
    ],
)
def test_regions_of_convolutions(function, borders):
    traced = fxopt.trace(randomise(convs(function).eval()), (IMAGE,))
    before, code = traced(IMAGE), traced.code
    PackConvs()(traced, verify=True)
    added = [node for node in traced.graph.nodes if node.target in (contiguous, channels_last)]
    assert len({*added} & {*PackConvs().get_transformed_nodes(traced)}) == borders
    with torch.no_grad():
        after = traced(IMAGE)
    pairs = zip(*(v if isinstance(v, tuple) else (v,) for v in (after, before)), strict=True)
    for one, other in pairs:
        assert torch.allclose(one, other, atol=1e-5)
        assert one.stride() == other.stride()
    assert fxopt.undo(traced).code == code


@pytest.mark.parametrize(
    ("function", "borders"),
    [
        (lambda m, x: m.b(F.gelu(m.a(x))), 1),
        (lambda m, x: (lambda y: m.b(y + y.relu()))(m.a(x)), 1),
        (lambda m, x: m.head(m.normal(m.b(m.a(x)).transpose(1, 2))), 0),
        (lambda m, x: m.head(F.avg_pool1d(m.a(x), 2).transpose(1, 2)), 1),
        (lambda m, x: m.b(F.pad(m.a(x), (1, 0))), 2),
        (lambda m, x: m.b(F.group_norm(m.a(x), 2)), 2),
        (lambda m, x: m.a(x).transpose(1, 2), 1),
        (lambda m, x: m.head(m.b(m.tokens(x.transpose(1, 2)).transpose(1, 2)).transpose(1, 2)), 0),
    ],
)
@pytest.mark.parametrize("batch", [1, 2])
def test_regions_of_convolutions_of_sequences(batch, function, borders):
    layers = {"a": nn.Conv1d(3, 6, 3, padding=1), "b": nn.Conv1d(6, 6, 1), "tokens": nn.Linear(3, 6)}
    model = randomise(module(function, **layers, head=nn.Linear(6, 4), normal=nn.LayerNorm(6)).eval())
    x = torch.randn(batch, 3, 12)
    traced = fxopt.trace(model, (x,))
    before, code = traced(x), traced.code
    PackConvs()(traced, verify=True)
    added = [node for node in traced.graph.nodes if node.target is contiguous]
    assert len(added) == borders
    with torch.no_grad():
        after = traced(x)
    assert torch.allclose(after, before, atol=1e-5)
    assert after.stride() == before.stride()
    assert fxopt.undo(traced).code == code


@pytest.mark.parametrize("batch", [1, 2])
def test_images_of_tokens_stay_in_channels_last(batch):
    def forward(m, x):
        images = [layer(x).transpose(1, 2).reshape(batch, 6, 12, 12) for layer in (m.head, m.head)]
        resized = [F.interpolate(image, size=(6, 6), mode="bilinear") for image in images]
        return m.b(torch.cat(resized, 1)).sum((2, 3))

    model = module(forward, head=nn.Linear(4, 6), b=nn.Conv2d(12, 6, 3))
    x = torch.randn(batch, 144, 4)
    after = rewritten(PackConvs(), model, x, sites=1, trace=fxopt_trace)
    entries = [node for node in after.graph.nodes if node.target is channels_last]
    assert len(entries) == (2 if batch == 1 else 1)
    inputs = []
    after.b.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    after(x)
    assert inputs[0].stride() == inputs[0].contiguous(memory_format=torch.channels_last).stride()
    assert inputs[0].stride()[1] == 1


@pytest.mark.parametrize("size", [(4, 3, 5), (1, 3, 5)])
def test_a_batch_of_one_says_that_it_is_in_channels_last(size):
    batch, channels, side = size
    value = torch.randn(batch, side * side, channels).transpose(1, 2).reshape(batch, channels, side, side)
    found = channels_last(value)
    assert found.stride() == (channels * side * side, 1, channels * side, channels)
    assert found.data_ptr() == value.data_ptr()


def test_the_copy_in_front_of_a_region_is_measured(monkeypatch):
    monkeypatch.setattr(tuning, "measured", lambda *_: {"plain": 1.0, "onednn": 0.5})
    asked = []
    monkeypatch.setattr("fxopt.passes.pack_convs.copying", lambda shape: asked.append(tuple(shape)) or 0.4)
    model = module(lambda m, x: m.b(x).sum((2, 3)), b=nn.Conv2d(3, 4, 1))
    refused(PackConvs(tune=True), model, IMAGE, reason="torch's own kernels", trace=fxopt_trace)
    assert asked[:2] == [(2, 4, 12, 12), (2, 3, 12, 12)]
    last = module(
        lambda m, x: m.b(x.to(memory_format=torch.channels_last) + 1).sum((2, 3)), b=nn.Conv2d(3, 4, 1)
    )
    rewritten(PackConvs(tune=True), last, IMAGE, sites=1, trace=fxopt_trace)


def test_a_layer_called_twice_is_refused():
    refused(
        PackConvs(),
        convs(lambda m, x: m.a(x) + m.a(x * 2)),
        IMAGE,
        reason="called more than once",
        trace=fxopt_trace,
    )


def twice(value):
    return value, F.dropout(value, training=False)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda m, x: (lambda y: (y.view(2, -1).add_(1), y))(m.a(x)), "may write"),
        (lambda m, x: (lambda y: (y.relu(), y.sum((2, 3)), F.relu_(y.view(2, -1))))(m.a(x)), "may write"),
        (lambda m, x: (lambda y: (y[:, :2].add_(1), y.sum()))(torch.cat([m.a(x), m.c(x)], 1)), "may write"),
        (
            lambda m, x: (lambda y: (y.view(2, -1).add_(1), m.b(y)))(m.a(x)),
            "add_ may write into the memory of a after",
        ),
        (lambda m, x: (lambda y: (y.view(2, -1), F.relu_(y).sum()))(m.a(x)), "may share memory"),
        (
            lambda m, x: (lambda y: (lambda v, w: v.sum() + w.sum())(y.view(2, -1), F.relu_(y)))(m.a(x)),
            "relu_ may write",
        ),
        (
            lambda m, x: (lambda z: (z.add_(m.a(x)).view(2, -1).mul_(2), z.sum()))(x.repeat(1, 2, 1, 1)),
            "mul_ may write",
        ),
        (
            lambda m, x: (lambda y: (y, F.dropout(y, training=False)))(m.a(x)),
            "may share memory that the graph returns",
        ),
        (
            lambda m, x: (lambda y: (m.head(y.reshape(2, -1, 6).add_(1)), m.head(y)))(
                m.a(x).permute(0, 2, 3, 1)
            ),
            "add_ may write",
        ),
        # Whether this is a view depends on the layout of the inputs.
        (lambda m, x: (lambda y: (y.flatten(1), y[:, 0].zero_())[0])(m.a(x)), "after that is copied"),
        (
            lambda m, x: (lambda y, z: (z.mul_(2), y + 1)[1])(*torch.broadcast_tensors(*twice(m.a(x)))),
            "after that is copied",
        ),
    ],
)
def test_writes_across_a_border_are_refused(function, reason):
    refused(PackConvs(), convs(function), IMAGE, reason=reason, trace=fxopt_trace)


@pytest.mark.parametrize(
    "use",
    [
        lambda m, x: F.interpolate(F.adaptive_avg_pool2d(m.a(x), 1), size=(4, 4)).view(2, -1),
        lambda m, x: F.pad(F.adaptive_avg_pool2d(m.a(x), 1), (1, 1, 1, 1), mode="replicate").view(2, -1),
        lambda m, x: F.adaptive_avg_pool2d(m.a(x), 1),
        lambda m, x: m.a(x)[:, :1],
    ],
)
def test_strides_that_sizes_of_one_leave_open(use):
    traced = fxopt.trace(randomise(convs(use).eval()), (IMAGE,))
    with torch.no_grad():
        wanted = traced(IMAGE)
        found = PackConvs()(traced)(IMAGE)
    assert found.stride() == wanted.stride()
    assert torch.allclose(found, wanted, atol=1e-5)


def test_an_image_without_a_batch_where_nobody_checks_inputs():
    traced = torch.fx.symbolic_trace(randomise(nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU())).eval())
    FakeTensorProp(traced, FakeTensorMode(allow_non_fake_inputs=True)).propagate(IMAGE)
    with torch.no_grad():
        wanted = traced(IMAGE[0])
        torch.testing.assert_close(PackConvs()(traced)(IMAGE[0]), wanted)


def test_a_residual_that_is_written_before_the_activation_is_refused():
    def late(m, x):
        other = m.c(x) * 2
        y = m.a(x) + other
        other.add_(5)
        return y.relu() + other

    traced = PackConvs()(fxopt.trace(randomise(convs(late).eval()), (IMAGE,)))
    with torch.no_grad():
        wanted = traced(IMAGE)
        FuseEpilogues()(traced, verify=True)
        assert torch.allclose(traced(IMAGE), wanted, atol=1e-5)
    assert "may write into" in str(FuseEpilogues().explain(traced))


def test_gradients_of_a_residual_stay():
    layer, residual = nn.Linear(8, 8).requires_grad_(False), torch.randn(5, 8, requires_grad=True)
    traced = fxopt.trace(module(lambda m, x, y: m.a(x) + y, a=layer).eval(), (X, residual))
    fused = FuseEpilogues()(PackLinears()(traced))
    fused(X, residual).sum().backward()
    assert torch.equal(residual.grad, torch.ones(5, 8))


@pytest.mark.parametrize("shape", [(2, 1, 9), (2, 1, 9, 9)])
def test_one_channel_in_the_strides_of_both_layouts(shape):
    layer = (nn.Conv1d if len(shape) == 3 else nn.Conv2d)(1, 4, 3)
    usual = torch.randn(shape)
    unusual = usual.movedim(1, -1).clone(memory_format=torch.contiguous_format).movedim(-1, 1)
    reason = "its one channel has the strides of both"
    refused(PackConvs(), nn.Sequential(layer), unusual, reason=reason, trace=fxopt_trace)
    rewritten(PackConvs(), nn.Sequential(layer), usual, sites=1, trace=fxopt_trace)
    rewritten(PackConvs(), module(lambda m, x: m.a(x).sum(-1), a=layer), unusual, sites=1, trace=fxopt_trace)


def test_an_image_without_a_batch_is_refused():
    refused(PackConvs(), convs(lambda m, x: m.a(x)), IMAGE[0], reason="no batch dimension", trace=fxopt_trace)


FUSED = [
    (lambda m, x: m.a(x).relu(), 1),
    (lambda m, x: F.relu6(m.a(x)), 1),
    (lambda m, x: F.gelu(m.a(x)), 1),
    (lambda m, x: F.gelu(m.a(x), approximate="tanh"), 1),
    (lambda m, x: F.silu(m.b(x)), 1),
    (lambda m, x: m.a(x) + x, 1),
    (lambda m, x: x + m.a(x), 1),
    (lambda m, x: m.a(x).add_(x).relu(), 1),  # a linear kernel adds or activates
    (lambda m, x: m.a(x) + m.b(x), 1),
]


@pytest.mark.parametrize(("function", "sites"), FUSED)
def test_epilogues_of_linears(function, sites):
    model = randomise(linears(function).eval())
    traced = fxopt.trace(model, (X,))
    with torch.no_grad():
        before, code = traced(X), PackLinears()(traced).code
        assert len(FuseEpilogues().explain(traced).sites) == sites
        FuseEpilogues()(traced, verify=True)
        assert len(FuseEpilogues().get_transformed_nodes(traced)) == sites
        assert all(len(call.kwargs) <= 1 for call in traced.graph.find_nodes(op="call_module"))
        assert torch.allclose(traced(X), before, atol=1e-5)
    assert fxopt.undo(traced).code == code


def test_epilogues_of_convolutions_add_and_activate():
    def block(m, x):
        y = m.relu(m.a(x))
        return m.relu(m.b(y).add_(y))

    traced = fxopt.trace(randomise(convs(block).eval()), (IMAGE,))
    with torch.no_grad():
        before, code = traced(IMAGE), PackConvs()(traced).code
        FuseEpilogues()(traced, verify=True)
        calls = [node for node in traced.graph.nodes if node.target in ("a", "b")]
        assert [{*call.kwargs} for call in calls] == [{"activation"}, {"other", "activation"}]
        assert torch.allclose(traced(IMAGE), before, atol=1e-5)
    assert fxopt.undo(traced).code == code


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: (lambda y: (y.relu(), y))(m.a(x)),
        lambda m, x: F.elu(m.a(x)),
        lambda m, x: m.a(x) + 1,
        lambda m, x: m.a(x) + x[:, :1],
        lambda m, x: m.a(x) + x.double(),
        lambda m, x: torch.add(m.a(x), x, alpha=2),
        lambda m, x: x.clone().add_(m.a(x)),
        lambda m, x: (lambda y: y + y)(m.a(x)),
    ],
)
def test_no_epilogue(function):
    traced = PackLinears()(fxopt.trace(randomise(linears(function).eval()), (X,)))
    assert not FuseEpilogues().explain(traced).sites


def test_a_write_into_the_input_between_is_refused():
    def late(m, x):
        x = x.clone()
        y = m.a(x)
        x.add_(1)
        return y.relu() + x

    traced = PackLinears()(fxopt.trace(linears(late).eval(), (X,)))
    assert "may write into" in str(FuseEpilogues().explain(traced))


POOLED = {
    "flatten": lambda m, y: m.pool(y).flatten(1),
    "module": lambda m, y: m.flat(m.pool(y)),
    "view": lambda m, y: m.pool(y).view(y.shape[0], -1),
    "interpolate": lambda m, y: F.interpolate(y, size=(1, 1), mode="bilinear").flatten(1),
}


@pytest.mark.parametrize("end", POOLED)
def test_a_view_behind_pooling_shares_nothing_with_activations_in_place(end):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
            self.act, self.act2 = nn.ReLU(inplace=True), nn.ReLU(inplace=True)
            self.pool, self.flat, self.head = nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(16, 4)

        def forward(self, x):
            y = self.act(self.a(x))
            return self.head(POOLED[end](self, self.act2(self.b(y) + y)))

    model, x = Net().eval(), torch.randn(2, 3, 16, 16)
    traced = fxopt.trace(model, (x,))
    assert len(fxopt.PackConvs().explain(traced).sites) == 1
    with torch.no_grad():
        torch.testing.assert_close(fxopt.PackConvs()(traced)(x), model(x))


def test_pooling_and_interpolation_give_new_memory():
    """Also where the sizes stay as they are: what a pass may rely on."""
    for shape in ((2, 3, 1, 1), (2, 3, 4, 4)):
        for layout in (torch.contiguous_format, torch.channels_last):
            x = torch.randn(shape).contiguous(memory_format=layout)
            made = [F.adaptive_avg_pool2d(x, size) for size in (1, shape[-1], (None, None))]
            made += [F.interpolate(x, size=shape[-2:], mode=mode) for mode in ("nearest", "bilinear", "area")]
            made += [F.interpolate(x, scale_factor=1, mode="bicubic")]
            assert all(each.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() for each in made)


def test_a_scripted_layer_behind_is_no_activation():
    model = nn.Sequential(nn.Linear(8, 8), torch.jit.script(nn.Linear(8, 8)), nn.Linear(8, 8)).eval()
    assert len(PackLinears().explain(fxopt.trace(model, (X,))).sites) == 2
