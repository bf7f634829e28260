"""Questions whose answers make no difference: the graph is kept, and nothing else is taken to make none."""

import copy
import pickle

import pytest
import sympy
import torch
from torch import nn
from torch.export import Dim

import fxopt
from fxopt.capture.data_dependence.branch_decisions import _size_compared_with_one
from fxopt.capture.runtime.checks import check_same_outcome
from tests.capture.test_both_sides import assert_as_model, nodes
from tests.capture.test_decisions import captured_right_or_refused, checks, right_or_refused
from tests.modules import module

X = torch.tensor([[1.0, -2.0, 3.0, 4.0], [0.5, 6.0, -7.0, 8.0], [1.0, 2.0, 3.0, -4.0]])
ROWS = ({0: Dim.AUTO},)
U, V = sympy.symbols("u v", integer=True, nonnegative=True)


def unused(self, x):
    if x.sum() > 10:
        return x + 1
    return x.add(1)


def named(self, x):
    name = "large" if x.sum() > 10 else "small"
    return x * len(name)


def causal(self, x):
    """As attention does: a size, and something that is known to be False."""
    found = x[x > 0]
    flag = found.shape[0] > 1 and False
    return nn.functional.scaled_dot_product_attention(
        found[None, :, None], found[None, :, None], found[None, :, None], is_causal=flag
    )


def images(self, x, sizes, causal=False):
    """As attention over the patches of images does, whose heights and widths a tensor holds."""
    patches = torch.cat([x[:, :, :height, :width].flatten(2) for height, width in sizes.tolist()], dim=2)
    heads = patches.transpose(1, 2).view(1, -1, 2, 2).transpose(1, 2)
    flag = heads.shape[2] > 1 and causal
    found = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=flag)
    return found.transpose(1, 2).reshape(1, found.shape[2], -1)


def chunks(self, x, lengths):
    parts = torch.split(x, lengths.tolist())
    return torch.cat([p * 2 if p.shape[0] > 1 else p.mul(2) for p in parts])


def over_layers(self, x):
    for _ in range(3):
        x = x + 1 if x.sum() > 10 else x.add(1)
    return x


def two_lines(self, x):
    y = x * 2 if x.sum() > 0 else x.mul(2)
    return y + 1 if y.max() > 5 else y.add(1)


@pytest.mark.parametrize("forward", [unused, named, causal])
@pytest.mark.parametrize("free", [None, ROWS])
def test_answers_without_a_difference_need_no_check(forward, free):
    model = module(forward)
    gm = fxopt.trace(model, (X,), dynamic_shapes=free)
    assert not checks(gm)
    assert not [node for node in gm.graph.nodes if node.target is check_same_outcome]
    one = -torch.ones(3, 4)
    one[1, 2] = 7
    assert not any(right_or_refused(gm, model, X, X.abs() * 10, one))
    if free:
        assert not any(right_or_refused(gm, model, X[:2], torch.cat([X, X])))


def test_a_size_of_zero_is_refused_where_a_question_sets_it_apart():
    gm = fxopt.trace(module(causal), (X,))
    assert right_or_refused(gm, module(causal), -X.abs()) == [True]


def test_patches_of_images_of_any_size():
    x, model = torch.randn(1, 4, 6, 6), module(images)
    gm = fxopt.trace(model, (x, torch.tensor([[2, 4], [3, 3]])))
    assert not checks(gm)
    for sizes in ([[2, 4], [3, 3]], [[6, 6], [1, 2]], [[1, 0], [1, 1]], [[0, 0], [2, 1]]):
        assert torch.equal(gm(x, torch.tensor(sizes)), model(x, torch.tensor(sizes)))
    with pytest.raises(fxopt.GuardError, match="a size is not 0"):
        gm(x, torch.tensor([[0, 3], [1, 0]]))

    def causal(self, x, sizes):
        return images(self, x, sizes, causal=True)

    model, examples = module(causal), (x, torch.tensor([[2, 4], [3, 3]]))
    captured_right_or_refused(
        model, examples, [(x, torch.tensor(sizes)) for sizes in ([[6, 6], [1, 2]], [[0, 0], [2, 1]])]
    )


@pytest.mark.parametrize(
    ("relation", "size"),
    [
        (sympy.Gt(U * V, 1), U * V),
        (sympy.Gt(6 * U * V + 6, 12), U * V),
        (sympy.Lt(1, U + V), U + V),
        (sympy.Le(U * V - 1, 0), U * V),
        (sympy.Gt(U * V, 0), None),
        (sympy.Gt(U * V, 2), None),
        (sympy.Ne(U * V, 1), None),
        (sympy.Gt(U - V, 1), None),
        (sympy.Gt(sympy.Symbol("x", real=True), 1), None),
        (sympy.Symbol("b"), None),
    ],
)
def test_sizes_of_0_and_1_are_set_apart(relation, size):
    assert _size_compared_with_one(relation) == size


def test_all_answers_at_a_line_must_be_the_same():
    model = module(over_layers)
    gm = fxopt.trace(model, (X,))
    mixed = X * 0 + 0.5  # 6, 18, 30
    for again in (gm, copy.deepcopy(gm), pickle.loads(pickle.dumps(gm))):
        again.graph.eliminate_dead_code()
        again.recompile()
        assert right_or_refused(again, model, X.abs() * 10, -X.abs() * 10, mixed) == [False, False, True]
    with pytest.raises(
        fxopt.GuardError, match=r"the decisions differ.*test_same_graph\.py:\d+: `x = x \+ 1 if"
    ):
        gm(mixed)
    assert gm(mixed.to("meta")).shape == mixed.shape


def test_chunks_of_any_length():
    model = module(chunks)
    x = torch.arange(12.0).view(6, 2)
    gm = fxopt.trace(model, (x, torch.tensor([2, 4])), dynamic_shapes=({0: Dim.AUTO}, None))
    for rows, lengths in ((6, [3, 3]), (6, [4, 2]), (2, [1, 1])):
        given = x[:rows], torch.tensor(lengths)
        assert torch.equal(gm(*given), model(*given))
    for lengths in ([1, 5], [0, 6]):
        with pytest.raises(fxopt.GuardError):
            gm(x, torch.tensor(lengths))


def test_all_combinations_of_two_lines_are_tried():
    model = module(two_lines)
    gm = fxopt.trace(model, (X,))
    inputs = [X, -X, X * 100, X * 0.01, -X * 0.01]
    assert len({(bool(x.sum() > 0), bool((x * 2).max() > 5)) for x in inputs}) == 4
    assert not any(right_or_refused(gm, model, *inputs))

    def both(self, x):
        calm = True
        if x.sum() > 10:
            calm = False
        if x.max() > 5:
            calm = False
        return x * 2 if calm else x

    with pytest.raises(fxopt.TraceError, match="decides on the value"):
        fxopt.trace(module(both), (X,))


class Kept:
    """Facts that a graph does not show by itself."""

    @staticmethod
    def constant(self, x):
        return x + torch.tensor([1.0] if x.sum() > 10 else [2.0])

    @staticmethod
    def zero(self, x):
        return x / torch.tensor([0.0] if x.sum() > 10 else [-0.0])

    @staticmethod
    def argument(self, x):
        return x * (0.0 if x.sum() > 10 else -0.0)

    @staticmethod
    def flag(self, x):
        return x.sum(0, keepdim=bool(x.sum() > 10))

    @staticmethod
    def call(self, x):
        return x.exp() if x.sum() > 10 else x.exp2()

    @staticmethod
    def order(self, x):
        y, z = x + 1, x + 2
        return (y, z) if x.sum() > 10 else (z, y)

    @staticmethod
    def structure(self, x):
        return (x + 1,) if x.sum() > 10 else [x + 1]

    @staticmethod
    def keys(self, x):
        y, z = x + 1, x + 2
        return {"a": y, "b": z} if x.sum() > 10 else {"b": z, "a": y}

    @staticmethod
    def answer(self, x):
        return x, bool(x.sum() > 10)

    @staticmethod
    def state(self, x):
        self.last = "large" if x.sum() > 10 else "small"
        return x

    @staticmethod
    def buffer(self, x):
        if x.sum() > 10:
            self.count.add_(1)
        return x

    @staticmethod
    def draw(self, x):
        if x.sum() > 10:
            torch.rand(2)
        return x + torch.rand(1)

    @staticmethod
    def mode(self, x):
        with torch.set_grad_enabled(bool(x.sum() > 10)):
            return self.dense(x)

    @staticmethod
    def dtype(self, x):
        return x + 1 if x.sum() > 10 and x.dtype == torch.float32 else x.add(1)

    @staticmethod
    def guard(self, x):
        if x.sum() > 10:
            assert x.shape[0] < 5
        return x + 1

    @staticmethod
    def size(self, x):
        n = x.shape[0] if x.sum() > 10 else 3
        return x.new_ones(n)

    @staticmethod
    def size_of_found(self, x):
        found = x[x > 0]
        other = x[x > 1]
        return x.new_ones(found.shape[0] if x.sum() > 10 else other.shape[0])

    @staticmethod
    def assumption(self, x):
        n, m = x[0].argmax().item(), x[1].argmax().item()
        if x.sum() > 10:
            torch._check(n == m)
        return x.new_ones(n + m + 1)


BOTH = {"constant", "zero", "argument", "call", "order"}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", [name for name in vars(Kept) if not name.startswith("_")])
def test_any_difference_leaves_the_decision_open_or_both_sides_in_the_graph(name):
    model = module(getattr(Kept, name), dense=nn.Linear(4, 4))
    model.register_buffer("count", torch.zeros(()))
    if name in BOTH:
        traced = fxopt.trace(model, (X,), dynamic_shapes=ROWS)
        assert len(nodes(traced)) == 1
        assert_as_model(traced, model, [(X,), (-X,), (X + 9,), (X[:1],), (X[:1] + 9,), (X * 0,)])
    else:
        with pytest.raises(fxopt.TraceError, match="decides on the value"):
            fxopt.trace(model, (X,), dynamic_shapes=ROWS)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("sign", [1, -1])
def test_a_loop_that_never_ends_with_one_answer_is_refused(sign):
    def forward(self, x):
        while (x * sign > 0).any():
            x = x - sign
        return x

    with pytest.raises(fxopt.TraceError, match="decides on the value"):
        fxopt.trace(module(forward), (X,))


def test_a_loop_until_a_value_says_otherwise_is_refused_at_once():
    runs = []

    def forward(self, x):
        runs.append(0)
        kept, left = [], (x > 0).nonzero()
        while left.numel():
            kept.append(left[0])
            left = left[1:]
        return kept

    with pytest.raises(fxopt.TraceError, match="decides on the value.*while left.numel"):
        fxopt.trace(module(forward), (X,))
    assert len(runs) <= 40  # each question took two runs


def test_a_loop_that_ends_by_itself_has_both_sides_of_each_question():
    def forward(self, x):
        for_now = 0
        while for_now < 2 and x.sum() > 0:
            x, for_now = x - 1, for_now + 1
        return x

    def broken_off(self, x):
        count = 0
        while x.sum() > 0:
            x, count = x - 1, count + 1
            if count == 2:
                break
        return x

    def by_a_flag(self, x):
        go, count = x.sum() > 0, 0
        while go:
            x, count = x - 1, count + 1
            go = count < 2 and x.sum() > 0
        return x

    def by_a_list(self, x):
        todo = [x.sum() > 0, x.mean() > 9, False]
        while todo.pop(0):
            x = x - 1
        return x

    def by_an_error(self, x):
        count = 0
        while x.abs().max() > 50:
            x, count = x / 10, count + 1
            if count > 2:
                raise RuntimeError("it does not converge")
        return x

    def by_a_choice(self, x):
        count = 0
        while x.sum() > 0 if count < 2 else False:
            x, count = x - 1, count + 1
        return x

    for each in (forward, broken_off, by_a_flag, by_a_list, by_an_error, by_a_choice):
        model = module(each)
        assert_as_model(fxopt.trace(model, (X,)), model, [(X,), (X + 0.3,), (X + 9,), (X - 9,)])


def test_a_tensor_is_listed_anew_when_it_was_written():
    def forward(self, x, lengths):
        first = torch.split(x, lengths.tolist())
        again = torch.split(x, lengths.tolist())
        lengths = lengths.flip(0)
        flipped = torch.split(x, lengths.tolist())
        kept = lengths.clone()
        kept.tolist()
        kept.view(-1).add_(torch.tensor([1, -1]))
        written = torch.split(x, kept.tolist())
        return [a + b for a, b in zip(first, again, strict=True)], flipped, written

    x, model = torch.arange(6.0), module(forward)
    gm = fxopt.trace(model, (x, torch.tensor([2, 4])))
    for lengths in ([2, 4], [3, 3], [5, 1]):
        torch.testing.assert_close(
            gm(x, torch.tensor(lengths)), model(x, torch.tensor(lengths)), rtol=0, atol=0
        )


def test_a_guard_that_divides_by_a_size_need_mean_nothing_at_one():
    model = module(lambda self, x: x.reshape(x.shape[0] // 4, 4, -1) * 2)
    gm = fxopt.trace(model, (torch.randn(16, 3),), dynamic_shapes=ROWS)
    for rows in (4, 64):
        x = torch.randn(rows, 3)
        assert torch.equal(gm(x), model(x))
    for rows in (1, 2):
        with pytest.raises(fxopt.GuardError, match=f"dimension 0 is {rows}"):
            gm(torch.randn(rows, 3))


def test_attention_over_chunks_whose_lengths_are_listed_three_times():
    def forward(self, x, lengths):
        splits = [torch.split(x, lengths.tolist(), dim=2) for _ in range(3)]
        attend = nn.functional.scaled_dot_product_attention
        parts = [attend(q, k, v, is_causal=q.shape[2] > 1 and False) for q, k, v in zip(*splits, strict=True)]
        return torch.cat([part.reshape(1, -1, part.shape[2], 4) for part in parts], dim=2)

    x, model = torch.randn(1, 2, 6, 4), module(forward)
    gm = fxopt.trace(model, (x, torch.tensor([2, 4])))
    for lengths in (torch.tensor([2, 4]), torch.tensor([3, 3])):
        assert torch.equal(gm(x, lengths), model(x, lengths))


class MaskedByProducts(nn.Module):
    """Tokens and a mask of one batch, which only a view of the mask says."""

    def forward(self, x, mask):
        scores = torch.matmul(x, x.transpose(-1, -2))
        assert len(x) != 1 or scores is not None
        return scores + mask.view(len(x), -1)[:, None]


@pytest.mark.long
def test_sizes_that_are_equal_in_products_alone_are_one_together():
    free = {0: Dim.AUTO, 1: Dim.AUTO}
    x, mask, model = torch.randn(2, 5, 4), torch.randn(2, 5), MaskedByProducts()
    traced = fxopt.trace(model, (x, mask), dynamic_shapes=({0: Dim.AUTO, 1: Dim.AUTO}, free))
    for batch, length in ((3, 7), (1, 5), (1, 6), (2, 1)):
        x, mask = torch.randn(batch, length, 4), torch.randn(batch, length)
        assert torch.equal(traced(x, mask), model(x, mask))


class Pooled(nn.Module):
    """Means of four rows each, of which a single row has none."""

    def forward(self, x):
        assert len(x) != 1 or x is not None
        rows = x[: len(x) // 4 * 4]
        return rows.view(len(x) // 4, 4, -1).mean(1) if len(rows) > 0 else rows


@pytest.mark.long
def test_a_size_that_is_divided_by_another_is_none_at_one():
    x, model = torch.randn(8, 3), Pooled()
    traced = fxopt.trace(model, (x,), dynamic_shapes=({0: Dim.AUTO},))
    assert not any(right_or_refused(traced, model, x, torch.randn(12, 3)))
    with pytest.raises(fxopt.GuardError):
        traced(torch.randn(1, 3))


class MaskedByValues(nn.Module):
    """Tokens and a mask of one batch, which meet in an index alone."""

    def forward(self, x, mask):
        assert len(x) != 1 or mask is not None
        assert len(mask) != 1 or x is not None
        y = x.clone()
        y[mask > 0] = 0.0
        return y if y.sum() > -1e9 else x


@pytest.mark.long
def test_sizes_that_meet_in_an_index_alone_are_one_together():
    x, mask, model = torch.randn(2, 5), torch.randn(2, 5), MaskedByValues()
    traced = fxopt.trace(model, (x, mask), specialize=True, dynamic_shapes=({0: Dim.AUTO}, {0: Dim.AUTO}))
    for batch in (1, 3):
        x, mask = torch.randn(batch, 5), torch.randn(batch, 5)
        assert torch.equal(traced(x, mask), model(x, mask))
