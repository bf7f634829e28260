"""Packed layers: they compute what the plain layer does, and are the plain layer where a kernel would not do."""

import copy
import dataclasses
import pickle
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fxopt import kernels
from fxopt.activations import ACTIVATIONS
from fxopt.kernels import fuses_epilogues, kernels_for, packed_layer, packed_weight, unchecked_function
from fxopt.memory_formats import channels_last
from fxopt.packed_operators import ACTIVATED, available

LINEAR, CONV, PIXELS = nn.Linear(24, 16), nn.Conv2d(6, 8, 3, padding=1), nn.Conv2d(6, 8, 1)
SEQUENCES, TOKENS = nn.Conv1d(6, 8, 3, padding=1), nn.Conv1d(6, 8, 1)
SHAPES = {nn.Linear: (5, 24), nn.Conv1d: (2, 6, 9), nn.Conv2d: (2, 6, 9, 7)}
CASES = [(layer, name) for layer in (LINEAR, SEQUENCES, TOKENS, CONV, PIXELS) for name in kernels_for(layer)]
# What runs the tests is an x86 processor; elsewhere nothing of this can be shown.
pytestmark = pytest.mark.skipif(not CASES, reason="this build of torch has no packed kernels")


def random_layer(layer, dtype=torch.float32, bias=True):
    layer = copy.deepcopy(layer).to(dtype).requires_grad_(False)
    torch.manual_seed(0)
    layer.weight.copy_(torch.randn(layer.weight.shape))
    if bias:
        layer.bias.copy_(torch.randn(layer.bias.shape))
    else:
        layer.bias = None
    return layer


def assert_close(found, layer, x, other=None, activation=None):
    """Equal to the layer in float64, as far as the dtype of `x` tells."""
    exact = copy.deepcopy(layer).double()(x.double())
    exact = exact if other is None else exact + other.double()
    if activation:
        exact = ACTIVATIONS[activation].function(exact, **ACTIVATIONS[activation].options)
    assert found.dtype == x.dtype
    assert found.shape == exact.shape
    eps = torch.finfo(x.dtype).eps
    assert torch.allclose(found.double(), exact, rtol=16 * eps, atol=128 * eps)


def uses_kernel(packed, x):
    packed.__dict__.pop("_packed", None)
    packed(x)
    return "_packed" in vars(packed)


@pytest.mark.parametrize(("layer", "kernel"), CASES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_kernel_computes_the_layer(layer, kernel, bias, dtype):
    layer = random_layer(layer, dtype, bias)
    if kernel not in kernels_for(layer):
        pytest.skip(f"{kernel} does not take {dtype} here")
    shape = SHAPES[type(layer)]
    packed = packed_layer(layer, kernel, shape)
    for size in (shape, (1, *shape[1:]), (7, *shape[1:])):
        x = torch.randn(size).to(dtype)
        assert_close(packed(x), layer, x)
    assert "_packed" in vars(packed)
    x = torch.randn(shape).to(dtype)
    other = torch.randn(layer(x).shape).to(dtype)
    kept = other.clone()
    for activation in (None, *ACTIVATED):
        assert_close(packed(x, activation=activation), layer, x, None, activation)
        assert_close(packed(x, other, activation), layer, x, other, activation)
        assert torch.equal(other, kept)
    for broadcast in (torch.randn(1).to(dtype), torch.randn(3, *[1] * len(shape)).to(dtype)):
        assert_close(packed(x, broadcast), layer, x, broadcast)


@pytest.mark.parametrize("kernel", kernels_for(LINEAR))
def test_linear_takes_any_strides_and_ranks(kernel):
    layer = random_layer(LINEAR)
    packed = packed_layer(layer, kernel, (4, 24))
    for x in (
        torch.randn(24),
        torch.randn(3, 4, 24).transpose(0, 1),
        torch.randn(4, 48)[:, ::2],
        torch.randn(1, 24).expand(5, 24),
        torch.randn(2, 3, 4, 24),
        torch.randn(25)[1:],
    ):
        assert_close(packed(x), layer, x)
    assert packed(torch.randn(0, 24)).shape == (0, 16)


@pytest.mark.parametrize(
    "options",
    [
        {"stride": 2},
        {"padding": "same"},
        {"padding": "valid"},
        {"dilation": 2, "padding": 1},
        {"groups": 2},
        {"groups": 6, "kernel_size": 5},
        {"kernel_size": 1},
        {"kernel_size": (1, 3), "padding": (0, 1)},
        {"padding": "same", "kernel_size": 4},
        {"padding": 1, "padding_mode": "reflect"},
    ],
)
@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d])
def test_convolutions_of_all_kinds(kind, options):
    if kind is nn.Conv1d:
        options = {name: each[1:] if isinstance(each, tuple) else each for name, each in options.items()}
    layer = random_layer(kind(6, 12, **{"kernel_size": 3} | options))
    kernels = kernels_for(layer)
    assert bool(kernels) == (options.get("kernel_size") != 4 and "padding_mode" not in options)
    for kernel in kernels:
        packed, x = packed_layer(layer, kernel, SHAPES[kind]), torch.randn(SHAPES[kind])
        assert_close(packed(x), layer, x)
        assert_close(packed(channels_last(x)), layer, x)
        assert_close(packed(x[0]), layer, x[0])
        other = torch.randn(layer(x).shape)
        assert_close(packed(x, other, "relu"), layer, x, other, "relu")
        assert packed(x[:0]).shape == layer(x[:0]).shape


@pytest.mark.parametrize(("layer", "kernel"), CASES)
def test_what_changes_the_weight_is_followed(layer, kernel):
    layer = random_layer(layer)
    shape = SHAPES[type(layer)]
    packed, x = packed_layer(layer, kernel, shape), torch.randn(shape)
    for change in (
        lambda: layer.weight.mul_(2),
        lambda: layer.load_state_dict({n: torch.randn_like(p) for n, p in layer.state_dict().items()}),
        lambda: setattr(layer.weight, "data", torch.randn_like(layer.weight)),
        lambda: layer.bias.add_(1),
    ):
        packed(x)
        change()
        assert_close(packed(x), layer, x)
    packed.weight = nn.Parameter(torch.randn_like(layer.weight), False)
    assert not torch.equal(packed(x), layer(x))


@pytest.mark.parametrize(("layer", "kernel"), CASES)
def test_plain_where_the_kernel_would_not_do(layer, kernel):
    layer = random_layer(layer)
    shape = SHAPES[type(layer)]
    packed, x = packed_layer(layer, kernel, shape), torch.randn(shape)
    assert uses_kernel(packed, x)
    wanted = torch.autograd.grad(layer(x.requires_grad_()).square().sum(), x)
    assert torch.equal(torch.autograd.grad(packed(x).square().sum(), x)[0], wanted[0])
    with torch.no_grad():
        assert uses_kernel(packed, x)
    x = x.detach()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(packed(x), layer(x))
    assert torch.equal(torch.func.vmap(packed)(x), torch.func.vmap(layer)(x))
    assert torch.equal(copy.deepcopy(packed).double()(x.double()), copy.deepcopy(layer).double()(x.double()))
    assert copy.deepcopy(packed).to("meta")(x.to("meta")).is_meta
    training = copy.deepcopy(packed).requires_grad_()
    training(x).sum().backward()
    assert training.weight.grad is not None


@pytest.mark.parametrize(("layer", "kernel"), CASES)
def test_copies_and_pickles_pack_anew(layer, kernel):
    layer = random_layer(layer)
    shape = SHAPES[type(layer)]
    packed, x = packed_layer(layer, kernel, shape), torch.randn(shape)
    wanted = packed(x)
    for copied in (copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))):
        assert "_packed" not in vars(copied)
        assert torch.equal(copied(x), wanted)
    assert list(packed.state_dict()) == list(layer.state_dict())


@pytest.mark.parametrize("kernel", ["int8", "int8_weight"])
@pytest.mark.parametrize("bias", [True, False])
def test_int8_rounds_and_nothing_more(kernel, bias):
    layer = random_layer(nn.Linear(128, 13))
    layer.bias = layer.bias if bias else None
    assert kernel not in kernels_for(layer)
    if kernel not in kernels_for(layer, rounding=True):
        pytest.skip(f"this processor and this build of torch have no kernel for {kernel}")
    for packed_for in (1, 5):
        packed = packed_layer(layer, kernel, (packed_for, 128))
        for rows in (1, 2, 3, 5, 8, 33):
            for x in (torch.randn(rows, 128), torch.randn(2, rows, 128), torch.randn(128, rows).T):
                wanted = layer(x)
                assert (packed(x) - wanted).norm() < 0.02 * wanted.norm()
                assert packed(x).shape == wanted.shape
        assert packed(torch.randn(128)).shape == (13,)
        assert packed(torch.randn(0, 128)).shape == (0, 13)
        for rows in (1, 2):
            broken = torch.randn(rows, 128)
            broken[:, 3] = torch.nan
            assert packed(broken).isnan().all()
            assert packed(torch.full((rows, 128), torch.nan)).isnan().all()
    layer.weight[0] = 0
    layer.weight[1] *= 1e-4
    if bias:
        layer.bias[1] = 0
    assert torch.allclose(packed(x)[:, 0], layer.bias[0] if bias else torch.zeros(()))
    assert (packed(x) - layer(x))[:, 1].norm() < 0.02 * layer(x)[:, 1].norm()


def test_rows_are_quantized_one_by_one():
    layer = random_layer(nn.Linear(64, 16))
    if "int8" not in kernels_for(layer, rounding=True):
        pytest.skip("this processor and this build of torch have no kernel for int8")
    packed = packed_layer(layer, "int8", (3, 64))
    x = torch.randn(3, 64)
    large = torch.stack([x[0], x[1] * 1e4, torch.zeros(64)])
    assert torch.equal(packed(large)[0], packed(x)[0])
    assert torch.equal(packed(large)[2], layer.bias)


def test_kernels_have_the_features_that_they_can_take():
    assert "int8_weight" not in kernels_for(random_layer(nn.Linear(96, 16)), rounding=True)
    narrow = packed_layer(random_layer(nn.Linear(24, 16)), "int8_weight", (5, 24))
    assert torch.equal(narrow(torch.ones(5, 24)), F.linear(torch.ones(5, 24), narrow.weight, narrow.bias))


@pytest.mark.parametrize(("layer", "kernel"), CASES)
def test_what_the_layer_refuses_is_refused(layer, kernel):
    layer = random_layer(layer)
    shape = SHAPES[type(layer)]
    packed = packed_layer(layer, kernel, shape)
    wrong = torch.randn(shape)[:, :3]
    for each in (layer, packed):
        with pytest.raises(RuntimeError):
            each(wrong)
    packed(torch.randn(shape))
    packed.weight.data = packed.weight.data[:4]
    packed.bias.data = packed.bias.data[:4]
    assert packed(torch.randn(shape)).shape[1] == 4


@pytest.mark.parametrize(("layer", "kernel"), CASES)
def test_not_a_number_stays_so(layer, kernel):
    layer = random_layer(layer)
    packed, x = (
        packed_layer(layer, kernel, SHAPES[type(layer)]),
        torch.full(SHAPES[type(layer)], float("nan")),
    )
    for activation in (None, *ACTIVATED):
        assert packed(x, activation=activation).isnan().all()
        assert packed(x, torch.ones_like(layer(x)), activation).isnan().all()


@pytest.mark.parametrize(("layer", "kernel"), CASES)
def test_other_tools_see_the_plain_layer(layer, kernel):
    layer = random_layer(layer)
    shape = SHAPES[type(layer)]
    packed, x = packed_layer(layer, kernel, shape), torch.randn(shape)
    traced = torch.jit.trace(packed, x)
    assert torch.equal(traced(x), layer(x))
    with FlopCounterMode(display=False) as counter:
        packed(x)
    assert counter.get_total_flops() > 0
    assert torch.equal(torch.fx.symbolic_trace(nn.Sequential(packed))(x), layer(x))
    parametrized = torch.nn.utils.parametrizations.weight_norm(packed)
    assert torch.allclose(parametrized(x), layer(x), atol=1e-5)


def test_under_torch_compile_it_is_the_plain_layer():
    layer = random_layer(LINEAR)
    packed, x = packed_layer(layer, kernels_for(layer)[0], (5, 24)), torch.randn(5, 24)
    compiled = torch.compile(packed, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), F.linear(x, layer.weight, layer.bias))


def test_a_kernel_that_this_machine_lacks_is_the_plain_layer():
    layer = random_layer(LINEAR)
    packed, x = packed_layer(layer, "of another machine", (5, 24)), torch.randn(5, 24)
    assert torch.equal(packed(x), layer(x))
    assert not fuses_epilogues(packed)
    assert not kernels_for(copy.deepcopy(layer).to("meta"))
    assert not kernels_for(copy.deepcopy(layer).double())


@pytest.mark.parametrize(("layer", "kernel"), CASES)
def test_forward_mode_gradients_are_those_of_the_layer(layer, kernel):
    layer = random_layer(layer)
    shape = SHAPES[type(layer)]
    packed, x = packed_layer(layer, kernel, shape), torch.randn(shape)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        found, wanted = (
            torch.autograd.forward_ad.unpack_dual(each(dual)).tangent for each in (packed, layer)
        )
    assert torch.equal(found, wanted)


def test_a_step_of_a_fused_optimizer_is_followed():
    layer = random_layer(LINEAR).requires_grad_()
    packed, x = packed_layer(layer, kernels_for(layer)[0], (5, 24)), torch.randn(5, 24)
    optimizer = torch.optim.SGD(packed.parameters(), lr=0.1, fused=True)
    packed(x).square().sum().backward()
    with torch.no_grad():
        packed(x)  # a metric, say
    optimizer.step()
    with torch.no_grad():
        assert torch.allclose(packed(x), layer(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("layer", "kernel"), [case for case in CASES if type(case[0]) is nn.Linear])
def test_layers_of_one_weight_share_what_serves_all_shapes(layer, kernel):
    layer = random_layer(layer)
    several, one = (packed_layer(layer, kernel, (rows, layer.in_features)) for rows in (8, 1))
    x = torch.randn(1, layer.in_features)
    assert_close(several(x), layer, x)
    assert_close(one(x), layer, x)
    shared = packed_weight(several) is packed_weight(one)
    assert shared == available(nn.Linear)[kernel].any_shape
    gone = weakref.ref(packed_weight(several))
    layer.weight.mul_(2)
    assert_close(one(x), layer, x)
    assert packed_weight(one) is not packed_weight(several)
    assert_close(several(x), layer, x)
    assert (packed_weight(several) is packed_weight(one)) == shared
    assert gone() is None


def test_convolutions_of_one_weight_are_packed_for_each_shape():
    layer = random_layer(nn.Conv2d(3, 8, 3))
    inputs = [torch.randn(1, 3, size, size) for size in (8, 32)]
    convs = [packed_layer(layer, "onednn", x.shape) for x in inputs]
    for conv, x in zip(convs, inputs, strict=True):
        assert_close(conv(x), layer, x)
    assert packed_weight(convs[0]) is not packed_weight(convs[1])


def test_a_new_layer_does_not_take_what_was_packed_before_a_write_without_trace():
    layer = random_layer(nn.Linear(64, 16))
    first, second = (packed_layer(layer, "onednn", (2, 64)) for _ in range(2))
    x = torch.randn(2, 64)
    first(x)
    layer.weight.data.mul_(2)  # as a step of a fused optimizer
    assert_close(second(x), layer, x)
    layer.weight.data = layer.weight.data.to(torch.bfloat16)
    layer.bias.data = layer.bias.data.to(torch.bfloat16)
    third = packed_layer(layer, "onednn", (2, 64))
    assert_close(third(x.to(torch.bfloat16)), layer, x.to(torch.bfloat16))


@pytest.mark.parametrize(("layer", "kernel"), CASES)
def test_a_bias_with_gaps_is_not_read_as_one_without(layer, kernel):
    layer = random_layer(layer)
    layer.bias = nn.Parameter(torch.stack([layer.bias, layer.bias + 7], 1)[:, 0], False)
    shape = SHAPES[type(layer)]
    packed, x = packed_layer(layer, kernel, shape), torch.randn(shape)
    assert_close(packed(x), layer, x)
    assert unchecked_function(packed, x.dtype) is None


def test_threads_share_what_is_packed_for_one_weight(monkeypatch):
    """Two threads call two layers of one weight at once for the first time."""
    kernel = next((name for name in kernels_for(LINEAR) if available(nn.Linear)[name].any_shape), None)
    if kernel is None:
        pytest.skip("no kernel serves all shapes")
    found, layer = available(nn.Linear)[kernel], random_layer(LINEAR)

    def slow(*args):
        time.sleep(0.1)
        return found.pack(*args)

    monkeypatch.setattr(kernels, "_kernel_of", lambda packed: dataclasses.replace(found, pack=slow))
    layers = [packed_layer(layer, kernel, SHAPES[nn.Linear]) for _ in range(2)]
    x = torch.randn(SHAPES[nn.Linear])
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda each: each(x), layers))
    assert packed_weight(layers[0]) is packed_weight(layers[1])
