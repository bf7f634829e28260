"""The height and width of images, which `symbolic_trace` leaves free where the config names no size."""

import types

import pytest
import sympy
import torch
from torch.utils._sympy.functions import FloorDiv
from transformers import (
    ResNetConfig,
    ResNetForImageClassification,
    SegformerConfig,
    SegformerForImageClassification,
)

import fxopt
from fxopt.capture.nodes.comparison import same_expression
from fxopt.testing import randomise


class Doubles(torch.nn.Module):
    """Takes any size, but is made for one."""

    config = types.SimpleNamespace(num_channels=2, image_size=(32, 16))

    def forward(self, pixel_values):
        return 2 * pixel_values


class ByHeight(torch.nn.Module):
    """Has the same graph for one image as for several if the height is 224, but not at any height."""

    config = types.SimpleNamespace(num_channels=2)

    def forward(self, pixel_values):
        return pixel_values * (pixel_values.shape[2] if pixel_values.shape[0] > 1 else 224)


class Formats(torch.nn.Module):
    """Formats a size in a way that Python knows for ints alone."""

    config = types.SimpleNamespace(num_channels=2)

    def forward(self, pixel_values):
        return pixel_values * int(format(pixel_values.shape[2], "d"))


class DependsOnValues(torch.nn.Module):
    """No graph at any size."""

    config = types.SimpleNamespace(num_channels=2)

    def forward(self, pixel_values):
        return pixel_values if pixel_values.sum() > 0 else [-pixel_values]


def resnet(kind):
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type=kind)
    return ResNetForImageClassification(config)


def segformer():
    """Its attention over fewer keys computes their number by divisions that leave no rest."""
    sizes = {"num_encoder_blocks": 1, "depths": [1], "hidden_sizes": [8], "num_attention_heads": [2]}
    return SegformerForImageClassification(SegformerConfig(**sizes, sr_ratios=[8]))


@pytest.mark.parametrize(
    ("make", "sizes"),
    [
        (lambda: resnet("basic"), [(17, 33, 47), (1, 5, 2), (2, 1, 9)]),
        (lambda: resnet("bottleneck"), [(17, 33, 47), (1, 5, 2), (2, 1, 9)]),
        pytest.param(segformer, [(1, 65, 100)], marks=pytest.mark.long),
    ],
)
def test_models_at_other_image_sizes(make, sizes):
    model = make().double().eval()
    randomise(model, seed=0)
    gm = fxopt.symbolic_trace(model, ["pixel_values"])
    for batch, height, width in [(1, 224, 224), (2, 64, 96), *sizes]:
        images = torch.randn(batch, 3, height, width, dtype=torch.float64)
        with torch.no_grad():
            torch.testing.assert_close(gm(images).logits, model(images).logits, rtol=1e-12, atol=1e-12)


def test_a_size_in_the_config_is_the_only_one():
    model = Doubles()
    gm = fxopt.symbolic_trace(model, ["pixel_values"])
    images = torch.randn(1, 2, 32, 16)
    assert torch.equal(gm(images), model(images))
    with pytest.raises(fxopt.GuardError, match="dimension 3 is 24; the graph was captured for 16"):
        gm(torch.randn(2, 2, 32, 24))


@pytest.mark.parametrize("model", [ByHeight(), Formats()])
def test_sizes_are_fixed_where_free_ones_would_cost_more(model):
    gm = fxopt.symbolic_trace(model, ["pixel_values"])
    for batch in (1, 2):
        images = torch.randn(batch, 2, 224, 224)
        assert torch.equal(gm(images), model(images))
    with pytest.raises(fxopt.GuardError, match="dimension 2 is 32; the graph was captured for 224"):
        gm(torch.randn(2, 2, 32, 224))


def test_what_cannot_be_captured_at_one_size_is_an_error():
    with pytest.raises(fxopt.TraceError, match="decides on the value of a tensor"):
        fxopt.symbolic_trace(DependsOnValues(), ["pixel_values"])


ROWS, COLUMNS = sympy.symbols("rows columns", integer=True, positive=True)
HALF = FloorDiv(ROWS, 2) + 1


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (HALF * COLUMNS, FloorDiv((8 * HALF - 8) * COLUMNS + 8 * COLUMNS, 8), True),
        (FloorDiv(2 * HALF * COLUMNS + 4, -2), -HALF * COLUMNS - 2, True),
        (HALF * COLUMNS, FloorDiv(12 * HALF * COLUMNS, 8), False),
        (ROWS, 2 * FloorDiv(ROWS, 2), False),
        (ROWS, FloorDiv(8 * ROWS + 9, 8), False),
        (ROWS < COLUMNS, ROWS, False),
    ],
)
def test_sizes_are_the_same_where_arithmetic_says_so(one, other, same):
    assert same_expression(one, other) == same_expression(other, one) == same
