"""A graph takes those dtypes of an input with which the model makes the same calls."""

import pytest
import torch
from torch import nn

import fxopt

X = torch.randn(2, 4, dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])


class Masked(nn.Module):
    def __init__(self, use):
        super().__init__()
        self.use = use

    def forward(self, x, mask):
        return self.use(x, mask)


SAME = {
    "cast": lambda x, m: x.masked_fill(m.to(torch.bool), 0),
    "cast, then not": lambda x, m: x.masked_fill(~m.bool(), 0),
    "cast to the device too": lambda x, m: x.masked_fill(m.to(device=x.device, dtype=torch.bool), 0),
    "compared": lambda x, m: x.masked_fill(m == 0, 0) * (m[:, :1] > 0),
    "cast as a view": lambda x, m: x + (1.0 - m[:, None, :].to(dtype=x.dtype)).sum(1) * -1e3,
    "its size": lambda x, m: x.masked_fill(m.bool(), m.shape[-1] + m.size(0)),
}
OTHER = {
    "computed with": lambda x, m: x * (1 - m),
    "an index": lambda x, m: x[m.bool()].sum() + x[m].sum(),
    "asks": lambda x, m: x.masked_fill(m.bool(), 0) if m.is_floating_point() else x * m.bool(),
    "asks for the dtype": lambda x, m: x.masked_fill(m.bool(), 0) * (m.dtype == torch.int64),
    "returned": lambda x, m: (x * m.bool(), m[:1]),
    "summed": lambda x, m: x * m.bool() / m.sum(),
    "its bytes": lambda x, m: x * m.view(torch.int32).bool().sum() / m.view(torch.int32).shape[-1],
    "cast with another mask": lambda x, m: x * torch.where(m > 0, m, 1).bool(),
}


@pytest.mark.parametrize("use", SAME)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool, torch.int32])
def test_a_mask_of_another_dtype_is_taken_where_the_graph_is_the_same(use, dtype):
    model = Masked(SAME[use])
    traced = fxopt.trace(model, (X, MASK))
    mask = (MASK * 0.5 if dtype.is_floating_point else MASK).to(dtype)
    for graph in (traced, fxopt.RemoveIdentity()(traced)):
        assert torch.equal(graph(X, mask), model(X, mask))


@pytest.mark.parametrize("use", OTHER)
def test_a_mask_of_another_dtype_is_refused_where_it_could_be_another_graph(use):
    traced = fxopt.trace(Masked(OTHER[use]), (X, MASK))
    with pytest.raises(
        fxopt.GuardError, match=r"'mask' is torch\.float32; the graph was captured with torch\.int64"
    ):
        traced(X, MASK.float())


def test_a_cast_that_changes_nothing_at_capture_stays_for_other_dtypes():
    model = Masked(SAME["cast"])
    plain = fxopt.RemoveIdentity()(fxopt.trace(model, (X, MASK.bool())))
    assert torch.equal(plain(X, MASK.float() * 0.5), model(X, MASK.float() * 0.5))


def test_bytes_are_read_in_one_dtype():
    traced = fxopt.trace(Masked(lambda x, m: x * m.view(torch.int32)[:, :4]), (X, MASK))
    with pytest.raises(
        fxopt.GuardError, match=r"'mask' is torch\.int32; the graph was captured with torch\.int64"
    ):
        traced(X, MASK.int())
