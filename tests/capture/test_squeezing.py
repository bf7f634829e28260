"""`squeeze` and `unbind` of sizes that are free: whether they are 1 is what the graph was captured for, or is refused."""

import pytest
import torch
from torch import nn
from torch.export import Dim

import fxopt
from tests.capture.test_decisions import right_or_refused
from tests.modules import module

X = torch.randn(12, 4, dtype=torch.float64)
ROWS = ({0: Dim.AUTO},)


def ranked(y):
    """Something that Python asks of a tensor, and that each run of the model asks anew."""
    return y / (1 + y.dim())


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: ranked(x[: x.shape[0] // 4].squeeze(0)),
        lambda self, x: ranked(x.view(x.shape[0] // 4, 1, -1).squeeze(dim=(0, 1))),
        lambda self, x: ranked(x.view(x.shape[0] // 4, 1, -1).squeeze()),
        lambda self, x: ranked(x.view(2, x.shape[0] // 4, 1, -1).squeeze(1)),
        lambda self, x: ranked(torch.atleast_3d(x[: x.shape[0] // 4]).squeeze(0)),
        lambda self, x: ranked(torch.atleast_3d(x[: x.shape[0] // 4]).squeeze((0, 2))),
        lambda self, x: ranked(torch.ops.aten.squeeze.dim(x[: x.shape[0] // 4], 0)),
        lambda self, x: torch.vmap(lambda y: ranked(y[: y.shape[0] // 4].squeeze(0)), 1)(x),
    ],
)
@pytest.mark.parametrize("rows", [4, 8])
def test_a_free_size_that_is_squeezed_is_guarded(forward, rows):
    model = module(forward)
    gm = fxopt.trace(model, (X[:rows],), dynamic_shapes=ROWS)
    refused = right_or_refused(gm, model, X[:4], X[:8], X)
    assert not refused[rows // 4 - 1]


@pytest.mark.parametrize("forward", [lambda self, x: x.squeeze(0), lambda self, x: x.squeeze()])
def test_a_size_of_one_that_is_squeezed(forward):
    model = module(lambda self, x: ranked(forward(self, x)))
    gm = fxopt.trace(model, (X,), dynamic_shapes=ROWS)
    assert right_or_refused(gm, model, X[:1], X[:2], X) == [True, False, False]
    plain = module(lambda self, x: forward(self, x) * 2)
    assert not any(right_or_refused(fxopt.trace(plain, (X,), dynamic_shapes=ROWS), plain, X[:1], X[:2], X))


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: sum(ranked(row) for row in x.repeat(x.shape[0], 1)),
        lambda self, x: sum(ranked(row) for row in x.repeat(x.shape[0], 1).T.unbind(1)),
        lambda self, x: torch.vmap(lambda y: sum(map(ranked, y)), 1)(x.repeat(x.shape[0], 1)),
        lambda self, x: sum(ranked(row) for row in torch.unbind(input=x.repeat(x.shape[0], 1), dim=0)),
    ],
)
def test_the_rows_of_a_product_of_sizes(forward):
    model = module(forward)
    gm = fxopt.trace(model, (X[:3],), dynamic_shapes=ROWS)
    assert right_or_refused(gm, model, X[:3], X[:4]) == [False, True]


class MaskOfRows(nn.Module):
    """Repeats a mask for each head, as MRA does: in a batch of one, only the mask's length is the tokens'."""

    def forward(self, tokens, mask):
        batch, length = tokens.shape
        mask = mask.squeeze().repeat(1, 4, 1).reshape(batch * 4, length)
        return mask * tokens.repeat(4, 1)


def test_sizes_that_only_a_batch_of_one_makes_equal():
    model = MaskOfRows()
    free = {0: Dim.AUTO, 1: Dim.AUTO}
    traced = fxopt.trace(model, (X, X), dynamic_shapes=(free, free))
    for x in (X, X[:1], X[:2, :3], X[:1, :3]):
        assert torch.equal(traced(x, x), model(x, x))
    with pytest.raises(fxopt.GuardError):
        traced(X[:1], X[:1, :2])


def test_an_input_that_is_turned_in_place_after_a_squeeze():
    def forward(self, x):
        x.squeeze().add_(1)
        return ranked(x.t_())

    model = module(forward)
    gm = fxopt.trace(model, (X.clone(),), dynamic_shapes=ROWS)
    for rows in (1, 2, 12):
        assert gm(X[:rows].clone()).equal(model(X[:rows].clone()))
