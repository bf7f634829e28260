"""The net: the graph and the model run on the example inputs, and a difference is an error that says where."""

import contextvars
import functools
import io
import itertools
import warnings
import weakref
from typing import ClassVar

import numpy
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, BertModel

import fxopt
from fxopt.capture.runs.eager_outcome import Outcome, contents_of, difference
from fxopt.capture.runs.own_copies import copy_inputs

X = torch.ones(3, 4)
VARIABLE = contextvars.ContextVar("VARIABLE", default=0)


class Made(nn.Module):
    """A model with this forward, and this state."""

    def __init__(self, forward, state=None, **parts):
        super().__init__()
        self.state, self.body = state, [forward]
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args):
        return self.body[0](self, *args)


class Plain:
    def __init__(self, count=0):
        self.count = count

    def step(self):
        self.count = self.count + 1
        return self.count


class Slotted:
    __slots__ = ("count",)

    def __init__(self):
        self.count = 0

    step = Plain.step


def counter():
    count = 0

    def step():
        nonlocal count
        count += 1
        return count

    return step


def in_a_list(self, x):
    self.state[0] = self.state[0] + x
    return self.state[0]


def in_a_dict(self, x):
    self.state["k"] = torch.cat([self.state["k"], x])
    return self.state["k"].sum()


def of_an_object(self, x):
    return x * self.state.step()


def of_a_callable(self, x):
    return x * self.state()


def of_an_iterator(self, x):
    return x * next(self.state)


def of_pairs(self, x):
    one, two = next(self.state)
    return x * one * two


def of_an_array(self, x):
    y = x * float(self.state[0])
    self.state += 1
    return y


def of_bytes(self, x):
    self.state.append(1)
    return x * len(self.state)


def on_a_parameter(self, x):
    self.state.calls = getattr(self.state, "calls", 0) + 1
    return x * self.state.calls


def in_a_context_variable(self, x):
    VARIABLE.set(VARIABLE.get() + 1)
    return x * VARIABLE.get()


STATES = {
    "tensor in a list": (in_a_list, lambda: [torch.zeros(1)]),
    "tensor in a dict": (in_a_dict, lambda: {"k": torch.zeros(1, 4)}),
    "tensor of an object": (of_an_object, lambda: Plain(torch.zeros(1))),
    "slots": (of_an_object, Slotted),
    "bound method": (of_a_callable, lambda: Plain().step),
    "partial": (of_a_callable, lambda: functools.partial(Plain.step, Plain())),
    "closure": (of_a_callable, counter),
    "cycle": (of_an_iterator, lambda: itertools.cycle([1, 2, 3])),
    "iterator": (of_an_iterator, lambda: iter([1, 2, 3, 4, 5, 6])),
    "zip": (of_pairs, lambda: zip([1, 2, 3], itertools.cycle([2, 5]), strict=False)),
    "bytes": (of_bytes, bytearray),
    "array": (of_an_array, lambda: numpy.ones(1)),
    "attribute of a parameter": (on_a_parameter, lambda: nn.Parameter(torch.ones(1))),
    "context variable": (in_a_context_variable, lambda: None),
}


@pytest.mark.parametrize("name", STATES)
def test_state_that_a_later_call_reads(name):
    forward, state = STATES[name]
    model = Made(forward, state()).eval()
    with pytest.raises(fxopt.TraceError, match="assigns to 'state|changes the context variable 'VARIABLE'"):
        fxopt.trace(model, (X,), verify=False)
    assert VARIABLE.get() == 0
    untouched = Made(forward, state()).eval()
    expected = [untouched(X).sum().item() for _ in range(2)]
    VARIABLE.set(0)
    assert [model(X).sum().item() for _ in range(2)] == expected
    VARIABLE.set(0)


def test_the_node_where_they_part_is_named():
    def forward(self, x):
        y = self.layer(x)
        return y + (x * 2 if x.__class__ is torch.Tensor else x * 3)

    with pytest.raises(
        fxopt.TraceError, match=r"%mul : .*args = \(%getitem, 3\).*x\.__class__ is torch\.Tensor"
    ):
        fxopt.trace(Made(forward, layer=nn.Linear(4, 4)).eval(), (X,))


def test_a_call_that_no_node_makes_is_named():
    def forward(self, x):
        if not torch.compiler.is_exporting():
            x = x * 2
        return x

    with pytest.raises(
        fxopt.TraceError, match=r"(?s)does not make.*`x = x \* 2`.*asks whether it is being compiled"
    ):
        fxopt.trace(Made(forward), (X,))


@pytest.mark.filterwarnings("ignore:activation checkpointing is not captured")
def test_activation_checkpointing_around_a_layer_with_statistics():
    def forward(self, x):
        return checkpoint(self.norm, x, use_reentrant=False)

    model = Made(forward, norm=nn.BatchNorm1d(4)).train()
    with pytest.raises(fxopt.TraceError, match="buffer norm.running.*activation checkpointing"):
        fxopt.trace(model, (torch.randn(3, 4),))
    assert model.norm.num_batches_tracked == 0


@pytest.mark.parametrize("number", ["nbytes", "address"])
def test_numbers_that_torch_and_python_make_up(number):
    def forward(self, x):
        y = x * 2
        if number == "nbytes":
            return y * x.untyped_storage().nbytes()
        return y * (1 + x.is_set_to(x.detach()))

    model = Made(forward)
    try:
        traced = fxopt.trace(model, (X,))
    except fxopt.TraceError:
        return
    assert torch.equal(traced(X), model(X))


def test_a_model_that_does_not_repeat_itself_is_not_judged():
    numbers = itertools.count()

    class Draws(nn.ReLU):
        def forward(self, x):
            return x * next(numbers)

    with pytest.warns(UserWarning, match="not compared.*two runs of the model .* differ"):
        fxopt.trace(Made(lambda self, x: self.layer(x), layer=Draws()), (X,), leaf_modules=Draws)


def test_a_model_that_raises_on_the_example_is_not_judged():
    model = Made(lambda self, x: self.table(x), table=nn.Embedding(3, 4))
    with pytest.warns(UserWarning, match="raises IndexError"):
        fxopt.trace(model, (torch.tensor([7]),))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fxopt.trace(model, (torch.tensor([7]),), verify=False)
        with FakeTensorMode(allow_non_fake_inputs=True):
            fxopt.trace(model, (torch.tensor([7]),))


def test_nothing_of_the_user_is_changed():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()).train()
    seen = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(type(output)))
    model[2].calls = 0
    x = torch.randn(3, 4, requires_grad=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}, x.detach().clone()
    states = torch.get_rng_state()
    fxopt.trace(model, (x,))
    assert torch.equal(states, torch.get_rng_state())
    assert all(torch.equal(value, before[0][name]) for name, value in model.state_dict().items())
    assert torch.equal(x, before[1])
    assert x.grad is None
    assert all(parameter.grad is None for parameter in model.parameters())
    assert seen == []


def test_weights_that_a_forward_writes_are_those_of_a_copy():
    class Renormalised(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.weight = nn.Embedding(4, 4, max_norm=0.1), nn.Parameter(torch.ones(4))

        def forward(self, x):
            with torch.no_grad():
                self.weight.mul_(0.5)
            return self.table(x) * self.weight

    model = Renormalised()
    before = model.table.weight.clone()
    traced = fxopt.trace(model, (torch.tensor([1, 2]),))
    assert torch.equal(model.table.weight, before)
    assert model.weight.tolist() == [1.0] * 4
    traced(torch.tensor([1, 2]))
    assert model.weight.tolist() == [0.5] * 4


def test_a_gradient_that_only_the_graph_has_must_be_zero():
    for condensed in (False, True):
        none, zero, one = (
            Outcome({"gradient of": list(contents_of({"w": gradient}, condensed))})
            for gradient in (None, torch.zeros(5000), torch.ones(5000))
        )
        assert difference(none, zero) is None
        assert difference(none, one) == "gradient of w is a Tensor, not a NoneType"


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (torch.zeros(5000), torch.zeros(5000).index_fill(0, torch.tensor(4999), 1e-3)),
        (torch.arange(5000.0), torch.arange(5000.0).index_fill(0, torch.tensor([0, 1]), 99.0)),
        (torch.zeros(5000).index_fill(0, torch.tensor(7), torch.nan), torch.zeros(5000)),
        (torch.zeros(5000).index_fill(0, torch.tensor(7), torch.inf), torch.full((5000,), torch.nan)),
        (torch.full((5000,), 2**60), torch.full((5000,), 2**60).index_fill(0, torch.tensor(70), 2**60 + 1)),
        (torch.zeros(5000, dtype=torch.bool), torch.zeros(5000).index_fill(0, torch.tensor(0), 1).bool()),
    ],
)
def test_one_number_among_many_differs(left, right):
    for condensed in (False, True):
        one, other, again = (
            Outcome({"output": list(contents_of(v, condensed))}) for v in (left, right, left.clone())
        )
        assert difference(one, other) == "output has other values"
        assert difference(one, again) is None


class Watched(nn.Tanh):
    """A layer that notes how many calls of its kind have a history in memory, and whether they keep what backward needs."""

    histories: ClassVar[list] = []
    alive: ClassVar[list] = []
    kept: ClassVar[list] = []

    def forward(self, x):
        y = super().forward(x)
        if type(y) is torch.Tensor:
            y.grad_fn.metadata[self] = mark = Plain()
            self.histories.append(weakref.ref(mark))
            self.alive.append(sum(history() is not None for history in self.histories))
            try:
                self.kept.append(y.grad_fn._saved_result is not None)
            except TypeError:
                self.kept.append(False)
        return y


@pytest.mark.parametrize("training", [False, True])
def test_the_activations_of_one_run_are_in_memory_at_a_time(training):
    for noted in (Watched.histories, Watched.alive, Watched.kept):
        noted.clear()
    model = nn.Sequential(nn.Linear(4, 4), *(Watched() for _ in range(8))).train(training)
    fxopt.trace(model, (X,), leaf_modules=Watched)
    assert len(Watched.alive) == 4 * 8
    assert max(Watched.alive) == 8
    assert set(Watched.kept) == {training}  # in eval mode no backward follows


class Slope(nn.Module):
    """Computes a gradient in its forward."""

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(x.tanh().sum(), x)[0]


def test_a_forward_that_reads_its_activations_is_compared_in_eval_mode():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fxopt.trace(Made(lambda self, x: self.layer(x), layer=Slope()).eval(), (X,), leaf_modules=Slope)
    asks = Made(lambda self, x: self.layer(x) * (1 + torch.compiler.is_compiling()), layer=Slope()).eval()
    with pytest.raises(fxopt.TraceError, match="asks whether it is being compiled"):
        fxopt.trace(asks, (X,), leaf_modules=Slope)


def test_inputs_of_two_dtypes_share_memory_in_the_copies_as_well():
    numbers = torch.arange(6, dtype=torch.int32)
    inputs = {"bits": numbers[2:].view(torch.float32), "numbers": numbers, "rows": numbers[1].expand(3)}
    copied = copy_inputs(inputs).values
    copied["bits"].zero_()
    assert copied["numbers"].tolist() == [0, 1, 0, 0, 0, 0]
    assert numbers.tolist() == list(range(6))
    assert (copied["rows"].tolist(), copied["rows"].stride()) == ([1, 1, 1], (0,))


def test_inputs_keep_their_layout_and_share_memory_in_the_copies():
    base = torch.arange(24.0)
    left, right = base.view(4, 6)[:, ::2].t(), base[6:18].view(3, 4)

    def forward(self, x, y):
        y.add_(1)
        return x.stride(), x * 1, y * x.storage_offset()

    traced = fxopt.trace(Made(forward), (left, right))
    assert base.tolist() == list(range(24))
    copied = base.clone()
    found = traced(copied.view(4, 6)[:, ::2].t(), copied[6:18].view(3, 4))
    expected = Made(forward)(left, right)
    assert found[0] == expected[0]
    assert torch.equal(found[1], expected[1])


def test_gradients_must_agree():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    def forward(self, x):
        y = self.layer(x)
        return y if y.__class__ is torch.Tensor else y.detach()

    assert fxopt.trace(Made(lambda self, x: Doubled.apply(self.layer(x)), layer=nn.Linear(4, 4)), (X,))
    with pytest.raises(fxopt.TraceError, match="takes no gradients"):
        fxopt.trace(Made(forward, layer=nn.Linear(4, 4)), (X,))


@functools.lru_cache
def table(length):
    return torch.arange(float(length))


@functools.cache
def tables(length):
    return torch.arange(float(length)), [torch.ones(length)]


class Positions:
    def get(self, length):
        return table(length)

    @staticmethod
    def static(length):
        return tables(length)[0]


POSITIONS, BY_NAME, FILLED = Positions(), {"linear": table}, {}


def fill(key, value):
    FILLED[key] = value


def filled(self, x):
    if 4 not in FILLED:
        fill(4, torch.arange(4.0))
    return x + FILLED[4]


@pytest.mark.parametrize(
    "get",
    [
        lambda self, x: x + table(4),
        lambda self, x: x + POSITIONS.get(4),
        lambda self, x: x + self.state.get(4),
        lambda self, x: x + Positions.static(4),
        lambda self, x: x + tables(4)[1][0],
        lambda self, x: x + BY_NAME["linear"](4),
        lambda self, x: x + self.attribute(4),
        filled,
    ],
)
@pytest.mark.parametrize("verify", [True, False])
def test_a_capture_leaves_no_fakes_in_the_process(get, verify):
    table.cache_clear()
    tables.cache_clear()
    FILLED.clear()
    model = Made(get, POSITIONS, attribute=lambda length: table(length))
    if get is filled:
        with pytest.raises(fxopt.TraceError, match="'FILLED'"):
            fxopt.trace(model, (X,), verify=verify)
        assert FILLED == {}
    else:
        assert torch.equal(fxopt.trace(model, (X,), verify=verify)(X), model(X))
    assert type(model(X)) is torch.Tensor
    assert not any(isinstance(value, FakeTensor) for value in FILLED.values())


class Lazy(dict):
    """A mapping that would import what it gives, and objects that answer to any name: nobody may ask them."""

    def values(self):
        raise ImportError("nothing to be asked")

    items = __iter__ = values

    def __getattr__(self, name):
        raise ImportError(name)


LAZY = Lazy(a=1)


def test_objects_are_looked_through_without_running_their_code():
    assert torch.equal(fxopt.trace(Made(lambda self, x: x * len(LAZY)), (X,))(X), X)


def test_a_cache_of_a_bound_method_is_one_of_the_copy():
    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.table = functools.lru_cache(self.make)

        def make(self, length):
            return torch.arange(float(length)) * self.weight

        def forward(self, x):
            return x + self.table(4)

    model = Cached()
    assert torch.equal(fxopt.trace(model, (X,))(X), model(X))
    assert model.table.cache_info().currsize == 1


def test_closures_over_self_are_in_the_graph():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))
            self.head = lambda x: x @ self.weight.t()
            self.again = functools.partial(lambda scale, x: self.head(x) * scale, 2.0)

        def forward(self, x):
            return self.head(x), self.again(x)

    model = Tied()
    traced = fxopt.trace(model, (X,))
    assert dict(traced.named_parameters()).keys() == {"weight"}
    assert dict(traced.named_buffers()) == {}
    assert all(map(torch.equal, traced(X), model(X)))


def test_features_that_hooks_store_are_read_and_not_left_in_the_model():
    class Extractor(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.features = nn.Linear(4, 4), {}
            self.layer.register_forward_hook(lambda module, args, out: self.features.update(low=out.detach()))
            self.layer.register_forward_hook(functools.partial(self.keep, name="high"))

        def keep(self, module, args, out, name):
            self.features[name] = out

        def forward(self, x):
            self.features.clear()
            y = self.layer(x)
            return y + self.features["low"], dict(self.features)

    model = Extractor()
    traced = fxopt.trace(model, (X,), dynamic_shapes=({0: torch.export.Dim("rows")},))
    assert model.features == {}
    x = torch.randn(5, 4)
    (y, features), (expected, stored) = traced(x), model(x)
    torch.testing.assert_close((y, features), (expected, stored))


def by_name(self, x):
    return x * 2 if type(x).__name__ == "Tensor" else x


def by_dispatch(self, x):
    return {torch.Tensor: torch.neg, nn.Parameter: torch.abs, int: float}[type(x)](x)


def of_a_parameter(self, x):
    return x * 2 if type(self.layer.weight) is nn.Parameter and type(type(x)) is type else x


def of_a_size(self, x):
    return x * 2 if type(len(x)) is int and isinstance(type(x), type) else x


@pytest.mark.parametrize("forward", [by_name, by_dispatch, of_a_parameter, of_a_size])
@pytest.mark.parametrize("free", [None, ({0: torch.export.Dim("rows")},)])
def test_types_of_tensors_are_ordinary(forward, free):
    model = Made(forward, layer=nn.Linear(4, 4))
    traced = fxopt.trace(model, (X,), dynamic_shapes={"args": free} if free else None, verify=False)
    assert torch.equal(traced(X), model(X))
    assert "type" not in globals()


def padded(self, x):
    self.layer.padding = (1,)
    y = self.layer(x)
    self.layer.padding = (0,)
    return y


def dropped(self, x):
    self.layer.weight_hh_l0 = nn.functional.dropout(self.raw, 0.5, self.training)
    return self.layer(x)[0]


def test_settings_and_weights_that_are_set_for_one_call_are_those_of_the_call():
    lstm = nn.LSTM(4, 4)
    raw = nn.Parameter(lstm.weight_hh_l0.data.clone())
    del lstm._parameters["weight_hh_l0"]
    lstm.weight_hh_l0 = raw.data
    for model in (Made(padded, layer=nn.Conv1d(3, 3, 3)), Made(dropped, layer=lstm, raw=raw)):
        traced = fxopt.trace(model.eval(), (X,), verify=False)
        assert torch.equal(traced(X), model(X))
        if model.layer is lstm:
            raw.data.add_(1)  # it is read in each call
            torch.testing.assert_close(traced(X), model(X))


@pytest.mark.parametrize(
    "name",
    [
        "leaky_relu",
        "silu",
        "mish",
        "hardswish",
        "hardsigmoid",
        "elu",
        "celu",
        "selu",
        "relu6",
        "hardtanh",
        "relu",
    ],
)
def test_activations_in_place_can_be_trained(name):
    def forward(self, x):
        made = self.layer(x)
        seen = made.view(-1)  # so that the memory is written
        return getattr(nn.functional, name)(made, inplace=True) + seen.view(x.shape)

    model, x = Made(forward, layer=nn.Linear(4, 4)).train(), torch.randn(3, 4)
    traced = fxopt.trace(model, (x,))
    gradients = []
    for module in (model, traced):
        module(x).pow(2).sum().backward()
        gradients.append(model.layer.weight.grad)
        model.layer.weight.grad = None
    torch.testing.assert_close(*gradients)


def test_the_default_dtype_cannot_be_set_for_a_while():
    def forward(self, x):
        torch.set_default_dtype(torch.float64)
        y = torch.zeros(2)
        torch.set_default_dtype(torch.float32)
        return x.sum() + y

    with pytest.raises(fxopt.TraceError, match="default dtype"):
        fxopt.trace(Made(forward), (X,), verify=False)


def is_one(self, q, k):
    return q * 2 if q is k else q * 3


def is_one_of_several(self, *tensors):
    return tensors[0] * 2 if tensors[0] is not tensors[1] else tensors[0] * 3


def has_one_address(self, q, k):
    return q * 2 if q.data_ptr() == k.data_ptr() else q * 3


@pytest.mark.parametrize("forward", [is_one, is_one_of_several, has_one_address])
@pytest.mark.parametrize("free", [None, {0: torch.export.Dim("rows")}])
def test_which_inputs_are_one_tensor_is_decided_at_capture(forward, free):
    class Model(nn.Module):
        pass

    Model.forward, y = forward, torch.ones(3, 4)
    inputs = (free, free) if forward is not is_one_of_several else ((free, free),)
    for captured, other in (((X, X), (X, y)), ((X, y), (X, X))):
        traced = fxopt.trace(Model(), captured, dynamic_shapes=inputs if free else None)
        assert torch.equal(traced(*captured), Model()(*captured))
        assert any("same tensor as" in str(g) or "given before" in str(g) for g in fxopt.guards(traced))
        with pytest.raises(fxopt.GuardError, match="compares tensors by identity"):
            traced(*other)


def test_which_inputs_are_one_tensor_is_free_where_nobody_asks():
    traced = fxopt.trace(Made(lambda self, q, k: q + k if k is not None else q), (X, X))
    assert torch.equal(traced(X, X * 2), X * 3)


class Storage:
    """Something that puts a tensor where names alone do not lead."""

    kept: ClassVar[dict] = {}

    def put(self, value):
        type(self).kept["it"] = value


STORAGES = {"one": Storage()}


def test_a_fake_that_is_left_behind_an_object_in_a_dict_is_refused():
    def forward(self, x):
        STORAGES["one"].put(torch.arange(4.0))
        return x * 2

    with pytest.raises(fxopt.TraceError, match="outside of the model"):
        fxopt.trace(Made(forward), (X,), verify=False)
    assert Storage.kept == {}


def test_state_that_the_net_alone_sees():
    def forward(self, x):
        place = self.state.tell()
        self.state.write(b".")
        return x * (place + 1)

    with pytest.raises(fxopt.TraceError, match="differs from the model in call 2.*keeps state"):
        fxopt.trace(Made(forward, io.BytesIO()), (X,))


@pytest.mark.parametrize("fill", [-1e30, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("size", [4, 4096])
def test_the_filling_of_masked_places_hides_no_difference(fill, size):
    def forward(self, x, mask):
        place = self.state.tell()
        self.state.write(b".")
        return (x * (place + 1)).masked_fill(mask, fill)

    x = torch.ones(3, size)
    mask = torch.zeros(3, size, dtype=torch.bool)
    mask[:, -1] = True
    with pytest.raises(fxopt.TraceError, match="differs from the model in call 2"):
        fxopt.trace(Made(forward, io.BytesIO()), (x, mask))


def test_symbolic_trace_compares_unless_told_not_to():
    class Asks(BertModel):
        def forward(self, input_ids):
            factor = 1 if torch.compiler.is_compiling() else 2
            return super().forward(input_ids).last_hidden_state * factor

    config = BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=9
    )
    model = Asks(config).eval()
    assert fxopt.symbolic_trace(model, disable_check=True)
    with pytest.raises(fxopt.TraceError, match="the graph differs from the model"):
        fxopt.symbolic_trace(model)
