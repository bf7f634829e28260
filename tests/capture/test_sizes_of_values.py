"""Sizes that tensors of the model, their values and arithmetic give: numbers of the graph, and no decisions."""

import contextlib
import copy
import math
import pickle
from math import log

import numpy as np
import pytest
import sympy
import torch
from torch import nn
from torch.export import Dim

import fxopt
from fxopt.capture.fakes.shape_env import CaptureShapeEnv
from fxopt.capture.patches.tensor_types import _hands_on
from fxopt.errors import GuardError
from tests.capture.test_decisions import ROWS, X, checks, right_or_refused
from tests.capture.test_trace import assert_same
from tests.modules import module


def sliced_by_a_tensor(self, x):
    n = (x[0] > 0).sum()
    return x[:, :n]


def divided_sizes(self, x):
    half = torch.div(x.shape[0], 2, rounding_mode="trunc")
    return x[:half], x.new_zeros(half, 3).view(half * 3)


@pytest.mark.parametrize("forward", [sliced_by_a_tensor, divided_sizes])
@pytest.mark.parametrize("free", [None, ({0: Dim.DYNAMIC},)])
def test_sizes_that_are_tensors_are_numbers_of_the_graph(forward, free):
    model = module(forward)
    gm = fxopt.trace(model, (X,), dynamic_shapes=free)
    assert not checks(gm)
    rows = [X[:2], torch.cat([X, -X])] if free else []
    assert not any(right_or_refused(gm, model, X, X.abs(), *rows))


class PaddedToFrames(nn.Module):
    """Pads to whole frames, as audio codecs do, with the numbers of the layer kept in buffers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("stride", torch.tensor(3), persistent=False)
        self.register_buffer("kernel", torch.tensor(5), persistent=False)
        self.left = torch.tensor(4) // 2

    def forward(self, x):
        length = x.shape[-1]
        frames = torch.ceil((length - self.kernel) / self.stride + 1).to(torch.int64) - 1
        extra = frames * self.stride + self.kernel - length
        if extra >= length:
            raise ValueError("too short")
        return nn.functional.pad(x, (self.left, extra))[..., self.left :].unfold(-1, 5, 3)


def test_numbers_in_the_model_s_tensors_give_sizes():
    model = PaddedToFrames()
    gm = fxopt.trace(model, (torch.randn(2, 16),), dynamic_shapes=({0: Dim.AUTO, 1: Dim.AUTO},))
    for size in range(8, 30):
        x = torch.randn(3, size)
        torch.testing.assert_close(gm(x), model(x), rtol=0, atol=0)
    changed = copy.deepcopy(gm)
    changed.stride.fill_(7)
    with pytest.raises(fxopt.GuardError, match=r"test_sizes_of_values.py:\d+: `return nn.functional.pad"):
        changed(torch.randn(2, 16))


def test_a_rounded_number_is_no_size():
    class Halves(nn.Module):
        def forward(self, x):
            # 2 ** 24 + 1 is no float32: the quotient is rounded.
            return x[: torch.ceil((x.shape[0] + torch.tensor(2**24)) / 1).to(torch.int64) - 2**24]

    model, x = Halves(), torch.randn(4, 2)
    gm = fxopt.trace(model, (x,), dynamic_shapes=ROWS)
    assert right_or_refused(gm, model, x, torch.randn(6, 2), torch.randn(7, 2)) == [False, False, True]


def test_a_number_that_the_forward_writes_is_no_constant():
    class Growing(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.tensor(1))

        def forward(self, x):
            first = x[: self.seen + 0]
            self.seen.add_(1)
            return first.sum(0)

    model = Growing()
    gm = fxopt.trace(model, (X,))
    mine = copy.deepcopy(gm)
    for _ in range(3):
        torch.testing.assert_close(mine(X), model(X), rtol=0, atol=0)


def test_a_number_that_is_written_after_it_was_made_is_read_again():
    class Written(nn.Module):
        def forward(self, x):
            n = torch.div(x.shape[0], 2, rounding_mode="floor")
            n += 1
            return nn.functional.pad(x, (0, n))

    model = Written()
    gm = fxopt.trace(model, (X,), dynamic_shapes=ROWS)
    assert right_or_refused(gm, model, X, torch.randn(8, 4)) == [False, False]


def test_rounding_of_sizes_becomes_nodes():
    def forward(self, x):
        return x + math.ceil(0.3 * x.shape[0]) + math.floor(x.shape[0] / 2) + math.trunc(0.7 * x.shape[0])

    model = module(forward)
    gm = fxopt.trace(model, (X,), dynamic_shapes=ROWS)
    gm = pickle.loads(pickle.dumps(gm))
    assert not any(right_or_refused(gm, model, *(torch.randn(rows, 4) for rows in range(2, 12))))


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x, size: nn.functional.interpolate(x[None, None], size=(size[0], size[1])),
        lambda self, x, size: x.repeat(size[0], 1),
        lambda self, x, size: nn.functional.pad(x, (size[0], size[1])),
    ],
    ids=["interpolate", "repeat", "pad"],
)
def test_sizes_that_an_input_holds_are_read_in_the_graph(forward):
    model = module(forward)
    gm = fxopt.trace(model, (X, torch.tensor([2, 3])))
    for size in ((2, 3), (4, 2), (5, 7)):
        torch.testing.assert_close(gm(X, torch.tensor(size)), model(X, torch.tensor(size)), rtol=0, atol=0)


def tokens_of_each_row(self, x):
    chosen = x.flatten()[: len(x)]
    positive = (x > 0).nonzero()
    return chosen.sum() / len(x), positive.view(len(positive), -1), x[: max(len(x) // 2, 1)]


def test_the_length_of_a_tensor_stays_free():
    model = module(tokens_of_each_row)
    gm = fxopt.trace(model, (X,), dynamic_shapes=ROWS)
    assert not checks(gm)
    for x in (X[:2], X.abs(), torch.cat([X, -X, X])):
        assert_same(gm(x), model(x))


def test_a_length_that_a_loop_counts_is_fixed():
    model = module(lambda self, x: sum(x[row] * len(x) for row in range(len(x))))
    gm = fxopt.trace(model, (X,), dynamic_shapes=ROWS)
    assert_same(gm(X), model(X))
    with pytest.raises(GuardError, match="dimension 0 is 2; the graph was captured for 3 alone"):
        gm(X[:2])


def between_tensors(self, x):
    first, last = (x[0] > 0).sum(), (x[1] > 0).sum()
    return torch.cat([torch.arange(first, first + last), torch.arange(first * 2, end=first * 2 + 3)])


def test_a_range_between_tensors_is_one_between_numbers():
    model = module(between_tensors)
    gm = fxopt.trace(model, (X,))
    for x in (X, X.abs(), -X.abs(), X.flip(0)):
        assert_same(gm(x), model(x))


@pytest.mark.parametrize("dim", [(), (0,), ((0,),)])
def test_a_size_of_one_that_squeeze_would_remove_is_refused(dim):
    model = module(lambda self, x: x * (1 + x[x > 0].squeeze(*dim).dim()))
    gm = fxopt.trace(model, (X,))
    one = -torch.ones(3, 4)
    one[1, 2] = 5
    assert right_or_refused(gm, model, X, X.abs(), one) == [False, False, True]


def test_a_number_that_only_a_run_knows_is_no_size_to_settle_at_one():
    shape_env = CaptureShapeEnv()
    number = shape_env.create_unbacked_symint()
    shape_env.assume(sympy.Gt(number.node.expr, 1), "a test")
    with shape_env.in_operator() as questions:
        assert number != 1
    assert questions == {}  # a guard on entry could not know the number


def table_of_found(generator):
    def forward(self, x):
        found = [row[row > 0] for row in x.unbind()]
        sizes = (each.shape[0] for each in found)
        longest = max(sizes if generator else list(sizes))
        table = x.new_zeros(len(found), longest)
        for row, each in zip(table, found, strict=True):
            row[: each.shape[0]] = each
        return table, found[0].topk(min(2, found[0].shape[0])).values

    return module(forward)


@pytest.mark.parametrize("generator", [False, True])
def test_the_least_and_most_of_sizes_that_only_a_run_knows_are_computed(generator):
    model = table_of_found(generator)
    traced = fxopt.trace(model, (X,))
    for x in (X, -X, X.roll(1, 0), -X.roll(1, 1), X.abs(), torch.eye(3, 4)):
        for actual, expected in zip(traced(x), model(x), strict=True):
            assert actual.equal(expected)


def test_the_least_and_most_of_sizes_are_decided_in_a_specialised_graph():
    model = table_of_found(True)
    traced = fxopt.trace(model, (X,), specialize=True)
    assert traced.graph.find_nodes(op="call_function", target=torch.sym_max) == []
    for x in (X, X.abs()):
        for actual, expected in zip(traced(x), model(x), strict=True):
            assert actual.equal(expected)
    with pytest.raises(fxopt.GuardError, match="decides on a value"):
        traced(X * torch.tensor([[-1.0], [1.0], [1.0]]))  # another row is the longest


@pytest.mark.parametrize("digits", [None, 2])
def test_a_rounded_number_is_decided(digits):
    model = module(lambda self, x: x * round(x.sum().item() / 7, digits))
    with pytest.raises(fxopt.TraceError, match="decides on the value"):
        fxopt.trace(model, (X,))
    gm = fxopt.trace(model, (X,), specialize=True)
    assert right_or_refused(gm, model, X, X * 3) == [False, True]


def test_lists_of_numbers_are_new_each_time():
    def forward(self, x, n):
        rows = n.tolist()
        rows[0][0] = rows[1][1] = 100
        again = n.tolist()
        return x * again[0][0] + again[1][1], x * rows[0][0]

    model = module(forward)
    gm = fxopt.trace(model, (X, torch.tensor([[1, 2], [3, 4]])))
    for n in (torch.tensor([[1, 2], [3, 4]]), torch.tensor([[5, 6], [7, 8]])):
        assert_same(gm(X, n), model(X, n))


def test_a_graph_takes_sizes_on_both_sides_of_a_limit():
    def forward(self, x):
        n = x.shape[0]
        nearest = torch.cdist(x, x).topk(min(3, n), largest=False)[1]
        return (
            nearest,
            x.new_ones(max(n - 3, 1)) * x[:1, :1],
            x[: max(1, n // 2)],
            x.new_zeros(max((n, 3, n - 2))) + 1,
        )

    model = module(forward)
    traced = fxopt.trace(model, (torch.randn(5, 4),), dynamic_shapes=({0: Dim.DYNAMIC},))
    for n in (5, 1, 2, 3, 4, 8):
        x = torch.randn(n, 4)
        assert_same(traced(x), model(x))


@pytest.mark.parametrize("free", [None, ({0: Dim.DYNAMIC}, None)])
@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x, n: x[n.item()],
        lambda self, x, n: x[: n.item()],
        lambda self, x, n: x.narrow(0, 0, n.item()),
        lambda self, x, n: x * n.item(),
        lambda self, x, n: x.new_zeros(max(n.item(), 2)),
        lambda self, x, n: torch.vmap(lambda column: column.narrow(0, 0, n.item()), 1)(x),
    ],
)
def test_the_number_in_an_input_without_dimensions_is_read_in_the_graph(forward, free):
    model = module(forward)
    gm = fxopt.trace(model, (X, torch.tensor(2)), dynamic_shapes=free)
    for n in (2, 1, 0):
        assert torch.equal(gm(X, torch.tensor(n)), model(X, torch.tensor(n)))


@pytest.mark.parametrize("number", [torch.tensor(2), torch.tensor(2.0, dtype=torch.float64)])
@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x, n: x if n.item() > 1 else [-x],
        lambda self, x, n: x * int(n.item()),
        lambda self, x, n: x if str(n.item())[0] == "2" else -x,
        lambda self, x, n: torch.vmap(lambda row: row[int(n.item())])(x),
        lambda self, x, n: torch.func.grad(lambda y: y[int(n.item())].sum())(x),
    ],
)
def test_decisions_on_the_number_in_an_input_are_refused(forward, number):
    with pytest.raises(fxopt.TraceError, match="decides on the value"):
        fxopt.trace(module(forward), (X, number))


@pytest.mark.parametrize("number", [torch.tensor(2), torch.tensor(2.0, dtype=torch.float64)])
@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x, n: x if n.item() > 1 else -x,
        lambda self, x, n: torch.vmap(lambda row: row if n.item() > 1 else -row)(x),
    ],
)
def test_the_number_in_an_input_may_decide_which_side_is_taken(forward, number):
    traced = fxopt.trace(module(forward), (X, number))
    for n in (number, number - 1, number * 0):
        assert_same(traced(X, n), forward(None, X, n))


def resized(self, x, grid):
    """As image towers do: what `interpolate` gives is channels last, as its input is, and so can be viewed."""
    parts = []
    for height, width in grid.tolist():
        part = x[: height * width].view(1, height, width, 6).permute(0, 3, 1, 2)
        part = nn.functional.interpolate(part, size=(height // 2, width // 2), mode="bilinear")
        parts.append(part.permute(0, 2, 3, 1).view(-1, 6))
    return torch.cat(parts)


def blocks(self, x, grid):
    """As image towers do: rows of patches become blocks of two by two."""
    for height, width in grid.tolist():
        x = x.expand(2, -1, -1).permute(1, 2, 0)[:height, :width]
        x = x.reshape(height // 2, 2, width // 2, 2, -1).transpose(1, 2).reshape(height * width, -1)
    return x


@pytest.mark.parametrize(("forward", "x"), [(resized, torch.randn(24, 6)), (blocks, torch.randn(12, 12))])
def test_images_whose_sizes_a_tensor_holds(forward, x):
    model = module(forward)
    gm = fxopt.trace(model, (x, torch.tensor([[4, 6]])))
    for sizes in ([4, 6], [2, 2], [12, 2], [2, 12]):
        grid = torch.tensor([sizes])
        assert torch.equal(gm(x, grid), model(x, grid))
    for sizes in ([0, 4], [1, 4], [4, 1], [4, 0]):
        grid = torch.tensor([sizes])
        with pytest.raises(RuntimeError):
            model(x, grid)
        with pytest.raises((RuntimeError, fxopt.GuardError)):
            gm(x, grid)


def test_an_empty_batch_whose_size_only_a_run_knows_is_not_resized():
    def forward(self, x):
        found = x[x[:, 0, 0, 0] > 0].permute(0, 3, 1, 2)
        return nn.functional.interpolate(found, size=(4, 4)).permute(0, 2, 3, 1).flatten(1)

    x, model = torch.randn(3, 2, 2, 5).abs(), module(forward)
    gm = fxopt.trace(model, (x,))
    assert not any(right_or_refused(gm, model, x, torch.cat([x[:1], -x[1:]])))
    with pytest.raises(fxopt.GuardError, match="as does `interpolate`"):
        gm(-x)


class LoopsOfItsOwn(nn.Module):
    """Edges without those from a node to itself, and one such edge for each node, as attention on graphs has them."""

    def forward(self, x, edges):
        edges = torch.cat([edges[:, edges[0] != edges[1]], torch.arange(len(x)).expand(2, -1)], 1)
        return x * 2 if edges.numel() == 0 else x[edges[0]]


def test_a_free_size_is_at_least_one_in_a_sum_with_a_number_that_only_a_run_knows():
    x, edges = torch.randn(4, 2), torch.tensor([[0, 1, 2], [1, 1, 3]])
    free = {"x": {0: Dim.AUTO}, "edges": {1: Dim.AUTO}}
    traced = fxopt.trace(LoopsOfItsOwn(), (x, edges), dynamic_shapes=free)
    x, edges = torch.randn(5, 2), torch.tensor([[0, 1, 4, 2], [0, 1, 3, 2]])
    torch.testing.assert_close(traced(x, edges), LoopsOfItsOwn()(x, edges))


class Parts(nn.Module):
    """Sizes by `int`, as interpolation and strided convolutions compute them."""

    def forward(self, x):
        return x[: int(len(x) * 0.5)], x.new_zeros(int((len(x) - 1) / 3 + 1), len(x))


def test_the_whole_part_of_a_free_size_is_free():
    traced = fxopt.trace(Parts(), (torch.randn(6, 2),), dynamic_shapes=({0: Dim.AUTO},))
    for rows in (6, 7, 20, 2):
        x = torch.randn(rows, 2)
        assert_same(traced(x), Parts()(x))


class Graphs(nn.Module):
    """Sums over graphs of a batch, as many as the largest number of one."""

    def forward(self, x, batch):
        return x.new_zeros(int(batch.max()) + 1, x.shape[1]).index_add(0, batch, x)


def test_the_number_in_a_tensor_is_a_size():
    x, batch = torch.randn(4, 2), torch.tensor([0, 0, 1, 1])
    traced = fxopt.trace(Graphs(), (x, batch), dynamic_shapes=({0: Dim.AUTO}, {0: Dim.AUTO}))
    x, batch = torch.randn(5, 2), torch.tensor([0, 3, 1, 1, 2])
    assert_same(traced(x, batch), Graphs()(x, batch))


class ComparesNumbers(nn.Module):
    def forward(self, x, n):
        t = n.item()
        later = torch.arange(t) + int(t > 1)
        return later.repeat(int(t >= 3) + 1), x * int(x.numel() > t) - int(t == 2)


def test_a_comparison_of_numbers_in_tensors_is_a_number():
    x = torch.randn(3, dtype=torch.float64)
    traced = fxopt.trace(ComparesNumbers(), (x, torch.tensor(2)))
    assert not checks(traced)
    for n in range(6):
        assert_same(traced(x, torch.tensor(n)), ComparesNumbers()(x, torch.tensor(n)))


class InChunks(nn.Module):
    def forward(self, x):
        total = 0
        for start in range(1, x.shape[0], 4):
            total = total + start * x[start : start + 4].sum(0)
        return total


class FromTheEnd(nn.Module):
    def forward(self, x):
        n = len(x)
        return (
            [x[i : i + 2] * i for i in range(n - 3, n)],
            len(range(n, 2 * n, n)),
            [*reversed(range(0, n, n))],
        )


class ReadsTheEnd(nn.Module):
    def forward(self, x):
        return x * range(0, len(x), 2).stop


def test_a_range_whose_end_is_read_is_none_of_another_size():
    with pytest.raises(fxopt.TraceError, match="has no attribute 'stop'"):
        fxopt.trace(ReadsTheEnd(), (torch.randn(6, 2),), dynamic_shapes=({0: Dim.AUTO},))


class Downwards(nn.Module):
    def forward(self, x):
        return (
            [x[i] for i in range(len(x) - 1, -1, -4)],
            isinstance(range(len(x)), range),
            [type(range(2)) is range],
        )


@pytest.mark.parametrize(
    ("model", "taken"),
    [(InChunks(), [6, 7, 8, 9]), (FromTheEnd(), [3, 4, 7, 30]), (Downwards(), [6])],
    ids=lambda value: type(value).__name__,
)
def test_a_loop_over_chunks_holds_for_all_sizes_with_as_many(model, taken):
    x = torch.randn(40, 2, dtype=torch.float64)
    traced = fxopt.trace(model, (x[:6],), dynamic_shapes=({0: Dim.AUTO},))
    for n in range(1, 40):
        try:
            found = traced(x[:n])
        except GuardError:
            assert n not in taken
        else:
            assert_same(found, model(x[:n]))


class AsksForIntegers(nn.Module):
    """Comparisons with the type `int`, and calls of it."""

    def forward(self, x):
        three, half = 3, 0.5
        numbers = [int("12"), int(2.7), int("f", 16), int(three)]
        kinds = [
            isinstance(three, int),
            isinstance(half, (int, str)),
            issubclass(bool, int),
            isinstance(int, type),
        ]
        types = [
            type(three) is int,
            type(len(x)) is int,
            type(half) is int,
        ]
        return x + 1, numbers, kinds, types


def test_int_is_what_it_is_otherwise():
    model, x = AsksForIntegers(), torch.randn(3, 4)
    assert fxopt.trace(model, (x,))(x)[1:] == model(x)[1:]
    given = ("x.to(int)", "x.to(x.device, int)", "torch.ones(2, dtype=int)", "{int: x}", "map(int, x)")
    compared = ("isinstance(x, (int, str))", "type(x) is int", "int(x) + int('1')")
    for kind in ("int", "float"):
        codes = [
            compile(f"def f(x): return {text}".replace("int", kind), "", "exec")
            for text in (*given, *compared)
        ]
        assert [_hands_on(code, kind) for code in codes] == [True] * len(given) + [False] * len(compared)


ROUNDS = {
    "floor": lambda x: x.new_zeros(math.floor(x.shape[0] * 0.29 * 100)),
    "product": lambda x: x * (x.shape[0] / 2 * 0.1 * 3.0),
    "sum": lambda x: x * (0.1 * x.shape[0] + 0.2 * x.shape[0] - 0.7 * x.shape[0] * 0.3),
    "square": lambda x: x * (x.shape[0] * 0.1 * 3.0) * (x.shape[0] * 0.1 * 3.0) ** -0.5,
    "minus": lambda x: x * (0.0 - x.shape[0] * 0.1),
    "output": lambda x: (x, x.shape[0] * 0.1 * 3.0 * (x.shape[0] * 0.1 * 3.0)),
    "tens": lambda x: x * round(x.shape[0] * 1.7, -1) * round(x.shape[0], 1),
    "whole": lambda x: x * round(x.shape[0]),
    "round": lambda x: x[: round(x.shape[0] * 0.35)] * round(x.shape[0] * 0.35, 1),
}


@pytest.mark.parametrize("name", ROUNDS)
def test_a_number_that_sympy_would_round_otherwise_is_pythons(name):
    model = module(lambda self, x: ROUNDS[name](x))
    traced = fxopt.trace(model, (torch.ones(50, 1),), dynamic_shapes=({0: Dim.AUTO},))
    for n in range(2, 99):
        x = torch.rand(n, 1)
        torch.testing.assert_close(traced(x), model(x), rtol=0, atol=0)


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: x * 2 if x.shape[0] * 0.1 * 3.0 > 0.9 else x,  # rounded twice, and compared
        lambda self, x: x * round(x.shape[0], -1),
    ],
)
def test_a_number_that_no_guard_and_no_node_can_be_made_of_is_fixed(forward):
    model = module(forward)
    traced = fxopt.trace(model, (torch.ones(3, 1),), dynamic_shapes=({0: Dim.AUTO},), verify=False)
    assert torch.equal(traced(torch.ones(3, 1)), model(torch.ones(3, 1)))
    with pytest.raises(fxopt.GuardError):
        traced(torch.ones(4, 1))


class Divides(nn.Module):
    def forward(self, x):
        return torch.zeros(int(x.shape[1] * 0.3 // 0.1))


def test_a_quotient_of_floats_that_is_rounded_down_is_pythons():
    model, x = Divides(), torch.ones(2, 4)
    traced = fxopt.trace(model, (x,), dynamic_shapes=({1: Dim.AUTO},), verify=False)
    compared = 0
    for length in (4, 5, 7):
        with contextlib.suppress(fxopt.GuardError):
            assert traced(torch.ones(2, length)).shape == model(torch.ones(2, length)).shape
            compared += 1
    assert compared


class Square(nn.Module):
    def forward(self, x):
        height = width = int(math.sqrt(x.shape[0]))
        return x.view(height, width, -1)


def test_a_root_of_a_free_size_is_free():
    traced = fxopt.trace(Square(), (torch.randn(9, 4),), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    for rows in (9, 1, 4, 49):
        x = torch.randn(rows, 4)
        assert torch.equal(traced(x), x.view(math.isqrt(rows), math.isqrt(rows), 4))
    with pytest.raises(fxopt.GuardError, match="dimension 0 is 11"):
        traced(torch.randn(11, 4))


def matched(n):
    match n, n / 2:
        case [int(whole), float() as half]:
            return whole * half
    return 0


FUNCTIONS = {
    "log": lambda n: math.log(n) / math.log(512) + math.log(n + 1, 2),
    "by name": lambda n: log(n) + math.exp(-n) + math.sin(n),
    "power of 2": lambda n: 2 ** math.ceil(math.log2(n)),
    "power": lambda n: math.pow(n, 0.5),
    "whole root": lambda n: math.isqrt(n) + math.isqrt(n * n) + math.isqrt(n * n - 1) + math.isqrt(49),
    "exponent": lambda n: math.pow(2, n),
    "float": lambda n: float(n) * 0.1 + float("1.5"),
    "numpy": lambda n: np.sqrt(n) / float(np.ceil(n / 2)),
    "divmod": lambda n: sum(divmod(n, 3)),
    "float or int": lambda n: (
        2 if isinstance(n / 2, float) and not isinstance(n / 2, int) and type(n / 2) is float else 3
    ),
    "matched": matched,
}


class Computes(nn.Module):
    def __init__(self, compute):
        super().__init__()
        self.compute = compute

    def forward(self, x):
        number = self.compute(x.shape[0])
        return x * number, x.new_zeros(int(number) + 9)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_a_free_size_is_free(name):
    model = Computes(FUNCTIONS[name])
    traced = fxopt.trace(model, (torch.ones(5, 1, dtype=torch.float64),), dynamic_shapes=({0: Dim.DYNAMIC},))
    for graph in (traced, copy.deepcopy(traced)):
        for n in (5, 1, *range(2, 20)):
            x = torch.rand(n, 1, dtype=torch.float64)
            assert all(map(torch.equal, graph(x), model(x)))


@pytest.mark.parametrize(
    "compared",
    [
        lambda n: math.log(n - 1) > 0.5,
        lambda n: math.exp(n) > 100 + math.tanh(n),
        lambda n: (n > 2) == 1,
        lambda n: (n > 2) != False,  # noqa: E712
        lambda n: (n < 3) != True,  # noqa: E712
    ],
)
def test_a_function_of_a_free_size_that_decides_leaves_a_guard(compared):
    model = module(lambda self, x: x * 2 if compared(x.shape[0]) else x)
    traced = fxopt.trace(model, (torch.ones(5, 1),), dynamic_shapes=({0: Dim.AUTO},))
    assert torch.equal(traced(torch.ones(7, 1)), torch.ones(7, 1) * 2)
    for n in (1, 2):
        with pytest.raises(fxopt.GuardError):
            traced(torch.ones(n, 1))


def test_powers_of_negative_numbers():
    model = module(lambda self, x: (x * (-1) ** len(x), (-1) ** torch.arange(len(x)), (-2.0) ** x))
    traced = fxopt.trace(model, (torch.ones(5, 1),), dynamic_shapes=({0: Dim.AUTO},))
    for graph in (traced, copy.deepcopy(traced)):
        for n in range(1, 6):
            assert all(map(torch.equal, graph(torch.ones(n, 1)), model(torch.ones(n, 1))))


def test_a_size_that_the_forward_fixes_is_checked():
    def forward(self, x):
        found = x[x > 0]
        return (found + torch.ones(3)) * len(found)

    traced = fxopt.trace(module(forward), (torch.tensor([1.0, 2, 3, -1]),))
    assert traced(torch.tensor([1.0, 2, -3, 1])).tolist() == [6, 9, 6]
    with pytest.raises(GuardError, match=r"assumes Eq\(u0, 3\)"):
        traced(torch.tensor([1.0, -2, -3, -1]))  # which is broadcast


def test_a_loop_over_as_many_rows_as_only_a_run_knows_is_refused_with_its_line():
    def forward(self, x):
        for step in torch.arange(0, x.sum().abs().ceil().item()):
            x = x + step
        return x

    with pytest.raises(fxopt.TraceError, match="decides on the value of a tensor.*`for step in torch.arange"):
        fxopt.trace(module(forward), (X,))
    assert_same(fxopt.trace(module(forward), (X,), specialize=True)(X), module(forward)(X))


def test_a_loop_over_as_many_rows_as_a_constant_says_is_written_out():
    def forward(self, x):
        steps = torch.arange(0, torch.linspace(0.0, 5.0, 6)[-1].item())
        for before, after in zip(steps[:-1], steps[1:]):  # noqa: B905, RUF007
            x = x + (after - before) * x
        return x

    assert_same(fxopt.trace(module(forward), (X,))(X), module(forward)(X))


def test_arithmetic_of_torch_on_sizes_that_fails_is_named():
    def forward(self, x):
        batch, n, _ = x.shape
        between = x[:, :, None] - x[:, None]
        others = (~torch.eye(n, dtype=torch.bool))[None].expand(batch, -1, -1)
        return between.masked_select(others[..., None]).reshape(batch, n, n - 1, 3)

    x = torch.randn(4, 6, 3)
    assert_same(fxopt.trace(module(forward), (x,))(x), module(forward)(x))
    with pytest.raises(
        fxopt.TraceError, match=r"symbolic sizes failed.*`return between.masked_select.*Fix these sizes"
    ):
        fxopt.trace(module(forward), (x,), dynamic_shapes=({0: Dim.DYNAMIC},))


def test_a_check_of_a_truth_value_has_metadata():
    """`torch._check` asks for the number of a truth value; passes refuse nodes without metadata."""

    def forward(self, x, mask):
        torch._check(mask.all().item())
        return x * 2

    traced = fxopt.trace(module(forward), (torch.randn(2, 3), torch.ones(3, dtype=torch.bool)))
    assert all(node.meta["val"] is not None for node in traced.graph.nodes if node.users)
    assert "int_1" in traced.code


def test_a_search_for_the_path_of_an_einsum_fixes_no_size(monkeypatch):
    class Paths:
        """opt_einsum, as far as torch calls it: it compares sizes."""

        @staticmethod
        def contract_path(equation, *operands, optimize):
            return [(0, 1) if operands[0].shape[0] == 2 else (1, 2), (0, 1)], None

    class Three(nn.Module):
        def forward(self, a, b, c):
            return torch.einsum("bi,bj,bi->bij", a, b, c)

    monkeypatch.setattr(torch.backends.opt_einsum.m, "_opt_einsum", Paths)
    for name, value in {"is_available": lambda: True, "enabled": True}.items():
        monkeypatch.setattr(torch.backends.opt_einsum, name, value)
    a, b = torch.randn(2, 3), torch.randn(2, 4)
    batch = {0: Dim("batch")}
    traced = fxopt.trace(Three(), (a, b, a), dynamic_shapes={"a": batch, "b": batch, "c": batch})
    assert torch.backends.opt_einsum.enabled
    a, b = torch.randn(5, 3), torch.randn(5, 4)
    assert torch.allclose(traced(a, b, a), Three()(a, b, a))
