"""Options of convolutions, memory formats, and the other convolutions, which no pass but `FoldBatchNorms` knows."""

import copy

import pytest
import torch
from torch import nn

import fxopt
from fxopt.testing import assert_equivalent, assert_round_trip, randomise
from tests.hazards.sites import SITES, Use, own_leaves, safe

SITE = SITES["conv-norm"]
IMAGE = torch.randn(2, 4, 6, 7)
OPTIONS = {
    "groups": {"groups": 2},
    "depthwise": {"groups": 4, "bias": False},
    "dilation": {"dilation": (2, 1), "groups": 2},
    "stride": {"stride": (2, 3), "padding": 1, "groups": 2},
    "same": {"padding": "same", "dilation": 2},
    **{
        mode: {"padding": (1, 2), "padding_mode": mode}
        for mode in ("zeros", "reflect", "replicate", "circular")
    },
}


def model(layer, norm):
    return Use(lambda m, x: m.norm(m.a(x)) + 1, a=layer, norm=norm)


@pytest.mark.parametrize("tracer", ["fx", "own"])
@pytest.mark.parametrize("options", OPTIONS)
def test_options_stay(options, tracer):
    layer = nn.Conv2d(4, 8, 3, **OPTIONS[options])
    after = safe(SITE, model(layer, nn.BatchNorm2d(8)), tracer, IMAGE)
    shown = repr(nn.Conv2d(4, 8, 3, **OPTIONS[options] | {"bias": True}))
    assert repr(after.a) == shown


@pytest.mark.parametrize("of_input", [False, True])
@pytest.mark.parametrize("of_weight", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_the_memory_format_stays(groups, of_weight, of_input):
    formats = {False: torch.contiguous_format, True: torch.channels_last}
    layer = nn.Conv2d(4, 8, 3, groups=groups).to(memory_format=formats[of_weight])
    image = IMAGE.to(memory_format=formats[of_input])
    whole = randomise(model(layer, nn.BatchNorm2d(8)).eval())
    strides, expected = layer.weight.stride(), whole(image)
    before = own_leaves(whole, [image])
    after = SITE.pass_(own_leaves(whole, [image]))
    assert_equivalent(before, after, [image], float64=_in_float64(whole, image))
    assert after.a.weight.stride() == strides
    assert after(image).stride() == expected.stride()
    undone = SITE.pass_(after, reverse=True)
    assert undone.a.weight.stride() == strides
    assert_round_trip(before, undone)


def _in_float64(whole, image):
    wide = copy.deepcopy(whole).double()
    return tuple(apply(own_leaves(wide, [image.double()])) for apply in (lambda gm: gm, SITE.pass_))


OTHERS = {
    "Conv1d": (nn.Conv1d, nn.BatchNorm1d, 1, {}),
    "Conv3d": (nn.Conv3d, nn.BatchNorm3d, 3, {}),
    "ConvTranspose1d": (nn.ConvTranspose1d, nn.BatchNorm1d, 1, {}),
    "ConvTranspose2d": (nn.ConvTranspose2d, nn.BatchNorm2d, 2, {}),
    "ConvTranspose2d with groups": (
        nn.ConvTranspose2d,
        nn.BatchNorm2d,
        2,
        {"groups": 2, "stride": 2, "output_padding": 1},
    ),
    "ConvTranspose3d": (nn.ConvTranspose3d, nn.BatchNorm3d, 3, {}),
    "of as many channels": (nn.ConvTranspose2d, nn.BatchNorm2d, 2, {"out_channels": 4}),
}


def other_convolution(other):
    """A traced model with it, and an input."""
    conv, norm, dimensions, options = OTHERS[other]
    layer = conv(4, **{"out_channels": 8, "kernel_size": 3} | options)
    x = torch.randn(2, 4, *([5] * dimensions))
    return own_leaves(randomise(model(layer, norm(layer.out_channels)).eval()), [x]), x


@pytest.mark.sweep(3)
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize(
    "name",
    [
        name
        for name in SITES
        if name not in ("precision", "division", "conv1d-norm", "transposed-norm", "conv-pack", "conv1d-pack")
    ],
)
def test_other_convolutions_are_left_alone(other, name):
    traced, _ = other_convolution(other)
    before = copy.deepcopy(traced)
    assert not SITES[name].pass_.explain(traced).sites
    assert_round_trip(before, SITES[name].pass_(traced))


@pytest.mark.parametrize("other", [other for other in OTHERS if other != "Conv1d"])
def test_convolutions_that_have_no_packed_kernel(other):
    traced, _ = other_convolution(other)
    assert not fxopt.PackConvs().explain(traced).sites


@pytest.mark.parametrize("other", OTHERS)
def test_other_convolutions_in_a_lower_precision_come_back(other):
    before, x = other_convolution(other)
    pass_ = fxopt.ChangePrecision()
    after = pass_(copy.deepcopy(before))
    assert after.a.weight.dtype == torch.bfloat16
    with torch.no_grad():
        expected = before(x)
        assert (after(x) - expected).norm() < 0.02 * expected.norm()
    assert_round_trip(before, pass_(after, reverse=True))
