"""What people write in research code: einops, caches by size, Python's types, and more, each captured right."""

import functools

import pytest
import torch
from torch import nn

import fxopt
from fxopt.objects import tensors_in
from tests.capture.test_odd_models import Does

einops = pytest.importorskip("einops")
from einops.layers.torch import EinMix, Rearrange, Reduce  # noqa: E402

BATCH = torch.export.Dim("batch")


def assert_captured(model, args, *others, free=0, **options):
    """The capture of `model`, with the first dimension of each input free, gives what it gives: on `args` and `others`."""
    shapes = {"args": tuple({0: BATCH} for _ in args)} if free else None
    traced = fxopt.trace(model, args, dynamic_shapes=shapes, **options)
    for given in (args, *others):
        made, expected = list(tensors_in(traced(*given))), list(tensors_in(model(*given)))
        torch.testing.assert_close(made, expected)
    return traced


@functools.lru_cache
def positions(n, m):
    return torch.arange(n)[:, None] * m


class Positions(nn.Module):
    def forward(self, x):
        return x + positions(x.shape[0], 2)


class Attend(nn.Module):
    @staticmethod
    @functools.lru_cache
    def table(n):
        return torch.ones(n, 1)

    def forward(self, x):
        return x + self.table(x.shape[0])


FREE_BATCH = {
    "rearrange": Does(lambda self, x: einops.rearrange(x, "b (h p) -> (b h) p", p=2)),
    "reduce": Does(lambda self, x: einops.reduce(x, "b (h p) -> b h", "max", p=2)),
    "repeat": Does(lambda self, x: einops.repeat(x, "b d -> b n d", n=x.shape[0])),
    "einsum": Does(lambda self, x: einops.einsum(x, x, "b i, b j -> b i j")),
    "pack": Does(lambda self, x: einops.pack([x, x[:, None]], "b * d")[0]),
    "unpack": Does(
        lambda self, x: einops.unpack(*einops.pack([x[:, None], x[:, None]], "b * d"), "b * d")[1]
    ),
    "parse_shape": Does(lambda self, x: x.new_ones(einops.parse_shape(x, "b _")["b"])),
    "asnumpy": Does(lambda self, x: einops.rearrange([x, x], "n b d -> b n d")),
    "Rearrange": nn.Sequential(Rearrange("b (h p) -> b h p", p=2), Reduce("b h p -> b h", "mean")),
    "EinMix": nn.Sequential(EinMix("b i -> b o", weight_shape="i o", bias_shape="o", i=4, o=3)),
    "lru_cache": Positions(),
    "lru_cache of a static method": Attend(),
}


@pytest.mark.parametrize("case", FREE_BATCH)
def test_a_free_batch(case):
    model = FREE_BATCH[case]
    shapes = (
        ({0: BATCH},) if isinstance(model, (nn.Sequential, Attend, Positions)) else {"args": ({0: BATCH},)}
    )
    traced = fxopt.trace(model, (torch.randn(3, 4),), dynamic_shapes=shapes)
    for x in (torch.randn(3, 4), torch.randn(5, 4), torch.randn(1, 4)):
        torch.testing.assert_close(list(tensors_in(traced(x))), list(tensors_in(model(x))))


def test_a_size_that_is_the_key_of_a_dict_is_fixed():
    tables = {3: torch.ones(4), 5: torch.zeros(4)}
    model = Does(lambda self, x: x * tables.get(x.shape[0], torch.full((4,), 2.0)))
    traced = fxopt.trace(model, (torch.randn(3, 4),), dynamic_shapes={"args": ({0: torch.export.Dim.AUTO},)})
    x = torch.randn(3, 4)
    assert torch.equal(traced(x), model(x))
    with pytest.raises(fxopt.GuardError, match="dimension 0 is 5"):
        traced(torch.randn(5, 4))


def test_functions_under_lru_cache_are_as_before():
    cached = positions
    positions.cache_clear()
    fxopt.trace(Positions(), (torch.randn(3, 4),), dynamic_shapes=({0: BATCH},))
    assert positions is cached
    assert type(positions(3, 2)) is torch.Tensor
