"""Indices that only a run knows: `x[scores.argmax()]` and its like."""

import pytest
import torch
from torch.export import Dim

import fxopt
from tests.modules import module

X = torch.randn(4, 5, 6, dtype=torch.float64)
NUMBERS = [torch.tensor(n) for n in ([0, 1, 2], [3, 0, 1], [-1, -4, 2], [2, 2, 2])]

INDICES = {
    "a tensor": lambda n: n[0],
    "a number": lambda n: n[0].item(),
    "two": lambda n: (n[0], n[1]),
    "after a slice": lambda n: (slice(1, None), n[0]),
    "after all": lambda n: (slice(None), n[0]),
    "after an ellipsis": lambda n: (..., n[0]),
    "before an ellipsis": lambda n: (n[0], ..., n[1].item()),
    "around a number": lambda n: (n[0], 1, n[1]),
    "around a new dimension": lambda n: (n[0], None, n[1]),
    "a new dimension, a number and a slice": lambda n: (None, 2, n[0], slice(0, 6, 2)),
    "all": lambda n: (n[0], n[1], n[2]),
    "before a tensor": lambda n: (n[0], n),
    "between tensors": lambda n: (n, n[0], n),
    "after tensors and a new dimension": lambda n: (n, None, n.abs(), n[0]),
    "before a mask": lambda n: (n[0], n.new_ones(5) > 0),
    "after a mask": lambda n: (n.new_ones(4, 5) > 0, n[0]),
    "before True": lambda n: (n[0], True),
    "sequences": lambda n: (tuple(n), list(n)),
    "a sequence after a slice": lambda n: (slice(1, 3), tuple(n)),
}


@pytest.mark.parametrize("name", INDICES)
@pytest.mark.parametrize("free", [None, ({0: Dim.AUTO, 1: Dim.AUTO}, None)], ids=["fixed", "free"])
def test_what_is_indexed_is_what_the_model_indexes(name, free):
    model = module(lambda self, x, n: x[INDICES[name](n)] * 2)
    gm = fxopt.trace(model, (X, NUMBERS[0]), dynamic_shapes=free)
    for numbers in NUMBERS:
        x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
        actual, expected = gm(x, numbers), model(y, numbers)
        assert actual.equal(expected)
        actual.sum().backward()
        expected.sum().backward()
        assert x.grad.equal(y.grad)


BY_SIZE = {
    "the last": lambda x, n: x[:, x.shape[1] - 1],
    "the middle": lambda x, n: x[..., x.shape[1] // 2, :],
    "of either sign": lambda x, n: x[x.shape[0] - 3, None, x.shape[1] - 8],
    "beside a value": lambda x, n: x[n[0], x.shape[1] - 2, n],
    "between tensors": lambda x, n: x[n, x.shape[1] - 2, n],
    "a view": lambda x, n: x.clone()[:, x.shape[1] - 1].add_(1),
    "of a list": lambda x, n: [x, x + 1][1][x.shape[0] - 1],
}


@pytest.mark.parametrize("name", BY_SIZE)
def test_an_index_that_a_size_gives_leaves_it_free(name):
    model = module(lambda self, x, n: BY_SIZE[name](x, n))
    gm = fxopt.trace(model, (X, NUMBERS[0]), dynamic_shapes=({0: Dim.AUTO, 1: Dim.AUTO}, None))
    taken = 0
    for rows in (1, 3, 4, 6):
        for columns in range(1, 12):
            x = torch.randn(rows, columns, 6, dtype=torch.float64)
            try:
                found = gm(x, NUMBERS[0])
            except (fxopt.GuardError, IndexError):
                continue
            taken += 1
            assert found.equal(model(x, NUMBERS[0]))
    assert taken >= 9


WRITTEN_AT = {
    "the last": lambda x, n: (slice(None), x.shape[1] - 1),
    "a number": lambda x, n: n[0].item(),
    "numbers": lambda x, n: (n[0].item(), x.shape[1] // 2, n[1].item()),
    "an ellipsis": lambda x, n: (..., n[1].item(), slice(1, None)),
    "a new dimension": lambda x, n: (n[0].item(), None, x.shape[1] - 2),
    "beside tensors": lambda x, n: (n, x.shape[1] - 1, n),
    "a mask": lambda x, n: (n[0].item(), x[0, :, 0] > 0),
    "a slice to a number": lambda x, n: slice(n[0].item()),
    "a slice from a number": lambda x, n: (..., slice(n[0].item(), None), slice(2)),
    "a slice of two from a number": lambda x, n: (slice(None), slice(n[2].item(), n[2].item() + 2)),
}


@pytest.mark.parametrize("name", WRITTEN_AT)
def test_what_is_written_at_such_an_index_is_what_the_model_writes(name):
    def forward(self, x, n):
        copy, index = x * 2, WRITTEN_AT[name](x, n)
        copy[index] = x[3, 1, 2]
        copy[index] += x[0, 0, 0]
        copy[index] = copy[index].clone() * x[1, 0, 1]
        return copy

    model = module(forward)
    gm = fxopt.trace(model, (X, NUMBERS[0]), dynamic_shapes=({0: Dim.AUTO, 1: Dim.AUTO}, None))
    for numbers in NUMBERS:
        for columns in (4, 5, 8):
            x = torch.randn(4, columns, 6, dtype=torch.float64)
            inputs = [x.clone().requires_grad_() for _ in range(2)]
            actual, expected = gm(inputs[0], numbers), model(inputs[1], numbers)
            assert actual.equal(expected)
            actual.sum().backward()
            expected.sum().backward()
            assert inputs[0].grad.equal(inputs[1].grad)


@pytest.mark.parametrize("name", list(INDICES)[:11])
def test_what_is_indexed_is_a_view(name):
    def forward(self, x, n):
        copy = x.clone()
        copy[INDICES[name](n)].add_(1)
        return copy

    model = module(forward)
    gm = fxopt.trace(model, (X, NUMBERS[0]))
    for numbers in NUMBERS:
        assert gm(X, numbers).equal(model(X, numbers))


def test_a_queue_is_written_where_a_pointer_says():
    def forward(self, x, n):
        pointer = self.pointer.item()
        self.queue[:, pointer : pointer + len(x)] = x.t()
        self.pointer[0] = (pointer + len(x)) % self.queue.shape[1]
        return x @ self.queue

    def queued():
        model = module(forward)
        model.register_buffer("queue", torch.zeros(6, 8, dtype=torch.float64))
        model.register_buffer("pointer", torch.zeros(1, dtype=torch.long))
        return model

    model, captured = queued(), queued()
    gm = fxopt.trace(captured, (X[0, :4], NUMBERS[0]), dynamic_shapes=({0: Dim.AUTO}, None))
    for rows in (4, 2, 2, 1):
        x = torch.randn(rows, 6, dtype=torch.float64)
        assert gm(x, NUMBERS[0]).equal(model(x, NUMBERS[0]))
        assert captured.queue.equal(model.queue)
        assert captured.pointer.equal(model.pointer)


def test_sequences_of_numbers_are_written_at():
    def forward(self, x, n):
        copy = x.clone()
        copy[tuple(n), list(n)] = 0
        return copy

    model = module(forward)
    gm = fxopt.trace(model, (X, NUMBERS[0]))
    for numbers in NUMBERS[:2]:
        assert gm(X, numbers).equal(model(X, numbers))


@pytest.mark.parametrize(
    "index",
    [
        lambda n: n[0] > 1,
        lambda n: n[0].to(torch.uint8),
        lambda n: (1, n[0].to(torch.uint8), slice(2)),
        lambda n: ([[True] * 5] * 4, n[0]),
    ],
    ids=["no dimension", "of bytes", "of bytes beside others", "in a list"],
)
def test_masks_beside_numbers_are_refused(index):
    with pytest.raises(fxopt.TraceError, match="decides on the value|made out of sight"):
        fxopt.trace(module(lambda self, x, n: x[index(n)]), (X, NUMBERS[0]))
