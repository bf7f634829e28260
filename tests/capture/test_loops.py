"""Loops over the places where a mask is true, and branches that write where one is: the graph holds for all masks."""

import contextlib
import copy
import pickle

import pytest
import torch
from torch import nn
from torch.export import Dim

import fxopt
from fxopt.testing import randomise
from tests.capture.test_both_sides import assert_as_model, nodes
from tests.modules import module

ROWS = {0: Dim.AUTO}
COUNTS: list[int] = []


class Experts(nn.ModuleDict):
    """As in transformers: each expert works on the tokens that are routed to it."""

    def __init__(self, experts=4, width=8):
        super().__init__({f"expert_{i}": nn.Linear(width, width) for i in range(experts)})

    def forward(self, x, chosen, weights):
        out = torch.zeros_like(x)
        mask = nn.functional.one_hot(chosen, len(self)).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for expert in hit:
            with torch.no_grad():
                rank, token = torch.where(mask[expert].squeeze(0))
            y = self[f"expert_{expert[0]}"](x[None, token].reshape(-1, x.shape[-1]))
            y *= weights[token, rank, None]
            out.index_add_(0, token, y)
        return out


def routed(tokens, experts=4):
    x = torch.randn(tokens, 8, dtype=torch.float64)
    weights = torch.rand(tokens, 2, dtype=torch.float64)
    one = torch.full((tokens, 2), experts - 1)
    return [(x, chosen, weights) for chosen in (torch.randint(0, experts, (tokens, 2)), one, one * 0)]


def test_a_mixture_of_experts_holds_for_all_routes_and_sizes():
    model = randomise(Experts()).double().eval()
    gm = fxopt.trace(model, routed(6)[0], dynamic_shapes=(ROWS, ROWS, ROWS))
    names = [node.target for node in gm.graph.nodes if node.op == "call_module"][1:]
    assert names == [f"expert_{i}" for i in range(4)]
    for graph in (gm, copy.deepcopy(gm), pickle.loads(pickle.dumps(gm))):
        for tokens in (6, 9, 2, 1):
            for inputs in routed(tokens):
                assert torch.equal(graph(*inputs), model(*inputs))
    assert any("would write nothing" in guard.limit for guard in fxopt.guards(gm))


def test_a_mixture_of_experts_gives_the_gradients():
    model = randomise(Experts()).double()
    gm = fxopt.trace(model, routed(6)[0])
    for inputs in routed(6):
        grads = []
        for run in (model, gm):
            model.zero_grad()
            run(*inputs).square().sum().backward()
            grads.append([0 if p.grad is None else p.grad.clone() for p in model.parameters()])
        # Experts that are not hit get a gradient of zeros, and none from the model.
        assert all((one - other).abs().max() == 0 for other, one in zip(*grads, strict=True))


def filled(self, x, mask):
    x = x + 1
    for column in range(2):
        if mask[:, column].any():
            x[mask[:, column]] = self.dense(x[mask[:, column]])
    return x


def left_out_when_empty(self, x, mask):
    out = x.clone()
    for column in mask.any(0).nonzero():
        rows = mask[:, int(column.item())].nonzero()[:, 0]
        if rows.numel() == 0:
            continue
        out.index_add_(0, rows, self.dense(x[rows]))
    return out * 2


def out_of_range(self, x, mask):
    """As experts with one class more than there are, for tokens that are routed nowhere."""
    out, dense = x.clone(), self.dense.weight[:2]
    for column in nn.functional.pad(mask.any(0), (0, 1)).nonzero():
        rows = torch.where(mask[:, column[0]])[0]
        out.index_add_(0, rows, x[rows] * dense[column[0]])
    return out


def averaged(self, x, mask):
    """Writes one number, of a part of `x` that may have no entries."""
    out, hidden = x.clone(), mask.any(1)
    if hidden.any():
        out[hidden] = x[hidden].abs().sqrt().mean() + self.dense.weight.sum()
    return out


X = torch.randn(5, 4, dtype=torch.float64)
MASKS = [
    torch.tensor([[0, 0]] * 5).bool(),
    torch.tensor([[1, 0]] * 5).bool(),
    torch.tensor([[0, 0], [1, 1], [0, 0], [0, 1], [0, 0]]).bool(),
    torch.ones(5, 2).bool(),
]


@pytest.mark.sweep(4)
@pytest.mark.parametrize("forward", [filled, left_out_when_empty, out_of_range, averaged])
@pytest.mark.parametrize("free", [None, (ROWS, ROWS)])
def test_what_writes_nothing_may_be_left_out(forward, free):
    model = module(forward, dense=randomise(nn.Linear(4, 4)).double())
    for example in MASKS:
        gm = fxopt.trace(model, (X, example), dynamic_shapes=free)
        for mask in MASKS:
            assert torch.equal(gm(X, mask), model(X, mask))
            if free:
                assert torch.equal(gm(X[:3], mask[:3]), model(X[:3], mask[:3]))


def padded(self, x, mask):
    """As attention that takes no mask where nothing is padded."""
    padding = mask if mask.any() else None
    for _ in range(2):
        scores = self.dense(x)[:, :2]
        if padding is not None:
            scores = scores.view(-1, 2, 1).masked_fill(padding.unsqueeze(-1), -1e9)
            scores = scores.view(-1, 2)
        x = x * scores.softmax(0).sum(1, keepdim=True)
    return x


@pytest.mark.parametrize("free", [None, (ROWS, ROWS)])
def test_a_mask_that_is_none_where_it_hides_nothing(free):
    model = module(padded, dense=randomise(nn.Linear(4, 4)).double())
    gm = fxopt.trace(model, (X, MASKS[2]), dynamic_shapes=free)
    for mask in MASKS:
        assert_equal(gm(X, mask), model(X, mask))
        if free:
            assert_equal(gm(X[:3], mask[:3]), model(X[:3], mask[:3]))


def test_a_mask_that_hides_something_else_is_noticed():
    def forward(self, x, mask, other):
        y = x + 1
        if mask.any():
            y = y.masked_fill(other, 0.0)
        return y * 2

    model, wide = module(forward), torch.ones(5, 4).bool()
    gm = fxopt.trace(model, (X, MASKS[2], wide))
    assert_equal(gm(X, MASKS[2], wide), model(X, MASKS[2], wide))
    assert_equal(gm(X, MASKS[0], ~wide), model(X, MASKS[0], ~wide))
    with pytest.raises(fxopt.GuardError, match="skips a write that the graph would make.*if mask.any"):
        gm(X, MASKS[0], wide)


def test_hooks_that_each_run_adds_are_the_same():
    """As those with which transformers collects the outputs of layers."""

    def forward(self, x, mask):
        if not self.hooked:
            self.hooked = True
            self.dense.register_forward_hook(lambda module, args, output: output * 2)
        return left_out_when_empty(self, x, mask)

    model = module(forward, dense=nn.Linear(4, 4).double(), hooked=False)
    gm = fxopt.trace(model, (X, MASKS[2]), verify=False)
    for mask in MASKS:
        assert torch.equal(gm(X, mask), model(X, mask))


def test_an_error_of_the_model_at_a_place_is_raised():
    def forward(self, x, mask):
        out = x.clone()
        for column in mask.any(0).nonzero():
            row = rows(mask, column)
            out.index_add_(0, row, x[row] * self.table[column[0]])
        return out

    model = module(forward)
    model.table = torch.randn(1, dtype=torch.float64)
    gm = fxopt.trace(model, (X, MASKS[1]))
    for mask in MASKS[:2]:
        assert torch.equal(gm(X, mask), model(X, mask))
    with pytest.raises(IndexError):
        model(X, MASKS[2])
    with pytest.raises(fxopt.GuardError, match=r"model raises IndexError: index 1 .*for column in mask\.any"):
        gm(X, MASKS[2])


def test_a_write_that_does_not_follow_the_mask_is_noticed():
    def forward(self, x, mask, rows):
        out = x.clone()
        for column in mask.nonzero():
            out.index_add_(0, rows[rows > column], x[rows[rows > column]])
        return out

    model = module(forward)
    none, some = torch.tensor([0, 0]), torch.tensor([0, 1])
    both, first = torch.tensor([True, True]), torch.tensor([True, False])
    gm = fxopt.trace(model, (X, both, some))
    assert torch.equal(gm(X, both, some), model(X, both, some))
    assert torch.equal(gm(X, first, some), model(X, first, some))
    assert torch.equal(gm(X, ~both, none), model(X, ~both, none))
    with pytest.raises(fxopt.GuardError, match="skips a write that the graph would make.*for column in mask"):
        gm(X, ~both, some)


class Different:
    """Gives what differs where something is left out."""

    @staticmethod
    def number(self, x, mask):
        for n, column in enumerate(mask.any(0).nonzero()):
            x.index_add_(0, rows(mask, column), x[rows(mask, column)] * n)
        return x

    @staticmethod
    def count(self, x, mask):
        count = 0
        for column in mask.any(0).nonzero():
            x.index_add_(0, rows(mask, column), x[rows(mask, column)])
            count += 1
        return x * count

    @staticmethod
    def first(self, x, mask):
        for column in mask.any(0).nonzero():
            x.index_add_(0, rows(mask, column), x[rows(mask, column)])
            break
        return x

    @staticmethod
    def last(self, x, mask):
        y = x
        for column in mask.any(0).nonzero():
            y = x[rows(mask, column)]
        return y.sum(0)

    @staticmethod
    def before(self, x, mask):
        y = x
        for column in mask.any(0).nonzero():
            x.index_add_(0, rows(mask, column), y[rows(mask, column)])
            y = y * 2
        return x

    @staticmethod
    def every_second(self, x, mask):
        kept = {}
        for column in torch.cat([mask, mask], 1).any(0).nonzero():
            y = x[rows(mask, column % 2)]
            x.index_add_(0, rows(mask, column % 2), y * kept.get(int(column) % 2, y).sum())
            kept[int(column) % 2] = y
        return x

    @staticmethod
    def count_of_one(self, x, mask):
        count, found = 0, torch.cat([mask, mask], 1).any(0)
        for column in found.nonzero():
            x.index_add_(0, rows(mask, column % 2), x[rows(mask, column % 2)])
            count += 1
        return x * 2 if count == 1 else x

    @staticmethod
    def third(self, x, mask):
        for n, column in enumerate(torch.cat([mask, mask], 1).any(0).nonzero()):
            y = x[rows(mask, column % 2)]
            x.index_add_(0, rows(mask, column % 2), y * 5 if n == 2 else y)
        return x

    @staticmethod
    def count_in_a_global(self, x, mask):
        COUNTS.clear()
        for column in torch.cat([mask, mask], 1).any(0).nonzero():
            x.index_add_(0, rows(mask, column % 2), x[rows(mask, column % 2)])
            COUNTS.append(1)
        return x * 2 if len(COUNTS) == 1 else x

    @staticmethod
    def one_line_for_two(self, x, mask):
        first, second = (bool(m.any()) for m in (mask[:, 0], mask[:, 1]))
        if first:
            x[mask[:, 0]] = 1
        if second:
            x[mask[:, 1]] = 2
        return x * 2 if first and not second else x

    @staticmethod
    def bits(self, x, mask):
        if mask.any():
            x = x.view(torch.int64)
        return x.to(torch.float32)

    @staticmethod
    def mode_around(self, x, mask):
        with torch.no_grad() if mask.any() else contextlib.nullcontext():
            y = self.dense(x)
        return y + self.dense(x)

    @staticmethod
    def copy_of_statistics(self, x, mask):
        mean = self.batch_norm.running_mean
        if mask.any():
            mean = mean.masked_fill(mask[:4, 0], 0.0)
        return self.batch_norm(x) + mean

    @staticmethod
    def perhaps_a_copy(self, x, mask):
        y = x.t().contiguous().t()
        if mask.any():
            z = y.contiguous()
            z.add_(1)
            x[mask.any(1)] = z[mask.any(1)]
        return x + y

    @staticmethod
    def inputs_that_share_memory(self, x, mask):
        y = x
        if mask.any():
            y = y.masked_fill(mask[:, :1], 0.0)
        mask.logical_not_()
        return y * 2

    @staticmethod
    def dropped_out(self, x, mask):
        if mask.any():
            x[mask.any(1)] = self.lstm(x)[0][mask.any(1)]
        return x + torch.rand(())

    @staticmethod
    def gathered(self, x, mask):
        return torch.cat([x, *(x[rows(mask, column)] for column in mask.any(0).nonzero())])

    @staticmethod
    def everywhere(self, x, mask):
        for column in mask.any(0).nonzero():
            x += x[rows(mask, column)].sum()
        return x

    @staticmethod
    def one_row(self, x, mask):
        for column in mask.any(0).nonzero():
            x[int(column)] += 1
        return x

    @staticmethod
    def always_somewhere(self, x, mask):
        for column in mask.any(0).nonzero():
            x.index_add_(0, column, x[:1])
        return x

    @staticmethod
    def written_copy(self, x, mask):
        y = x * 2
        first, z = y[0], y
        if mask.any():
            z = y.masked_fill(mask[:, :1], 0.0)
        z += 1
        return z, first

    @staticmethod
    def reshaped(self, x, mask):
        y = x[:3] * 2
        if mask.any():
            y = y.masked_fill(mask[:3, :1], 0.0).view(2, 6)
        return y[1, 0]

    @staticmethod
    def other_mask(self, x, mask):
        found = [m if m.any() else None for m in (mask, x > 1)]
        if found[0] is not None:
            x = x.masked_fill(x > 0, 0.0)
        return x * 2

    @staticmethod
    def transposed(self, x, mask):
        y = x[:4] * 2
        if mask.any():
            y = y.masked_fill(mask[:4, :1], 0.0).t()
        return y + x[:4]

    @staticmethod
    def in_a_view(self, x, mask):
        for column in mask.any(0).nonzero():
            x[1:].mul_(x[rows(mask, column)].sum())
        return x

    @staticmethod
    def buffer(self, x, mask):
        for column in mask.any(0).nonzero():
            self.total += x[rows(mask, column)].sum()
        return x * self.total

    @staticmethod
    def state(self, x, mask):
        for column in mask.any(0).nonzero():
            x.index_add_(0, rows(mask, column), x[rows(mask, column)])
            self.calls = "some"
        return x

    @staticmethod
    def random(self, x, mask):
        for column in mask.any(0).nonzero():
            y = nn.functional.dropout(x[rows(mask, column)])
            x.index_add_(0, rows(mask, column), y)
        return x + torch.rand(())

    @staticmethod
    def mode(self, x, mask):
        for column in mask.any(0).nonzero():
            x.index_add_(0, rows(mask, column), x[rows(mask, column)])
            torch.set_grad_enabled(False)
        return self.dense(x)

    @staticmethod
    def statistics(self, x, mask):
        for column in mask.any(0).nonzero():
            y = x[rows(mask, column)].unsqueeze(-1).expand(-1, -1, 2)
            x.index_add_(0, rows(mask, column), self.norm(y)[..., 0])
        return x

    @staticmethod
    def assumption(self, x, mask):
        n, m = x[0].argmax().item(), x[1].argmax().item()
        if mask.any():
            x[mask.any(1)] = 0
        else:
            torch._check(n + m < 5)
        return x.new_ones(n), x.new_ones(m)

    @staticmethod
    def otherwise(self, x, mask):
        if mask.any():
            x[mask[:, 0]] = 1
        else:
            x = x + 1
        return x

    @staticmethod
    def gradient(self, x, mask):
        """At 0, `sqrt` makes NaN of the gradient of a number that is written nowhere."""
        return x.masked_fill(mask.any(1, keepdim=True), x.sqrt().mean()) if mask.any() else x

    @staticmethod
    def entries(self, x, mask):
        if mask.any():
            x[mask.any(1)] = x[mask.any(1)].max()  # an error for a mask without places
        return x

    @staticmethod
    def carried(self, x, mask):
        """The fourth branch uses what the second has made: leaving out every other one does not show it."""
        factor = x.new_ones(())
        for column in range(4):
            if mask[:, column % 2].any():
                factor = factor * 2 if column % 2 else factor
                x.index_add_(0, rows(mask, [column % 2]), factor * x[rows(mask, [column % 2])])
        return x

    @staticmethod
    def places(self, x, mask):
        for column in mask.any(0).nonzero():
            column += 1
            x.index_add_(0, rows(mask, column - 1), x[rows(mask, column - 1)])
        return x


def assert_equal(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def rows(mask, column):
    return torch.where(mask[:, column[0]])[0]


BOTH = {
    *("bits", "mode_around", "copy_of_statistics", "inputs_that_share_memory", "written_copy", "reshaped"),
    *("transposed", "gradient"),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", [name for name in vars(Different) if not name.startswith("_")])
def test_what_makes_a_difference_is_refused_or_both_sides_are_in_the_graph(name):
    model = module(
        getattr(Different, name), dense=nn.Linear(4, 4), norm=nn.InstanceNorm1d(4, track_running_stats=True)
    )
    model.batch_norm, model.lstm = nn.BatchNorm1d(4), nn.LSTM(4, 4, 2, dropout=0.5)
    model.register_buffer("total", torch.zeros(()))
    model.double().train()
    if name in BOTH:
        traced = fxopt.trace(model, (X.clone(), MASKS[2]))
        assert len(nodes(traced)) == 1
        model.batch_norm.momentum = 0.0  # a call of either changes the statistics for the other
        calls = [(x, mask) for x in (X, -X, X * 0) for mask in (*MASKS, ~MASKS[1])]
        with torch.set_grad_enabled(
            name != "inputs_that_share_memory"
        ):  # one is written, which gradients need
            assert_as_model(traced, model, calls)
    else:
        with pytest.raises(fxopt.TraceError):
            fxopt.trace(model, (X.clone(), MASKS[2]))


def test_a_specialised_loop_runs_as_often_as_the_example_does():
    model = module(Different.count)
    gm = fxopt.trace(model, (X.clone(), MASKS[1]), specialize=True)
    assert torch.equal(gm(X.clone(), MASKS[1]), model(X.clone(), MASKS[1]))
    with pytest.raises(fxopt.GuardError):
        gm(X.clone(), MASKS[0])


def test_the_answer_is_that_of_the_question_and_not_of_a_later_time():
    def forward(self, x, mask):
        found, out = mask.any(), x.clone()
        seen = bool(found)
        found.logical_not_()
        if seen:
            out[mask] = 9.0
        return out

    wide = torch.cat([mask[:, :1].expand(-1, 4) for mask in MASKS[:1]])
    model = module(forward)
    gm = fxopt.trace(model, (X, ~wide))
    for mask in (wide, ~wide):
        assert torch.equal(gm(X, mask), model(X, mask))


def test_a_size_of_one_has_the_checks_that_it_needs():
    def forward(self, x, found, mask):
        out = x.clone()
        many = True if x.shape[0] > 1 else False  # noqa: SIM210 - a size that is compared is a question
        hit = bool(found.any())
        if hit or many:
            out[:, mask] = 7.0
        return out

    model, some = module(forward), torch.tensor([False, False, False, True])
    found = torch.tensor([True, False])
    gm = fxopt.trace(model, (X, found, some), dynamic_shapes=(ROWS, None, None))
    for x in (X, X[:1]):
        for given in (found, ~found & found):
            try:
                result = gm(x, given, some)
            except fxopt.GuardError:
                continue
            assert torch.equal(result, model(x, given, some))
