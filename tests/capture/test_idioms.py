"""Idioms of research code: einops, caches by size, Python's types, and more, each captured right."""

import copy
import functools
import math
import random
import threading

import einops
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from einops.layers.torch import EinMix, Rearrange, Reduce
from torch import nn

import fxopt
from fxopt.objects import tensors_in
from tests import modules
from tests.capture.test_odd_models import Does
from tests.capture.test_trace import assert_same

BATCH = torch.export.Dim("batch")


@functools.lru_cache
def positions(n, m):
    return torch.arange(n)[:, None] * m


class Positions(nn.Module):
    def forward(self, x):
        return x + positions(x.shape[0], 2)


class Attend(nn.Module):
    @staticmethod
    @functools.lru_cache
    def table(n):
        return torch.ones(n, 1)

    def forward(self, x):
        return x + self.table(x.shape[0])


FREE_BATCH = {
    "rearrange": Does(lambda self, x: einops.rearrange(x, "b (h p) -> (b h) p", p=2)),
    "reduce": Does(lambda self, x: einops.reduce(x, "b (h p) -> b h", "max", p=2)),
    "repeat": Does(lambda self, x: einops.repeat(x, "b d -> b n d", n=x.shape[0])),
    "einsum": Does(lambda self, x: einops.einsum(x, x, "b i, b j -> b i j")),
    "pack": Does(lambda self, x: einops.pack([x, x[:, None]], "b * d")[0]),
    "unpack": Does(
        lambda self, x: einops.unpack(*einops.pack([x[:, None], x[:, None]], "b * d"), "b * d")[1]
    ),
    "parse_shape": Does(lambda self, x: x.new_ones(einops.parse_shape(x, "b _")["b"])),
    "asnumpy": Does(lambda self, x: einops.rearrange([x, x], "n b d -> b n d")),
    "Rearrange": nn.Sequential(Rearrange("b (h p) -> b h p", p=2), Reduce("b h p -> b h", "mean")),
    "EinMix": nn.Sequential(EinMix("b i -> b o", weight_shape="i o", bias_shape="o", i=4, o=3)),
    "unsqueeze_": Does(lambda self, x: (x.sin().unsqueeze_(1) + 1).repeat(1, x.shape[0], 1)),
    "transpose_": Does(lambda self, x: x.sin().transpose_(0, 1) @ x),
    "lru_cache": Positions(),
    "lru_cache of a static method": Attend(),
}


@pytest.mark.parametrize("case", FREE_BATCH)
def test_a_free_batch(case):
    model = FREE_BATCH[case]
    shapes = (
        ({0: BATCH},) if isinstance(model, (nn.Sequential, Attend, Positions)) else {"args": ({0: BATCH},)}
    )
    traced = fxopt.trace(model, (torch.randn(3, 4),), dynamic_shapes=shapes)
    for x in (torch.randn(3, 4), torch.randn(5, 4), torch.randn(1, 4)):
        torch.testing.assert_close(list(tensors_in(traced(x))), list(tensors_in(model(x))))


class Logged:
    """Stands for a tensor, as arrays of libraries for units or masks do, and says what is done to it."""

    def __init__(self, tensor, calls=()):
        self.tensor, self.calls = tensor, calls

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        made = function(*(each.tensor if isinstance(each, cls) else each for each in args), **(kwargs or {}))
        return cls(made, (*args[0].calls, function.__name__))


def test_a_class_with_a_torch_function_of_its_own():
    def forward(self, x):
        made = torch.add(torch.relu(Logged(x)), 1)
        return F.softmax(made, dim=-1).tensor @ self.linear.weight, len(made.calls)

    model = Does(forward)
    traced = fxopt.trace(model, (torch.randn(3, 4),), dynamic_shapes={"args": ({0: BATCH},)})
    for size in (3, 5):
        x = torch.randn(size, 4)
        assert_same(traced(x), model(x))


def test_a_size_that_is_the_key_of_a_dict_is_fixed():
    tables = {3: torch.ones(4), 5: torch.zeros(4)}
    model = Does(lambda self, x: x * tables.get(x.shape[0], torch.full((4,), 2.0)))
    traced = fxopt.trace(model, (torch.randn(3, 4),), dynamic_shapes={"args": ({0: torch.export.Dim.AUTO},)})
    x = torch.randn(3, 4)
    assert torch.equal(traced(x), model(x))
    with pytest.raises(fxopt.GuardError, match="dimension 0 is 5"):
        traced(torch.randn(5, 4))


def test_functions_under_lru_cache_are_as_before():
    cached = positions
    positions.cache_clear()
    fxopt.trace(Positions(), (torch.randn(3, 4),), dynamic_shapes=({0: BATCH},))
    assert positions is cached
    assert type(positions(3, 2)) is torch.Tensor


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


double = Double.apply


def profiled(self, x):
    with torch.profiler.record_function("double"):
        return x * 2


def without_gradients(self, x):
    y = torch.arange(4.0)
    y.requires_grad = False
    return x + y


def retained(self, x):
    y = self.linear(x)
    y.retain_grad()
    return y * 2


def halved(self, x):
    self.linear.weight.data *= 0.5
    return self.linear(x)


def padded(self, x):
    self.conv.padding = (1, 1)
    y = self.conv(x[None, None])
    self.conv.padding = (0, 0)
    return y


def hooked(self, x):
    seen = []
    handle = self.linear.register_forward_hook(lambda module, args, output: seen.append(output))
    y = self.linear(x)
    handle.remove()
    return y + seen[0]


def dtypes(self, x):
    made = torch.zeros(2, dtype=int), torch.ones_like(x, dtype=bool), torch.empty(1, dtype=complex).zero_()
    return *made, x.to(float), x.sum(dtype=float), torch.tensor([1, 2], dtype=float)


def doubled_weight(self, x):
    return torch.func.functional_call(self.linear, {"weight": self.linear.weight * 2}, (x,))


X = torch.randn(3, 4)
ARRAY = np.array([0, 2])

IDIOMS = {
    "types as dtypes": (dtypes, X),
    "an array as index": (
        lambda self, x: (x[:, ARRAY], x[np.array([True, False, True])], x[[np.int64(1), 0]]),
        X,
    ),
    "new_tensor of an array": (lambda self, x: x + x.new_tensor(np.ones(4)), X),
    "a slice by a tensor": (lambda self, x, i: x[:, i : i + 2], X, torch.tensor(1)),
    "a slice by numbers of a tensor": (
        lambda self, x, i: x[:, i.tolist()[0] : i.tolist()[1]],
        X,
        torch.tensor([1, 3]),
    ),
    "slices of two dimensions at a number, and steps": (
        lambda self, x, i: x[::2, i.item() : i.item() + 2, i.item() : i.item() + 1].clone(),
        torch.randn(4, 4, 4),
        torch.tensor(1),
    ),
    "slices of two dimensions at a number": (
        lambda self, x, i: x[..., i.item() : i.item() + 2, i.item() : i.item() + 1].clone(),
        X,
        torch.tensor(1),
    ),
    "record_function": (profiled, X),
    "requires_grad = False": (without_gradients, X),
    "retain_grad": (retained, X),
    "deepcopy of an input": (lambda self, x: copy.deepcopy([x, {"x": x}])[1]["x"].add_(1) + x, X),
    "copy of a result": (lambda self, x: copy.copy(x * 2), X),
    "a set": (lambda self, x: (x, {1, 2}, frozenset("ab")), X),
    "a hook": (hooked, X),
    "no gradient yet": (lambda self, x: x if self.linear.weight.grad is None else x * 2, X),
    "functional_call of a layer": (doubled_weight, X),
    "a layer that is changed for a call": (padded, X),
    "one_hot": (lambda self, x: torch.nn.functional.one_hot(x), torch.tensor([1, 3, 2])),
    "a function's apply": (lambda self, x: double(self.linear(x)), X),
    "a Python module": (lambda self, x: self.math.sqrt(4) * x, X),
    "a weight that is written": (halved, X),
}


@pytest.mark.parametrize("case", IDIOMS)
def test_an_idiom(case):
    forward, *args = IDIOMS[case]
    model = Does(forward, conv=nn.Conv2d(1, 1, 3), math=math)
    twin = Does(forward, conv=nn.Conv2d(1, 1, 3), math=math)
    twin.load_state_dict(copy.deepcopy(model.state_dict()))
    traced = fxopt.trace(model, args)
    for _ in range(2):
        made, expected = traced(*args), twin(*args)
        assert type(made) is type(expected)
        torch.testing.assert_close(list(tensors_in(made)), list(tensors_in(expected)))
        if isinstance(expected, tuple):
            assert [type(item) for item in made] == [type(item) for item in expected]


def test_an_array_is_a_constant_of_the_graph():
    traced = fxopt.trace(Does(lambda self, x: x[:, ARRAY]), (X,))
    ARRAY[0] = 3
    try:
        assert torch.equal(traced(X), X[:, [0, 2]])
    finally:
        ARRAY[0] = 0


def test_a_gradient_that_is_there_is_refused():
    model = Does(IDIOMS["no gradient yet"][0])
    traced = fxopt.trace(model, (X,))
    model.linear(X).sum().backward()
    with pytest.raises(fxopt.GuardError, match="assumes that a gradient is None"):
        traced(X)
    with pytest.raises(fxopt.TraceError, match="reads a gradient"):
        fxopt.trace(model, (X,))


def test_weights_that_are_set_for_a_call():
    class WeightDrop(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(4, 4)
            self.raw = nn.Parameter(self.lstm.weight_hh_l0.detach().clone())
            del self.lstm._parameters["weight_hh_l0"]

        def forward(self, x):
            self.lstm.weight_hh_l0 = self.raw * 0.5
            return self.lstm(x)[0]

    model = WeightDrop()
    model(X)
    traced = fxopt.trace(model, (X,))
    with torch.no_grad():
        model.raw.mul_(2)
    torch.testing.assert_close(traced(X), model(X))
    traced(X).sum().backward()
    assert model.raw.grad is not None


def test_one_dimension_name_is_one_size():
    model = Does(lambda self, x, t: x * (1 + t.view(x.shape[0], -1, 4)))
    args = torch.randn(3, 6, 4), torch.randn(3, 4)
    traced = fxopt.trace(model, args, dynamic_shapes={"args": ({0: BATCH}, {0: BATCH})})
    for batch in (1, 3, 5):
        given = torch.randn(batch, 6, 4), torch.randn(batch, 4)
        torch.testing.assert_close(traced(*given), model(*given))
    with pytest.raises(fxopt.GuardError):
        traced(torch.randn(5, 6, 4), torch.randn(3, 4))


def test_random_decisions_follow_the_seed():
    def dropped(self, x):
        for _ in range(4):
            x = x + 1 if torch.rand(1).item() < 0.5 else -x
        return x

    model = Does(dropped)
    for seed in range(8):
        torch.manual_seed(seed)
        traced = fxopt.trace(model, (X,), specialize=True)
        torch.manual_seed(seed)
        made = traced(X)
        torch.manual_seed(seed)
        assert torch.equal(made, model(X))


def test_what_cannot_be_copied_is_named():
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].log = (step for step in ())
    with pytest.raises(fxopt.TraceError, match=r"cannot be copied.*the attribute '0\.log'"):
        fxopt.trace(model, (X,))


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("frequencies", 1 / torch.arange(1.0, 5.0))
        self.length, self.cos, self.sin = 0, None, None

    def tables(self, x):
        if x.shape[0] > self.length:
            self.length = x.shape[0]
            angles = torch.outer(torch.arange(self.length, device=x.device, dtype=x.dtype), self.frequencies)
            self.cos, self.sin = angles.cos(), angles.sin()
        return self.cos[: x.shape[0]], self.sin[: x.shape[0]]

    def forward(self, x):
        cos, sin = self.tables(x)
        return x * cos + x * sin + self.tables(x * 2)[0]


class Grids(nn.Module):
    def __init__(self):
        super().__init__()
        self.grids = [torch.empty(0), torch.empty(0)]
        self.by_size = {}

    def forward(self, x):
        for position, grid in enumerate(self.grids):
            if grid.shape != x.shape:
                self.grids[position] = torch.arange(3.0)[:, None] + torch.arange(4.0) * position
        if x.shape[0] not in self.by_size:
            self.by_size[x.shape[0]] = torch.ones(x.shape[0], 1)
        return x * self.grids[0] + self.grids[1] * self.by_size[x.shape[0]]


class Pyramid(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = {}

    def forward(self, x):
        self.levels = [x]
        for _ in range(2):
            self.levels.append(self.levels[-1] * 2)
        self.features["sum"] = sum(self.levels)
        return self.features["sum"] + self.levels[1]


@pytest.mark.parametrize("make", [Rotary, Grids, Pyramid])
def test_what_is_kept_in_self_and_equal_at_each_call_is_made_anew(make):
    model, twin = make(), make()
    traced = fxopt.trace(model, (X,))
    for _ in range(3):
        x = torch.randn(3, 4)
        torch.testing.assert_close(traced(x), twin(x))


class Keeps(nn.Module):
    """Makes `self.kept` in its first call, by a function, and adds it in each."""

    def __init__(self, make, later=None):
        super().__init__()
        self.register_buffer("steps", torch.zeros(4))
        self.weight = nn.Parameter(torch.ones(4))
        self.kept, self.make, self.later = None, make, later

    def forward(self, x):
        first = self.kept is None
        if first:
            self.kept = self.make(self, x)
        y = x + self.kept
        if self.later is not None:
            y = self.later(self, y, first)
        return y


def counts(self, y, first):
    self.steps.add_(1)
    return y


def replaces(self, y, first):
    self.kept = torch.zeros(4)
    return y


def decays(self, y, first):
    self.kept = self.kept * 0.5
    return y


def written(self, y, first):
    self.kept.add_(1)
    return y


@pytest.mark.parametrize(
    "model",
    [
        Keeps(lambda self, x: x * 2),
        Keeps(lambda self, x: self.weight * 2),
        Keeps(lambda self, x: torch.rand(4)),
        Keeps(lambda self, x: torch.full((4,), 0.5).bernoulli()),
        Keeps(lambda self, x: self.steps * 2, counts),
        Keeps(lambda self, x: torch.ones(4), replaces),
        Keeps(lambda self, x: torch.ones(4), decays),
        Keeps(lambda self, x: torch.ones(4), written),
        Keeps(lambda self, x: torch.ones(4), lambda self, y, first: y * 2 if first else y),
    ],
)
def test_what_is_kept_in_self_and_differs_is_refused(model):
    with pytest.raises(fxopt.TraceError, match="assigns to 'kept'"):
        fxopt.trace(model, (X,))


def test_a_table_made_of_a_buffer_is_made_anew():
    model = Keeps(lambda self, x: self.steps * 2 + 1)
    assert torch.equal(fxopt.trace(model, (X,))(X), X + 1)


def test_random_numbers_drawn_by_a_copy_of_the_model_are_not_the_forwards():
    class Named(nn.Module):
        def __setstate__(self, state):
            super().__setstate__(state)
            self.__dict__["name"] = random.random()

        def forward(self, x):
            return x * 2 if x.sum() > 0 else x

    x = torch.ones(2)
    assert torch.equal(fxopt.trace(Named(), (x,), specialize=True)(x), x * 2)


def _seen_before(self, x):
    y = self.layer(x)
    flat = y.view(-1)
    return F.relu(y, inplace=True), flat


def _seen_after(self, x):
    y = F.relu(self.layer(x), inplace=True)
    flat = y.view(-1)
    F.relu6(y, inplace=True)
    return y, flat


def _in_a_list(self, x):
    made = [self.layer(x)]
    F.relu(made[0], inplace=True)
    return made


def _in_an_object(self, x, kept):
    kept.value = self.layer(x)
    F.relu(kept.value, inplace=True)
    return kept.value


def _dropped(self, x):
    y = self.layer(x)
    F.dropout(y, 0.5, False, True)
    y += 1
    return y


def _perhaps_the_input(self, x):
    y = x.float()
    F.relu(y, inplace=True)
    return y + x


def _perhaps_a_view(self, x):
    y = x.t().contiguous()
    y += 1
    F.relu(y, inplace=True)
    return y + x.t()


def _written_input(self, x):
    x += 1
    F.relu(x, inplace=True)
    return x * 2


def _added_in_place(self, x):
    y = self.layer(x)
    y += x
    return F.relu(y, inplace=True)


class Kept:
    def __init__(self):
        self.value = torch.zeros(1)


@pytest.mark.parametrize(
    ("forward", "inputs", "copies"),
    [
        (lambda self, x: F.relu(self.layer(x), inplace=True), (), 0),
        (lambda self, x: F.relu(x, inplace=True), (), 1),
        (_seen_before, (), 1),
        (_seen_after, (), 1),
        (_in_a_list, (), 0),
        (_in_an_object, (Kept(),), 0),
        (_dropped, (), 0),
        (_perhaps_the_input, (), 1),
        (_perhaps_a_view, (), 1),
        (_written_input, (), 1),
        (_added_in_place, (), 0),
    ],
)
def test_an_activation_in_place_is_one_node_where_nobody_else_sees_the_memory(forward, inputs, copies):
    model, x = Does(forward, layer=nn.Linear(4, 4)), torch.randn(3, 4)
    with torch.no_grad():
        traced = fxopt.trace(model, (x.clone(), *copy.deepcopy(inputs)), verify=False)
        results = []
        for module in (model, traced):
            given = (x.clone(), *copy.deepcopy(inputs))
            results.append((module(*given), given[0], [vars(kept) for kept in given[1:]]))
    torch.testing.assert_close(*results, rtol=0, atol=0)
    assert [node.name for node in traced.graph.nodes].count("copy_") == copies


@pytest.mark.parametrize(
    ("forward", "example", "other"),
    [
        (_perhaps_the_input, torch.randn(4, 4, dtype=torch.float64), torch.randn(4, 4)),
        (_perhaps_a_view, torch.randn(3, 4), torch.randn(4, 3).t()),
    ],
)
def test_an_activation_in_place_writes_into_the_input_where_a_call_has_not_copied_it(forward, example, other):
    model = Does(forward)
    traced = fxopt.trace(model, (example,))
    results = []
    for module in (model, traced):
        given = other.clone(memory_format=torch.preserve_format)
        results.append((module(given), given))
    torch.testing.assert_close(*results, rtol=0, atol=0)


def to_a_power(self, x):
    y = x.abs()
    y **= 2
    return y


def under_a_lock(self, x):
    with self.lock:
        return x * 2


def with_cached_weights(self, x):
    with torch.nn.utils.parametrize.cached():
        return self.symmetric(self.symmetric(x)) + self.symmetric.weight.sum()


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).mT


@pytest.mark.parametrize("forward", [to_a_power, under_a_lock, with_cached_weights])
def test_further_idioms(forward):
    model = Does(forward)
    model.lock, model.symmetric = threading.Lock(), nn.Linear(4, 4)
    torch.nn.utils.parametrize.register_parametrization(model.symmetric, "weight", Symmetric())
    x = torch.randn(3, 4)
    traced = fxopt.trace(model, (x,))
    assert torch.equal(traced(x), model(x))
    assert torch.equal(copy.deepcopy(traced)(x), model(x))


def spread(self, x):
    rows = torch.linspace(-1 + 1 / x.shape[0], 1, steps=x.shape[0], dtype=x.dtype, device=x.device)
    return x * rows[:, None] + torch.linspace(0, x.shape[0] - 1, 4)


def classes(self, x):
    return F.one_hot(torch.arange(x.shape[0]), math.ceil(x.shape[0] * 1.25)).to(x.dtype).T @ x


def moved_by_a_grid(self, x):
    turned = torch.eye(2, 3).expand(x.shape[0], 2, 3) + x[:, :2, None]
    image = x[:, None, None].expand(-1, 2, 4, -1)
    return F.grid_sample(image, F.affine_grid(turned, image.size(), align_corners=False), align_corners=False)


def scaled_by_its_size(self, x):
    rows = torch.tensor([x.shape[0], 1.5, 2, 3]) / torch.tensor(x.shape[0])
    table = torch.as_tensor([[x.shape[0], 1], [2, len(x)]], dtype=x.dtype, device=x.device)
    table[0] += 1
    return x * rows / math.sqrt(x.shape[0]), table, torch.tensor(x.shape), torch.tensor(x.shape[0] / 2)


def of_comparisons(self, x):
    long = x.shape[0] > 2
    return torch.where(torch.tensor(long), x, -x), ~torch.tensor([long, True]), torch.tensor([long, len(x)])


def windows(self, x):
    n, options = x.shape[0], {"dtype": x.dtype, "device": x.device}
    made = [
        getattr(torch, f"{kind}_window")(n, **options) for kind in ("hann", "blackman", "bartlett", "kaiser")
    ]
    return (
        made,
        torch.hamming_window(window_length=n, periodic=False, alpha=0.5),
        torch.signal.windows.cosine(n),
    )


def frequencies(self, x):
    n = x.shape[0]
    return torch.fft.fftfreq(n, 0.5), torch.fft.rfftfreq(n, dtype=x.dtype), torch.logspace(0, 1, n, base=2)


def test_a_line_between_complex_numbers_is_complex():
    def forward(self, x):
        line = torch.linspace(0, 1j, x.shape[0])
        return line if line.is_complex() else line + 1

    model, x = Does(forward), torch.randn(3, 4)
    assert_same(fxopt.trace(model, (x,), dynamic_shapes={"args": ({0: torch.export.Dim.AUTO},)})(x), model(x))


def triangles(self, x):
    (n, m), given = x.shape, [(-3, 0), (-1, 1), (0, 0), (1, 2), (5, -9)]
    lower = [(torch.tril_indices(n, n, i), torch.tril_indices(n, m, offset=j)) for i, j in given]
    return lower, [(torch.triu_indices(n, n, i), torch.triu_indices(m, n, offset=j)) for i, j in given]


def sound(self, x):
    window = torch.hann_window(8)
    wave = x.new_ones(3, 4 * x.shape[0] + 8) + x[:1, :1]
    parts = torch.stft(wave, 8, window=window, return_complex=True)
    return torch.istft(parts, 8, window=window, length=wave.shape[-1]).contiguous()


@pytest.mark.parametrize("forward", [windows, frequencies, triangles, sound])
def test_tensors_that_torch_makes_of_numbers_are_of_any_size(forward):
    model = Does(forward)
    traced = fxopt.trace(
        model, (torch.randn(3, 4),), dynamic_shapes={"args": ({0: torch.export.Dim.DYNAMIC},)}
    )
    for rows in (3, 1, 2, 7):
        x = torch.randn(rows, 4)
        assert_same(traced(x), model(x))


@pytest.mark.parametrize("forward", [spread, classes, moved_by_a_grid, scaled_by_its_size, of_comparisons])
def test_functions_that_torch_gives_no_free_size(forward):
    model = Does(forward)
    traced = fxopt.trace(model, (torch.randn(3, 4),), dynamic_shapes={"args": ({0: torch.export.Dim.AUTO},)})
    for rows in (3, 1, 2, 7):
        x = torch.randn(rows, 4)
        for made, expected in zip(tensors_in(traced(x)), tensors_in(model(x)), strict=True):
            assert made.dtype == expected.dtype
            assert torch.equal(made, expected)


def test_a_class_beyond_a_free_number_of_classes_is_an_error():
    model = Does(lambda self, ids, x: F.one_hot(ids, x.shape[0]))
    shapes = {"args": (None, {0: torch.export.Dim.AUTO})}
    traced = fxopt.trace(model, (torch.tensor([1, 0]), torch.randn(3, 4)), dynamic_shapes=shapes)
    for ids in ([1, 2], [-1, 0]):
        with pytest.raises(RuntimeError):
            traced(torch.tensor(ids), torch.randn(2, 4))


@torch.library.custom_op("fxopt_tests::add_one", mutates_args=("x",))
def add_one(x: torch.Tensor) -> None:
    x.add_(1)


@pytest.mark.parametrize(
    "call", [add_one, torch.ops.fxopt_tests.add_one, torch.ops.fxopt_tests.add_one.default]
)
def test_an_operator_that_only_writes_is_a_node_that_stays(call):
    def forward(self, x):
        y = x * 2
        call(y)
        return y + 1

    model = Does(forward)
    traced = fxopt.trace(model, (X,))
    traced.graph.eliminate_dead_code()
    traced.recompile()
    assert torch.equal(traced(X), model(X))


@pytest.mark.parametrize("training", [False, True])
def test_torch_tensor_of_a_tensor_is_an_alias(training):
    def forward(self, x):
        y = torch.Tensor(x * 2)
        y += torch.Tensor(torch.ones(3, 4))
        return y, torch.Tensor(x)

    model = modules.module(forward).train(training)
    traced, x = fxopt.trace(model, (torch.ones(3, 4),)), torch.randn(3, 4, requires_grad=True)
    for actual, expected in zip(traced(x), model(x), strict=True):
        assert torch.equal(actual, expected)
        assert torch.equal(*(torch.autograd.grad(each.sum(), x)[0] for each in (actual, expected)))
    assert traced(x)[1].data_ptr() == x.data_ptr()


@pytest.mark.parametrize("activation", [F.elu, F.silu, F.relu])
def test_an_activation_in_place_of_an_input_keeps_its_backward(activation):
    """Also where the example requires no gradients."""

    def forward(self, x):
        activation(x, inplace=True)
        return x * 2

    model, x = modules.module(forward), torch.randn(2, 3)
    gm = fxopt.trace(model, (x.clone(),))
    expected, found = (x.clone().requires_grad_() for _ in range(2))
    for leaf, each in ((expected, model), (found, gm)):
        each(leaf * 1).sum().backward()
    torch.testing.assert_close(expected.grad, found.grad)
