"""Tables that a forward keeps in the model for later calls: made anew by the graph where sizes and constants decide on them."""

import contextvars
import copy
import functools
import threading
import types
import weakref

import pytest
import torch
from torch import nn
from torch.export import Dim

import fxopt
from tests.modules import module

LENGTHS = (5, 3, 8, 1, 90, 4, 5)
FREE = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)


def rows(length, x):
    half = torch.outer(torch.arange(length, device=x.device, dtype=x.dtype), 1.0 / (2.0 + torch.arange(2.0)))
    return torch.cat((half, half), -1).cos()


def longer(self, x):
    if self.table is None or self.table.shape[0] < x.shape[1]:
        self.table = rows(x.shape[1], x)
    return self.dense(x) + self.table[: x.shape[1]]


def counted(self, x):
    if x.shape[1] > self.length:
        self.length = x.shape[1]
        with torch.no_grad():
            self.table = rows(self.length, x)
    return self.dense(x) + self.table[: x.shape[1]]


def of_this_size(self, x):
    if self.held.get("grid") is None or self.held["grid"].shape[0] != x.shape[1]:
        self.held["grid"] = sum(torch.meshgrid(torch.arange(x.shape[1]), torch.arange(4), indexing="ij"))
        self.held["anchors"] = torch.full((1, x.shape[1], 4), 3.0, dtype=x.dtype)
    return self.dense(x) * self.held["anchors"] + self.held["grid"]


def doubled(self, x):
    if self.table is None or self.table.shape[0] < x.shape[1]:
        self.table = rows(2 * x.shape[1], x)
    return self.dense(x) + self.table[: x.shape[1]]


def grown(self, x):
    if self.table is None:
        self.table = rows(x.shape[1], x)
    elif len(self.table) < x.shape[1]:
        self.table = torch.cat([self.table, rows(x.shape[1], x)[len(self.table) :]])
    return self.dense(x) + self.table[: x.shape[1]]


def like_the_input(self, x):
    if self.table is None or self.table.shape[0] < x.shape[1]:
        self.table = (x.new_ones(x.shape[1], 4, dtype=torch.float32) * 3).tril().type_as(x)
    return self.dense(x) + self.table[: x.shape[1]]


def filled(self, x):
    if self.table is None or self.table.shape[0] < x.shape[1]:
        table = torch.zeros(x.shape[1], 4, dtype=x.dtype)
        table[:, ::2] = rows(x.shape[1], x)[:, :2]
        table[:, 1::2] = 3
        self.table = table
    return self.dense(x) + self.table[: x.shape[1]]


def beside_a_write(self, x):
    padded = torch.zeros(x.shape[0], x.shape[1] + 2, 4, dtype=x.dtype)
    padded[:, 1:-1] = self.dense(x)
    if self.table is None or self.table.shape[0] != x.shape[1]:
        self.table = rows(x.shape[1], x)
    return padded[:, 2:] + self.table


def in_a_buffer(self, x):
    if self.bias is None or self.bias.shape[0] < x.shape[1]:
        self.register_buffer("bias", rows(x.shape[1], x), persistent=False)
    return self.dense(x) + self.bias[: x.shape[1]]


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("inverse", 1.0 / (3.0 + torch.arange(4.0)))
        self.length, self.cos = 0, None

    def forward(self, x, length):
        if length > self.length:
            self.length = length
            self.cos = torch.outer(torch.arange(length).type_as(self.inverse), self.inverse).cos()
        return self.cos[:length].to(x.dtype)


def shared(self, x):
    y = self.dense(x) * self.rotary(x, x.shape[1]) + self.same(x, x.shape[1] + 2)[2:]
    return y + self.other(x, x.shape[1])


def written_first(self, x):
    self.rows, self.held["columns"] = x.shape[0], x.shape[1]
    self.levels = []
    for factor in range(3):
        self.levels.append(x * factor)
    return sum(self.levels).reshape(self.rows * self.held["columns"], 4)


def cast_by_name(self, x):
    if self.table is None or self.table.shape[0] < x.shape[1]:
        self.table = rows(x.shape[1], x)
    return self.dense(x).to(dtype=x.dtype) + self.table[: x.shape[1]]


def model_of(forward):
    rotary = Rotary()
    parts = {
        "dense": nn.Linear(4, 4),
        "leaky": nn.LeakyReLU(0.5, inplace=True),
        "rotary": rotary,
        "same": rotary,
        "other": Rotary(),
    }
    model = module(forward, table=None, length=0, held={}, levels=[], **parts).double()
    model.register_buffer("bias", None, persistent=False)
    return model


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    "forward",
    [
        longer,
        counted,
        of_this_size,
        doubled,
        grown,
        like_the_input,
        filled,
        beside_a_write,
        in_a_buffer,
        shared,
        written_first,
        cast_by_name,
    ],
)
def test_a_table_of_sizes_is_made_anew(forward):
    model = model_of(forward)
    eager = copy.deepcopy(model)
    traced = fxopt.trace(model, (torch.randn(2, 5, 4, dtype=torch.float64),), dynamic_shapes=FREE)
    for number, length in enumerate(LENGTHS):
        x = torch.randn(1 + number % 3, length, 4, dtype=torch.float64)
        torch.testing.assert_close(traced(x), eager(x), rtol=1e-12, atol=1e-12)
    assert model.table is None
    assert not model.held


def scaled(self, x):
    if x.shape[1] > self.length:
        self.length = x.shape[1]
        self.table = rows(self.length, x) * self.length
    return self.dense(x) + self.table[: x.shape[1]]


def scaled_by_blocks(self, x):
    if x.shape[1] > self.length:
        self.length = (x.shape[1] + 63) // 64 * 64
        self.table = rows(self.length, x) * self.length
    return self.dense(x) + self.table[: x.shape[1]]


def of_values(self, x):
    if self.table is None or self.table.shape[1] != x.shape[1]:
        self.table = x.mean(0, keepdim=True)
    return self.dense(x) + self.table


def of_weights(self, x):
    if self.table is None:
        self.table = self.dense.weight * 2
    return x @ self.table


def of_the_first_length(self, x):
    if self.table is None:
        self.table = rows(x.shape[1], x).sum()
    return self.dense(x) + self.table


def by_rows_alone(self, x):
    if self.length != x.shape[0]:
        self.length = x.shape[0]
        self.table = torch.full((1, 1), x.shape[1] + 1, dtype=x.dtype).repeat(1, 4)
        self.held["scale"] = rows(x.shape[1], x).sum()
    return self.dense(x) + self.table * self.held["scale"]


def longest(self, x):
    self.length = max(self.length, x.shape[1])
    return self.dense(x) * self.length


def another_way_when_long(self, x):
    if self.table is None:
        self.table = rows(x.shape[1], x)
        return self.dense(x)
    return self.dense(x) if x.shape[1] <= 1000 else -x


def added_to(self, x):
    if self.table is None or self.table.shape[0] != x.shape[1]:
        self.table = torch.zeros(x.shape[1], 4, dtype=x.dtype)
    self.table += 1
    return self.dense(x) + self.table


def halved_by_a_layer(self, x):
    if self.table is None or self.table.shape[0] < x.shape[1]:
        self.table = torch.arange(x.shape[1], dtype=x.dtype) - 3
    return self.dense(x) * self.leaky(self.table[: x.shape[1]])[:, None]


def of_the_last_digit(self, x):
    if self.length != x.shape[1] % 10:
        self.length = x.shape[1] % 10
        self.table = torch.full((), 1.0, dtype=x.dtype) / x.shape[1]
    return self.dense(x) * self.table


def of_as_many_numbers(self, x):
    if self.length != x.shape[0] * x.shape[1]:
        self.length = x.shape[0] * x.shape[1]
        self.table = torch.full((), 1.0, dtype=x.dtype) / x.shape[1]
    return self.dense(x) * self.table


def drawn(self, x):
    if self.table is None:
        self.noise = torch.rand(4, dtype=x.dtype)
        self.table = self.noise * 2
    return self.dense(x) + self.table


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "forward",
    [
        scaled,
        scaled_by_blocks,
        of_values,
        of_the_first_length,
        by_rows_alone,
        longest,
        another_way_when_long,
        added_to,
        halved_by_a_layer,
        of_the_last_digit,
        of_as_many_numbers,
        drawn,
    ],
)
def test_what_another_call_would_find_otherwise_is_refused(forward):
    model = model_of(forward)
    with pytest.raises(fxopt.TraceError, match="the forward assigns to '(table|length|held|noise)'"):
        fxopt.trace(model, (torch.randn(2, 5, 4, dtype=torch.float64),), dynamic_shapes=FREE)


def test_what_is_drawn_once_is_refused_with_fixed_sizes():
    with pytest.raises(fxopt.TraceError, match="assigns to 'noise'"):
        fxopt.trace(model_of(drawn), (torch.randn(2, 5, 4, dtype=torch.float64),))


def kept_of_one_row(self, x):
    y = self.dense(x) * (self.length + 1)
    if len(x) == 1:
        self.length = 1
    return y


def flagged_by_one_row(self, x):
    factor = self.length + 1
    if len(x) == 1:
        self.length, factor = 1, 1
    return self.dense(x) * factor


@pytest.mark.parametrize("forward", [kept_of_one_row, flagged_by_one_row])
def test_what_a_call_at_size_one_leaves_does_not_reach_other_sizes(forward):
    model = model_of(forward)
    traced = fxopt.trace(model, (torch.randn(2, 5, 4).double(),), dynamic_shapes=({0: Dim.AUTO},))
    with pytest.raises(fxopt.GuardError, match="dimension 0 is 1"):
        traced(torch.randn(1, 5, 4).double())


class Slots:
    __slots__ = ("length", "table")

    def __init__(self):
        self.length, self.table = 0, None

    def first(self, x):
        if self.table is None:
            self.table = rows(x.shape[1], x).sum()
        return self.table


def in_a_closure():
    table = None

    def first(x):
        nonlocal table
        if table is None:
            table = rows(x.shape[1], x).sum()
        return table

    return first


def first_in_a_list(self, x):
    if self.kept[0].numel() == 0:
        self.kept[0] = rows(x.shape[1], x).sum()
    return self.dense(x) + self.kept[0]


def first_of_an_object(self, x):
    return self.dense(x) + self.kept.first(x)


def first_of_a_function(self, x):
    return self.dense(x) + self.kept(x)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("forward", "kept"),
    [
        (first_in_a_list, [torch.zeros(0)]),
        (first_of_an_object, Slots()),
        (first_of_a_function, Slots().first),
        (first_of_a_function, functools.partial(Slots.first, Slots())),
        (first_of_a_function, in_a_closure()),
    ],
    ids=["list", "slots", "method", "partial", "closure"],
)
def test_what_the_first_call_keeps_is_refused_wherever_it_is_kept(forward, kept):
    model = module(forward, dense=nn.Linear(4, 4), kept=kept)
    with pytest.raises(fxopt.TraceError, match="the forward assigns to 'kept'"):
        fxopt.trace(model, (torch.randn(2, 5, 4),), dynamic_shapes=FREE)


def test_a_table_in_slots_is_made_anew():
    def forward(self, x):
        if self.kept.table is None or self.kept.length < x.shape[1]:
            self.kept.table, self.kept.length = rows(x.shape[1], x), x.shape[1]
        return self.dense(x) + self.kept.table[: x.shape[1]]

    model = module(forward, dense=nn.Linear(4, 4), kept=Slots()).double()
    eager = copy.deepcopy(model)
    traced = fxopt.trace(model, (torch.randn(2, 5, 4).double(),), dynamic_shapes=({1: Dim.DYNAMIC},))
    for length in LENGTHS:
        x = torch.randn(2, length, 4, dtype=torch.float64)
        torch.testing.assert_close(traced(x), eager(x), rtol=1e-12, atol=1e-12)


LOCAL, CONTEXT, NAMESPACE = threading.local(), contextvars.ContextVar("CONTEXT"), types.SimpleNamespace()


def by_device(self, x):
    """As LeViT keeps its biases of attention."""
    if str(x.device) not in self.held:
        self.held[str(x.device)] = self.dense.weight[:, torch.arange(4).flip(0)]
    return self.dense(x) @ self.held[str(x.device)]


def written_between(self, x):
    if self.table is None:
        self.table = self.dense.weight * 2
    with torch.no_grad():
        self.dense.weight.mul_(0.5)
    return x @ self.table


@pytest.mark.parametrize("forward", [of_weights, by_device])
def test_in_inference_a_table_of_weights_is_made_anew(forward):
    model = model_of(forward).train()
    with pytest.raises(fxopt.TraceError, match="the forward assigns to '(table|held)"):
        fxopt.trace(
            model, (torch.randn(2, 5, 4, dtype=torch.float64),)
        )  # an optimizer may change the weights
    model.eval()
    eager = copy.deepcopy(model)
    traced = fxopt.trace(model, (torch.randn(2, 5, 4, dtype=torch.float64),), dynamic_shapes=FREE)
    for length in LENGTHS:
        x = torch.randn(3, length, 4, dtype=torch.float64)
        torch.testing.assert_close(traced(x), eager(x), rtol=1e-12, atol=1e-12)


def test_a_table_of_weights_is_refused_where_the_layer_that_holds_them_is_trained():
    model = model_of(of_weights).eval()
    model.dense.train()
    with pytest.raises(fxopt.TraceError, match="the forward assigns to 'table"):
        fxopt.trace(model, (torch.randn(2, 5, 4, dtype=torch.float64),))


def test_a_table_of_weights_that_the_forward_writes_is_refused():
    model = model_of(written_between).eval()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(fxopt.TraceError, match="table|weight"):
        fxopt.trace(model, (torch.randn(2, 5, 4, dtype=torch.float64),))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


class Pickled(types.SimpleNamespace):
    def __getstate__(self):
        return {}


REFERRED = Pickled()


def first_of_a_weight(self, x):
    self.dense.weight.length = getattr(self.dense.weight, "length", x.shape[1])
    return self.dense(x) * self.dense.weight.length


def first_table_of_a_buffer(self, x):
    if not hasattr(self.table, "rows"):
        self.table.rows = rows(x.shape[1], x).sum()
    return self.dense(x) + self.table.rows


def first_of_an_object_with_a_state(self, x):
    self.pickled.length = getattr(self.pickled, "length", x.shape[1])
    return self.dense(x) * self.pickled.length


def first_of_a_reference(self, x):
    referred = self.reference()
    referred.length = getattr(referred, "length", x.shape[1])
    return self.dense(x) * referred.length


def first_of_a_namespace(self, x):
    self.kept.length = getattr(self.kept, "length", x.shape[1])
    return self.dense(x) * self.kept.length


def first_of_a_layer(self, x):
    self.dense.length = getattr(self.dense, "length", x.shape[1])
    return self.dense(x) * self.dense.length


def first_of_an_error(self, x):
    if not self.held.args:
        self.held.args = (x.shape[1],)
    return self.dense(x) * self.held.args[0]


def first_of_a_thread(self, x):
    LOCAL.length = getattr(LOCAL, "length", x.shape[1])
    return self.dense(x) * LOCAL.length


def first_of_a_context(self, x):
    CONTEXT.set(CONTEXT.get(x.shape[1]))
    return self.dense(x) * CONTEXT.get()


def first_of_a_global(self, x):
    NAMESPACE.length = getattr(NAMESPACE, "length", x.shape[1])
    return self.dense(x) * NAMESPACE.length


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    "forward",
    [
        first_of_a_namespace,
        first_of_a_layer,
        first_of_an_error,
        first_of_a_thread,
        first_of_a_context,
        first_of_a_weight,
        first_table_of_a_buffer,
        first_of_an_object_with_a_state,
        first_of_a_reference,
        first_of_a_global,
    ],
)
def test_a_size_of_the_first_call_is_refused_wherever_it_is_kept(forward):
    model = module(
        forward,
        dense=nn.Linear(4, 4),
        kept=types.SimpleNamespace(),
        held=ValueError(),
        table=nn.Buffer(torch.ones(4)),
        pickled=Pickled(),
        reference=weakref.ref(REFERRED),
    )
    with pytest.raises(fxopt.TraceError, match=r"the forward (assigns to|changes)"):
        fxopt.trace(model, (torch.randn(2, 5, 4),), dynamic_shapes=FREE)
    assert not vars(LOCAL)
    assert not vars(NAMESPACE)
    assert not vars(REFERRED)
    assert CONTEXT.get(None) is None


def test_attributes_of_a_parameter_are_there_and_may_be_set():
    def forward(self, x):
        self.dense.weight.last = x
        return self.dense(x) * self.dense.weight.scale

    model = module(forward, dense=nn.Linear(4, 4))
    model.dense.weight.scale = 3.0
    traced, x = fxopt.trace(model, (torch.randn(2, 5, 4),), dynamic_shapes=FREE), torch.randn(3, 7, 4)
    torch.testing.assert_close(traced(x), model.dense(x) * 3)


class Positions:
    """A table that an object keeps beside what it is made of."""

    def __init__(self):
        self.inverse, self.cos, self.length = torch.tensor([1.0, 0.1, 0.01, 0.001]), None, 0

    def rows(self, length):
        if length > self.length:
            self.length = length
            self.cos = torch.outer(torch.arange(length).to(self.inverse), self.inverse).cos()
        return self.cos[:length]


def test_a_table_in_an_object_that_holds_other_tensors():
    model = module(lambda self, x: x + self.positions.rows(x.shape[1]), positions=Positions())
    traced = fxopt.trace(model, (torch.randn(2, 5, 4),), dynamic_shapes=FREE)
    for length in LENGTHS:
        x = torch.randn(2, length, 4)
        assert torch.equal(traced(x), model(x))


def complex_rows(self, x):
    if self.table is None or self.table.shape[0] < x.shape[1]:
        angles = torch.outer(torch.arange(2.0 * x.shape[1]), torch.tensor([1.0, 0.1]))
        self.table = torch.polar(torch.ones_like(angles), angles)
    turned = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) * self.table[: x.shape[1]]
    return torch.view_as_real(turned).flatten(2).type_as(x)


def test_of_a_result_that_another_is_like_no_number_is_compared(monkeypatch):
    """`type_as` reads a dtype alone: what stands for the tensor that it is given must not differ from call to call."""
    numbers = iter(range(100))
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: empty(*size, **options).fill_(next(numbers)))
    model = module(complex_rows, table=None)
    traced = fxopt.trace(model, (torch.randn(2, 5, 4),), verify=False)
    monkeypatch.undo()
    x = torch.randn(2, 5, 4)
    torch.testing.assert_close(traced(x), model(x))


def written_in_place(self, x):
    if self.table is None:
        self.table = torch.zeros(2)
    self.table[:1] += 1
    return torch.where(self.table[0] < 4, x, -x)


def written_in_a_list(self, x):
    if not self.kept:
        self.kept.append(torch.zeros(2))
    self.kept[0].add_(1)
    return torch.where(self.kept[0][0] < 4, x, -x)


def written_through_another_view(self, x):
    if self.table is None:
        self.table = torch.zeros(2)
        self.first = self.table[:1]
    self.table.copy_((self.table + 1).clamp(max=3))
    return torch.where(self.first < 3, x, -x)


@pytest.mark.parametrize("forward", [written_in_place, written_in_a_list, written_through_another_view])
def test_what_each_call_writes_into_what_was_kept_is_refused(forward):
    model = module(forward, table=None, first=None, kept=[])
    with pytest.raises(fxopt.TraceError, match=r"something else with it|share its memory"):
        fxopt.trace(model, (torch.randn(3, 4),))


def with_a_counter(self, x):
    self.calls += 1
    self.last = self.calls * 2.0
    return longer(self, x)


def with_a_counter_and_its_length(self, x):
    self.calls += 1
    return counted(self, x)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("forward", [with_a_counter, with_a_counter_and_its_length])
def test_a_table_may_stand_beside_a_counter(forward):
    model = module(forward, dense=nn.Linear(4, 4), table=None, length=0, calls=0, last=0.0)
    traced = fxopt.trace(model, (torch.randn(2, 5, 4),), dynamic_shapes=FREE)
    for length in LENGTHS:
        x = torch.randn(2, length, 4)
        assert torch.equal(traced(x), model(x))


def with_a_counter_that_decides(self, x):
    self.calls += 1
    return longer(self, x) * (2 if self.calls > 3 else 1)


def with_a_counter_in_the_table(self, x):
    if self.table is None or self.calls > 3:
        self.table = torch.full((4,), float(self.calls > 3))
    self.calls += 1
    return self.dense(x) * self.table


@pytest.mark.parametrize("forward", [with_a_counter_that_decides, with_a_counter_in_the_table])
def test_a_counter_beside_a_table_decides_nothing(forward):
    model = module(forward, dense=nn.Linear(4, 4), table=None, calls=0)
    with pytest.raises(fxopt.TraceError, match="reads what an earlier call has left"):
        fxopt.trace(model, (torch.randn(2, 5, 4),))
