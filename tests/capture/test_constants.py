"""Decisions on tensors that a forward makes of numbers alone: they are the same at each call, and need neither an example nor a check."""

import itertools
import types

import pytest
import torch
from torch import nn

import fxopt
from fxopt.capture.runtime.conditional import IfElse
from tests.modules import module

X = torch.randn(3, 4)


def of_a_schedule(self, x):
    sigmas = torch.linspace(2, 0, 4, dtype=x.dtype, device=x.device)
    for now, then in itertools.pairwise(sigmas):
        x = x + self.dense(x) * (then - now)
        if then > 0:
            x = x * 2
    return x


def of_rates(self, x):
    for rate in [value.item() for value in torch.linspace(0, 0.3, 3)]:
        x = x * (1 - rate) if rate > 0 else self.dense(x)
    return x


def of_positions(self, x):
    for position in torch.arange(3):
        x = x + self.dense(x) * (1.0 if position % 2 == 0 else -1.0)
    return x[:, : int(torch.tensor([1, 2]).sum())]


def written_through_a_view(self, x):
    levels = torch.zeros(3)
    first = levels[0] + 0
    rest = levels[:]
    rest += 1
    y = x * 2 if levels[2] > 0 else x
    return y if first > 0 else self.dense(y)


@pytest.mark.parametrize("forward", [of_a_schedule, of_rates, of_positions, written_through_a_view])
def test_a_decision_on_constants_is_none(forward):
    model = module(forward, dense=nn.Linear(4, 4))
    traced = fxopt.trace(model, (X,), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    for x in (X, -X, torch.randn(1, 4)):
        assert torch.equal(traced(x), model(x))
    assert traced.meta["forward_runs"] == 1
    assert "check_outcome" not in traced.code


def of_an_attribute(self, x):
    first, second = self.table
    return self.dense(x) * float(first) if second and int(first) == 0 else x


def test_an_attribute_that_decides_is_checked_as_the_user_may_write_it():
    model = module(of_an_attribute, dense=nn.Linear(4, 4), table=torch.tensor([0.0, 1.0]))
    traced = fxopt.trace(model, (X,))
    assert traced.meta["forward_runs"] == 1
    model.table[1] = 2
    assert torch.equal(traced(X), model(X))
    model.table.zero_()
    with pytest.raises(fxopt.GuardError, match=r"it was True.*if second and"):
        traced(X)


def set_up_once(self, x):
    if not self.ready:
        with torch.no_grad():
            self.scale.copy_(x.std(0))
            self.ready.fill_(True)
    return self.dense(x) * self.scale


def of_as_many_as_a_buffer_says(self, x):
    return self.dense(x)[:, : int(self.ready.sum())] * self.scale[0]


def set_up_by_inputs(self, x):
    if not self.ready or (self.scale * x).sum() < 0:
        with torch.no_grad():
            self.scale.copy_(x.std(0))
    return self.dense(x) * self.scale


def with_state(forward, ready=True):
    model = module(forward, dense=nn.Linear(4, 4), scale=nn.Parameter(torch.tensor([4.0, -3.0, 1.0, 0.2])))
    model.register_buffer("ready", torch.tensor(ready))
    return model


@pytest.mark.parametrize("forward", [set_up_once, of_as_many_as_a_buffer_says])
def test_where_both_sides_have_no_graph_the_state_of_now_decides_and_is_checked(forward):
    model = with_state(forward)
    traced = fxopt.trace(model, (X,))
    assert torch.equal(traced(X), model(X))
    model.ready.fill_(False)
    with pytest.raises(fxopt.GuardError, match=r"it was (True|1).*self\.ready"):
        traced(X)
    model.ready.fill_(True)
    assert torch.equal(traced(X), model(X))


def test_state_that_the_forward_writes_itself_does_not_decide():
    with pytest.raises(fxopt.TraceError, match="decides on the value.*tensor 'ready' of the model"):
        fxopt.trace(with_state(set_up_once, ready=False), (X,))


def test_the_state_decides_nothing_that_depends_on_inputs_too():
    with pytest.raises(fxopt.TraceError, match=r"decides on the value.*sum\(\) < 0"):
        fxopt.trace(with_state(set_up_by_inputs), (X,))


def of_an_object(self, x):
    return x * 2 if self.schedule.sigmas[0] > 0 else x


def several(self, x):
    return x if torch.linspace(0, 1, 3) else -x


def test_what_an_object_holds_is_fixed_and_takes_no_check():
    model = module(of_an_object, schedule=types.SimpleNamespace(sigmas=torch.ones(2)))
    traced = fxopt.trace(model, (X,))
    assert torch.equal(traced(X), model(X))
    assert "check_outcome" not in traced.code
    with pytest.raises(fxopt.TraceError, match="decides on the value"):
        fxopt.trace(module(several), (X,))


def kept_of_sizes(self, x):
    y = x * 2 if self.long is not None and self.long else x
    self.long = torch.arange(x.shape[0])[-1] > 1000
    return y


def kept_of_a_buffer(self, x):
    y = x * 2 if self.long is not None and self.long else x
    self.long = self.scale[0] > 0
    return y


@pytest.mark.parametrize("forward", [kept_of_sizes, kept_of_a_buffer])
def test_what_an_earlier_call_has_computed_is_no_constant(forward):
    model = module(forward, long=None)
    model.register_buffer("scale", -torch.ones(1))
    with pytest.raises(fxopt.TraceError, match="'long'.*decides on the value of a tensor"):
        fxopt.trace(model, (X,), dynamic_shapes=({0: torch.export.Dim.AUTO},))


def kept_numbers(self, x):
    if self.long is None:
        self.long = {"levels": torch.linspace(0, 1, 4)}
    for level in self.long["levels"]:
        x = x * level if level > 0.5 else self.dense(x)
    return x


def kept_of_fixed_sizes(self, x):
    if self.long is None:
        self.long = torch.arange(x.shape[1])
    return -x if self.long[-1] > 1000 else x * 2


def kept_to_the_end(self, x):
    if self.long is None:
        self.long = torch.ones(2)
    self.long = (self.long - 1).clamp(min=0)
    return x * 2 if self.long[0] > 0 else x


@pytest.mark.parametrize("forward", [kept_numbers, kept_of_fixed_sizes, kept_to_the_end])
def test_a_decision_on_numbers_that_an_earlier_call_has_kept_is_none(forward):
    model = module(forward, long=None, dense=nn.Linear(4, 4))
    traced = fxopt.trace(model, (X,), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    assert "check_outcome" not in traced.code
    for x in (X, -X, torch.randn(1, 4)):
        assert torch.equal(traced(x), model(x))


def kept_and_counted(self, x):
    self.long = torch.zeros(1) if self.long is None else self.long + 1
    return x * 2 if self.long[0] > 2 else x


def kept_of_an_attribute(self, x):
    if self.long is None:
        self.long = self.table * 2
    return x if self.long[1] > 1 else -x


@pytest.mark.parametrize("forward", [kept_and_counted, kept_of_an_attribute])
def test_numbers_that_are_others_in_later_calls_decide(forward):
    model = module(forward, long=None, table=torch.tensor([0.0, 1.0]))
    with pytest.raises(fxopt.TraceError, match="'long'.*It is no table"):
        fxopt.trace(model, (X,))


def under_autocast(self, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        product = torch.full((1, 1), 1.001) @ torch.ones(1, 1)
    return x + 1 if product > 1 else x - 1


def drawn(self, x):
    for number in torch.rand(3):
        x = self.dense(x) if number > 0.5 else x
        x = x * 2 if number > 0.5 else x
    return x


def written_with_an_input(self, x):
    levels = torch.zeros(3)
    levels[1:].add_(x.sum())
    return x if levels[2] > 0 else -x


def written_by_a_layer(self, x):
    levels = torch.zeros(3) - 1
    self.relu(levels)
    return x if levels.sum() < -1 else -x


def written_afterwards(self, x):
    y = self.dense(x) if self.table[1] > 1 else x
    self.table += 1
    return y


def of_a_free_size(self, x):
    return x if torch.arange(x.shape[0]).max() > 1 else -x


@pytest.mark.parametrize(
    "forward", [written_with_an_input, written_by_a_layer, of_a_free_size, under_autocast]
)
def test_a_decision_on_what_may_be_another_value_is_one(forward):
    model = module(forward, dense=nn.Linear(4, 4), relu=nn.ReLU(inplace=True))
    traced = fxopt.trace(model, (X,), dynamic_shapes=({0: torch.export.Dim.AUTO},), verify=False)
    assert any(isinstance(node.target, IfElse) for node in traced.graph.nodes)
    for x in (X, -X, X.abs(), -X.abs(), X[:1], torch.randn(7, 4)):
        assert torch.equal(traced(x), model(x))


@pytest.mark.parametrize("forward", [drawn, written_afterwards])
def test_a_decision_on_what_a_call_draws_or_writes_is_refused(forward):
    model = module(forward, dense=nn.Linear(4, 4), table=torch.tensor([0.0, 1.0]))
    with pytest.raises(fxopt.TraceError, match="decides on the value"):
        fxopt.trace(model, (X,), dynamic_shapes=({0: torch.export.Dim.AUTO},), verify=False)
