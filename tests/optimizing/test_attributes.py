"""Tensors that a module keeps as attributes beside its weights, and that callers replace from call to call."""

import copy
import warnings

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

import fxopt
from fxopt.errors import FallbackWarning
from fxopt.optimizing import dispatch, prepare
from tests.modules import module

X = torch.randn(3, 4)


class Keeps(nn.Module):
    """A layer with an attribute `kept`, which its forward reads by a function, or does not read."""

    def __init__(self, read):
        super().__init__()
        self.linear, self.kept, self.read = nn.Linear(4, 4), torch.tensor([2, 3]), [read]

    def forward(self, x):
        return self.read[0](self, self.linear(x))


READS = {
    "values": lambda self, x: x * self.kept[0],
    "a view": lambda self, x: x * self.kept.flip(0)[:1],
    "a number": lambda self, x: x * int(self.kept[1]),
    "numbers": lambda self, x: x * self.kept.tolist()[0],
    "a loop": lambda self, x: sum(x for _ in range(self.kept[0])),
    "a size": lambda self, x: x.repeat(int(self.kept[0]), 1),
    "a branch": lambda self, x: x + 1 if self.kept.sum() > 5 else x,
    "a function": lambda self, x: torch.vmap(lambda y: y * self.kept[0])(x),
    "its data": lambda self, x: x * self.kept.data[1],
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_a_tensor_that_the_forward_reads_may_be_replaced(read):
    model = Keeps(read).eval()
    fast, plain = fxopt.optimize(model, tune=False), copy.deepcopy(model)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        for values in ([2, 3], [1, 2], [2, 3], [4, 1]):
            model.kept, plain.kept = torch.tensor(values), torch.tensor(values)
            torch.testing.assert_close(fast(X), plain(X))
            torch.testing.assert_close(fast(X), plain(X))


def test_a_tensor_that_no_graph_reads_is_replaced_without_another_graph():
    """As `generate` does in Qwen2-VL: it keeps the offset of the positions, and gives the positions."""
    model = Keeps(lambda self, x: x.relu()).eval()
    fast = fxopt.optimize(model, tune=False)
    with torch.no_grad():
        for values in ([2, 3], [1, 2], [2, 3]):
            model.kept = torch.tensor(values)
            torch.testing.assert_close(fast(X), model.linear(X).relu())
    assert len(fast.report) == 1
    with torch.no_grad():
        model.kept = None  # the forward may ask that
        fast(X)
    assert len(fast.report) == 2


def test_a_tensor_that_a_later_graph_reads_has_the_value_of_then():
    model = Keeps(lambda self, x: x * self.kept[0] if x.shape[0] == 2 else x).eval()
    fast, plain = fxopt.optimize(model, tune=False), copy.deepcopy(model)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        for rows, values in (
            (3, [2, 3]),
            (3, [4, 3]),
            (2, [4, 3]),
            (2, [5, 3]),
            (3, [5, 3]),
            (2, [4, 3]),
            (2, [2, 3]),
        ):
            model.kept, plain.kept = torch.tensor(values), torch.tensor(values)
            torch.testing.assert_close(fast(X[:rows]), plain(X[:rows]))


def test_what_the_first_forward_keeps_costs_no_graph_twice(monkeypatch):
    """As in Mimi, whose quantizers keep their codebooks at the first call."""
    made = []
    monkeypatch.setattr(dispatch, "prepare", lambda *args: made.append(0) or prepare.prepare(*args))

    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.kept = nn.Linear(4, 4), None

        def forward(self, x):
            if self.kept is None:
                self.kept = self.linear.weight * 2
            return x @ self.kept.T + self.linear(x)

    model = Lazy().eval()
    fast, plain = fxopt.optimize(model, tune=False), copy.deepcopy(model)
    with torch.no_grad():
        for rows in (3, 2, 3, 1):
            torch.testing.assert_close(fast(X[:rows]), plain(X[:rows]))
        assert len(made) == 2
        model.linear.weight.mul_(3)
        model.kept = plain.kept = None
        plain.linear.weight.mul_(3)
        for rows in (3, 2):
            torch.testing.assert_close(fast(X[:rows]), plain(X[:rows]))
        model.kept, plain.kept = model.kept + 1, plain.kept + 1
        for rows in (3, 2):
            torch.testing.assert_close(fast(X[:rows]), plain(X[:rows]))


def test_entries_of_an_output_object_that_came_late_stay_last():
    """As what the vision model of InternVL gives, which is an input of the next call."""

    class Reads(nn.Module):
        def forward(self, given, x):
            return given[1] + x * given.pooler_output + given.last_hidden_state

    given = BaseModelOutputWithPooling(last_hidden_state=X, attentions=X + 2)
    given.pooler_output = X + 1
    model = Reads().eval()
    torch.testing.assert_close(fxopt.trace(model, (given, X))(given, X), model(given, X))
    fast = fxopt.optimize(model, tune=False)
    with torch.no_grad():
        torch.testing.assert_close(fast(given, X), model(given, X))
    assert fast.report[0].reason is None


@pytest.mark.parametrize(
    "layer", [nn.LayerNorm(4), nn.Linear(4, 4), nn.RMSNorm(4)], ids=lambda layer: type(layer).__name__
)
def test_a_weight_that_is_no_parameter_may_be_replaced(layer):
    del layer.weight
    layer.weight = torch.rand(4, 4) if isinstance(layer, nn.Linear) else torch.rand(4)
    model = nn.Sequential(nn.Linear(4, 4), layer).eval()
    fast, plain = fxopt.optimize(model, tune=False), copy.deepcopy(model)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(fast(X), plain(X))
            model[1].weight = plain[1].weight = torch.rand_like(model[1].weight)


def test_a_forward_may_ask_which_of_its_tensors_an_attribute_is():
    model = Keeps(lambda self, x: x if self.kept is self.day else -x).eval()
    model.day, model.night = torch.ones(2), torch.zeros(2)
    model.kept = model.day
    fast = fxopt.optimize(model, tune=False)
    with torch.no_grad():
        for kept, sign in ((model.day, 1), (model.night, -1), (model.day, 1), (torch.ones(2), -1)):
            model.kept = kept
            torch.testing.assert_close(fast(X), sign * model.linear(X))


def test_a_model_that_is_changed_while_its_second_graph_is_made(monkeypatch):
    def changing(*args):
        found = prepare.prepare(*args)
        if len(made) == 1:
            model.factor = 3
        made.append(0)
        return found

    made = []
    monkeypatch.setattr(dispatch, "prepare", changing)

    class Lazy(Keeps):
        factor = 2

        def forward(self, x):
            if self.kept is None:
                self.kept = self.linear.weight * 2
            return x @ self.kept.T * self.factor

    model = Lazy(None).eval()
    model.kept, model.factor = None, 2
    fast = fxopt.optimize(model, tune=False)
    with torch.no_grad():
        for rows in (3, 2, 2, 3):
            found = fast(X[:rows])
            torch.testing.assert_close(found, model.forward(X[:rows]))
    assert model.factor == 3


def test_a_forward_may_assign_a_view_of_a_buffer():
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("table", torch.rand(8, 4))

        def forward(self, x):
            self.rows = self.table[: x.shape[0]]
            return self.linear(x) + self.rows

    model = Views().eval()
    fast, plain = fxopt.optimize(model, tune=False), copy.deepcopy(model)
    with torch.no_grad():
        model(X)
        for rows in (3, 2, 3, 1, 2):
            torch.testing.assert_close(fast(X[:rows]), plain(X[:rows]))
            assert model.rows.shape == (rows, 4)
    assert len(fast.report) == 2
    assert not fast.report.fallbacks


@torch.no_grad()
def test_a_list_that_gives_way_to_an_equal_one_is_no_change():
    """peft makes a new list of its active adapters for each switch."""
    model = module(lambda m, x: m.layer(x) + sum(m.shifts), layer=nn.Linear(4, 4), shifts=[1.0, 2.0])
    fast, x = fxopt.optimize(model, tune=False), torch.randn(2, 4)
    for shifts in ([1.0, 2.0], [1.0, 2.0], [1.0, -2.0], [1.0, 2.0]):
        model.shifts = shifts
        torch.testing.assert_close(fast(x), model(x))
    assert len(fast.report) == 2
    model.shifts.append(3.0)
    torch.testing.assert_close(fast(x), model(x))
