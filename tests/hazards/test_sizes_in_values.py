"""Sizes that the values of inputs decide: no pass can tell from the graph what is contiguous, and none may ask."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fxopt
from fxopt.passes import available
from fxopt.testing import assert_equivalent, assert_round_trip, randomise

GRIDS = (torch.tensor([3, 2]), torch.tensor([6, 1]), torch.tensor([1, 6]))
PATCHES = torch.linspace(-1, 1, 6 * 3 * 4 * 4).reshape(6, 3, 4, 4).sin()


class Grid(nn.Module):
    """Patches of an image whose height and width come as a tensor, as in the vision towers of Qwen-VL and Kimi."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.conv, self.norm = (
            nn.Conv2d(3, 8, 4, 4),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.BatchNorm2d(8),
        )
        self.qkv = nn.Linear(8, 24)

    def forward(self, patches: Tensor, grid: Tensor) -> tuple[Tensor, Tensor]:
        height, width = grid.tolist()
        rows = functional.gelu(self.patch(patches)).flatten(1)
        image = rows.view(1, height, width, 8).permute(0, 3, 1, 2)
        image = functional.relu(self.norm(self.conv(functional.pad(image, (1, 1, 1, 1)))))
        image = functional.interpolate(self.conv(image), size=(2 * height, 2 * width))
        qkv = self.qkv(image.flatten(2).transpose(1, 2)).view(1, -1, 3, 2, 4).permute(2, 0, 3, 1, 4)
        query, key, value = (each.contiguous() for each in qkv.unbind(0))
        heads = functional.scaled_dot_product_attention(query, key, value)
        return heads.transpose(1, 2).contiguous().view(1, -1, 8), image.view(1, 8, -1)


@pytest.fixture(scope="module")
def made():
    model = randomise(Grid())
    return model, fxopt.trace(model, (PATCHES, GRIDS[0]))


@pytest.mark.parametrize("name", available())
def test_a_pass_keeps_the_outputs_and_undoes(made, name):
    model, traced = made
    transformation = available()[name]()
    transformed = transformation(fxopt.DeepCopy()(traced))
    if transformation.preserves_computation:
        for grid in GRIDS:
            assert_equivalent(model, transformed, [PATCHES, grid])
    if isinstance(transformation, fxopt.ReversibleTransformation):
        assert_round_trip(traced, transformation(transformed, reverse=True))
