"""FoldPadding: zeros in front of a convolution become its own padding."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxopt
from fxopt import FoldPadding, UndoError
from fxopt.testing import assert_equivalent, assert_round_trip
from tests.modules import module

PADS = [(1, 1, 1, 1), (0, 1, 0, 1), (1, 0, 2, 1), (3, 2, 0, 0), (2, 0, 0, 2)]


def padded(pads, **options):
    return nn.Sequential(nn.ZeroPad2d(pads), nn.Conv2d(3, 4, (3, 2), **options)).eval().double()


@pytest.mark.parametrize("pads", PADS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"padding": (1, 0)},
        {"padding": "valid"},
        {"stride": 2},
        {"stride": 3, "padding": 1, "bias": False},
    ],
)
def test_all_sides_and_sizes(pads, options):
    for height, width in itertools.product((9, 10), repeat=2):
        model, x = padded(pads, **options), torch.randn(2, 3, height, width, dtype=torch.float64)
        traced = fxopt.trace(model, (x,))
        before = copy.deepcopy(traced)
        FoldPadding()(traced, verify=True)
        assert len(traced.graph.find_nodes(op="call_module")) == 2  # the guard and the convolution
        torch.testing.assert_close(traced(x), model(x))
        if pads == (1, 1, 1, 1):  # zeros of a larger kernel make NaN of infinity
            assert_equivalent(model, traced, (x,))
        assert_round_trip(before, FoldPadding()(traced, reverse=True))


@pytest.mark.parametrize("value", [(), ("constant",), ("constant", 0), ("constant", 0.0), ("constant", None)])
def test_each_way_to_pad_with_zeros(value):
    model = module(lambda m, x: m.conv(F.pad(x, [1, 1, 2, 2], *value)), conv=nn.Conv2d(3, 4, 3)).eval()
    x = torch.randn(1, 3, 8, 8)
    assert_equivalent(model, FoldPadding()(fxopt.trace(model, (x,)), verify=True), (x,))
    assert len(FoldPadding().explain(fxopt.trace(model, (x,))).sites) == 1


@pytest.mark.parametrize(
    ("pad", "conv", "reason"),
    [
        (lambda x: F.pad(x, (1, -1, 0, 0)), nn.Conv2d(3, 4, 3), "it crops"),
        (lambda x: F.pad(x, (1, 1, 1, 1)), nn.Conv2d(3, 4, 2, padding="same"), "differently"),
        (
            lambda x: F.pad(x, (1, 1, 1, 1)),
            nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"),
            "other values",
        ),
        (lambda x: F.pad(x, (0, 1, 0, 1)), nn.Conv2d(3, 4, 3, dilation=2), "and the kernel is dilated"),
        (lambda x: F.pad(x.repeat(1, 3, 1, 1), (0, 1, 0, 1)), nn.Conv2d(9, 4, 3), "would cost more"),
        (lambda x: F.pad(x, (1, 1, 1, 1), "constant", 1.0), nn.Conv2d(3, 4, 3), None),
        (lambda x: F.pad(x, (1, 1, 1, 1), "reflect"), nn.Conv2d(3, 4, 3), None),
        (lambda x: F.pad(x, (1, 1)), nn.Conv2d(3, 4, 3), None),
    ],
)
def test_what_stays(pad, conv, reason):
    model = module(lambda m, x: m.conv(pad(x)), conv=conv).eval()
    explanation = FoldPadding().explain(fxopt.trace(model, (torch.randn(1, 3, 9, 9),)))
    assert not explanation.sites
    assert [reason in why for _, _, why in explanation.refusals] == ([True] if reason else [])


def test_equal_sides_share_the_weight_and_a_larger_kernel_has_its_own():
    for pads, shared in (((1, 1, 1, 1), True), ((0, 1, 0, 1), False)):
        model = padded(pads)
        traced = FoldPadding()(fxopt.trace(model, (torch.randn(1, 3, 8, 8, dtype=torch.float64),)))
        layer = traced.get_submodule("1")
        assert (layer.weight is model[1].weight) is shared
        assert layer.bias is model[1].bias
        assert model[1].padding == (0, 0)
        assert model[1].kernel_size == (3, 2)


def test_undo_keeps_training_and_refuses_where_the_zeros_were_trained():
    model, x = padded((0, 1, 0, 1)), torch.randn(1, 3, 8, 8, dtype=torch.float64)
    traced = FoldPadding()(fxopt.trace(model, (x,)))
    weight = traced.get_submodule("1").weight
    with torch.no_grad():
        weight.mul_(2)
        trained = traced(x)
        undone = fxopt.undo(copy.deepcopy(traced))
        torch.testing.assert_close(undone(x), trained)
        assert (undone.get_submodule("1").kernel_size, undone.get_submodule("1").padding) == ((3, 2), (0, 0))
        weight.add_(1)
        with pytest.raises(UndoError, match="zeros that were added to its kernel"):
            fxopt.undo(traced)


def test_optimize_leaves_no_padding():
    model, x = padded((0, 1, 0, 1)).float(), torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        fast = fxopt.optimize(model, (x,), tune=False)
        assert "FoldPadding 1" in str(fast.report)
        torch.testing.assert_close(fast(x), model(x))
