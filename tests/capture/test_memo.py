"""A capture that remembers what calls give is the same as one that makes every call."""

import copy

import pytest
import sympy
import torch
from torch import nn
from torch._dynamo.source import ConstantSource
from torch.export import Dim
from torch.fx.experimental.symbolic_shapes import DimDynamic, guard_or_false, guard_or_true
from torch.nn.attention import SDPBackend, sdpa_kernel

import fxopt
from fxopt.capture.fakes.call_cache import CallCache
from fxopt.capture.fakes.fake_mode import CaptureFakeMode
from fxopt.capture.fakes.shape_env import CaptureShapeEnv
from tests.capture.test_transformers import bert, groupvit, resnet, text
from tests.modules import module

X = torch.randn(4, 4)


class Repeats(nn.Module):
    """The same calls on tensors that differ in one thing."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(4, 4)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x, y):
        strides = x.relu(), x.t().relu(), x.t().contiguous(), x.contiguous(), y.relu(), y[1].relu()
        sizes = x[:2].relu(), x[:2].sum(dim=0), x[:2].sum(dim=1), x[0].view(2, 2), x[1].view(2, 2)
        types = x.add(1), x.long().add(1), x.long().add(1.0), x.bool().add(1), x.bool().add(True)
        items = [x[i] for i in (0, True, slice(0, 2))] + [x[y > 0], x[0]]
        with torch.no_grad():
            frozen = self.dense(x), x * self.dense.weight
        free = self.dense(x), x * self.dense.weight, self.dense(x.detach()), self.dense(x.t())
        written = [torch.zeros(4, 4), torch.zeros(4, 4)]
        views = [zeros.view(-1) for zeros in written]
        views[1].add_(self.dense.weight.view(-1))
        parts = *x.split(2), *y.split(2), *x.max(1), *y.max(1)
        inplace = self.relu(x * 1), self.relu(x * 1)
        tables = x.clone(), x.clone()
        rows = [nn.functional.embedding(torch.arange(2), table, max_norm=1.0) for table in tables]
        versions = [table._version for table in tables]
        unchanged = torch.atleast_2d(x, x * 2), torch.atleast_2d(x, x * 2), x + 1
        return (
            strides,
            sizes,
            rows,
            versions,
            unchanged,
            types,
            items,
            frozen,
            free,
            [zeros * 1 for zeros in written],
            parts,
            inplace,
        )


class Layers(nn.Module):
    """The same layers on the same sizes, but for one setting, and layers that give several tensors."""

    def __init__(self):
        super().__init__()
        self.convolutions = nn.ModuleList(
            [nn.Conv1d(4, 4, 3, padding=p, bias=b) for p, b in [(0, True), (1, True), (1, False), (1, False)]]
        )
        self.convolutions[3].weight.requires_grad_(False)
        self.tables = nn.ModuleList([nn.Embedding(4, 4), nn.Embedding(4, 4).double()])
        self.lstms = nn.ModuleList([nn.LSTM(4, 4), nn.LSTM(4, 4), nn.LSTM(4, 4, bidirectional=True)])

    def forward(self, x, y):
        return [layer(x.detach()) for layer in self.convolutions], [
            *[layer(y) for layer in self.lstms],
            *[table(torch.arange(4)) for table in self.tables],
        ]


def captured(model, inputs, free):
    gm = fxopt.trace(model, (), inputs, dynamic_shapes=free, verify=False)
    first = {}
    values = []
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        for tensor in value if isinstance(value, (tuple, list)) else [value]:
            if isinstance(tensor, torch.Tensor):
                memory = first.setdefault(tensor.untyped_storage()._cdata, node.name)
                sizes = [str(size) for size in (*tensor.shape, *tensor.stride(), tensor.storage_offset())]
                values.append((node.name, sizes, tensor.dtype, tensor.requires_grad, memory))
    return gm.code, values, gm.input_guard.inputs, gm.input_guard.alternatives


CASES = {
    "repeats": (Repeats(), {"x": X, "y": torch.randn(4, 4).t()}, ()),
    "repeats, free": (Repeats(), {"x": X, "y": torch.randn(4, 4).t()}, (0,)),
    "layers": (Layers().eval(), {"x": X, "y": X}, ()),
    "layers, free": (Layers().eval(), {"x": X, "y": X}, (1,)),
    "layers in training": (Layers().train(), {"x": X, "y": X}, (1,)),
    "BERT": (bert(), text(3, 7), (0, 1)),
    "BERT, eager attention": (bert("eager"), text(3, 7), (0, 1)),
    "BERT in training": (bert().train(), text(3, 7), (0, 1)),
    "ResNet": (resnet(), {"pixel_values": torch.randn(3, 3, 64, 64)}, (0,)),
    "GroupViT": (groupvit(), text(3, 7) | {"pixel_values": torch.randn(2, 3, 32, 32)}, (0,)),
}


@pytest.mark.sweep(5)
@pytest.mark.parametrize("name", CASES)
def test_metadata_guards_and_memory_are_those_of_every_call_made(name, monkeypatch):
    model, inputs, dimensions = CASES[name]
    if name == "GroupViT":
        del inputs["token_type_ids"]
    free = {key: dict.fromkeys(dimensions, Dim.AUTO) for key in inputs}
    remembered = captured(model, inputs, free)
    monkeypatch.setattr(CallCache, "_call", lambda *args: None)
    for kept, made in zip(remembered, captured(model, inputs, free), strict=True):
        assert kept == made


class Norms(nn.Module):
    """A result that is computed in a short way where its input is contiguous, on such and other inputs."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3)
        self.unaffine = nn.BatchNorm2d(3, affine=False)

    def forward(self, x, y):
        found = []
        for image in (
            x,
            y,
            x.to(memory_format=torch.channels_last),
            x.transpose(2, 3),
            x[:1],
            x[:, :, :3],
            x.detach(),
        ):
            found += [
                image.relu(),
                self.norm(image),
                self.unaffine(image),
                self.conv(self.norm(image).relu()),
            ]
        half = x.bfloat16()
        norm = nn.functional.batch_norm(half, self.norm.running_mean, self.norm.running_var)
        return found, half.relu(), norm, x.long().relu()


@pytest.mark.sweep(3)
@pytest.mark.parametrize("dimensions", [(), (0,), (0, 2, 3)])
def test_short_ways_give_what_torch_does(dimensions, monkeypatch):
    model, inputs = (
        Norms().eval(),
        {"x": torch.randn(2, 3, 8, 8), "y": torch.randn(2, 3, 8, 8).requires_grad_()},
    )
    free = {key: dict.fromkeys(dimensions, Dim.AUTO) for key in inputs}
    short = captured(model, inputs, free)
    monkeypatch.setattr("fxopt.capture.fakes.fake_mode._are_contiguous", lambda tensors: False)
    monkeypatch.setattr("fxopt.capture.fakes.fake_mode._GIVE_SIZES_OF_INPUT", ())
    assert short[:2] == captured(model, inputs, free)[:2]  # of the guards, torch's own way needs more


def test_calls_are_remembered(monkeypatch):
    made = []
    original = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: made.append(self) or original(self, x))
    fxopt.trace(nn.Sequential(*[nn.Linear(4, 4) for _ in range(9)]), (X,), verify=False)
    assert len(made) == 2  # on the input, and on what depends on parameters


def test_attention_draws_random_numbers_for_dropout_alone():
    mode = CaptureFakeMode(allow_non_fake_inputs=True)
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with mode:
        x = torch.ones(1, 1, 4, 4)
        attend(x, x, x)
        nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.0)
        assert mode.drawn == 0
        attend(x, x, x, 0.5)
        attend(x, x, x, dropout_p=0.5)
        assert mode.drawn == 2
        nn.functional.dropout(x)
        assert mode.drawn > 2


def test_attention_is_remembered(monkeypatch):
    class Attends(nn.Module):
        def forward(self, x):
            x = x[None, None]
            for _ in range(4):
                x = nn.functional.scaled_dot_product_attention(x, x, x)
            return x

    asked = []
    original = CallCache.function_call
    monkeypatch.setattr(
        CallCache,
        "function_call",
        lambda self, function, *args: (
            asked.append((function, original(self, function, *args))) or asked[-1][1]
        ),
    )
    fxopt.trace(Attends(), (X,), verify=False)
    assert [call.known for function, call in asked if "attention" in function.__name__] == [
        False,
        True,
        True,
        True,
    ]


class Asks(nn.Module):
    """Calls before and after a question whose answer changes nothing, some under another kernel of attention."""

    def __init__(self):
        super().__init__()
        self.before, self.after = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)

    def forward(self, x):
        rows = self.before(x).nonzero()
        if rows.shape[0] > 2:
            pass
        image = self.after(x)[None, None]
        with sdpa_kernel(SDPBackend.MATH):
            under = nn.functional.scaled_dot_product_attention(image, image, image)
        return under, nn.functional.scaled_dot_product_attention(image, image, image), rows[:2], x[:2]


@pytest.mark.parametrize("dimensions", [(), (0,)])
def test_the_captures_of_a_forward_remember_for_each_other(dimensions, monkeypatch):
    made = []
    original = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: made.append(x.shape) or original(self, x))
    model, free = Asks(), {"x": dict.fromkeys(dimensions, Dim.AUTO)}
    remembered = captured(model, {"x": X}, free)
    assert len(made) == 2
    monkeypatch.setattr(CallCache, "_call", lambda *args: None)
    assert remembered == captured(model, {"x": X}, free)
    assert len(made) > 10  # each layer, in each capture


def test_calls_on_as_many_rows_as_a_run_finds_are_remembered(monkeypatch):
    class Finds(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(5)])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            found, other = x[x[:, 0] > 0], x[x[:, 1] > 0]
            for layer in self.layers:
                found, other = layer(found), layer(other)
            return found, other

    made = []
    original = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: made.append(x) or original(self, x))
    model = Finds()
    gm = fxopt.trace(model, (X,), verify=False)
    assert (
        len(made) == 4
    )  # on the input, on what depends on parameters, and on as many rows as each index finds
    for given in (X, -X, X[:0].new_ones(4, 4)):
        for result, expected in zip(gm(given), model(given), strict=True):
            assert torch.equal(result, expected)


def test_what_follows_from_an_answer_is_not_remembered_for_the_other():
    class Takes(nn.Module):
        def forward(self, x):
            rows = x.nonzero()
            if rows.shape[0] >= 2:
                pass
            taken = rows[:2]
            return taken * 1, taken.shape[0]

    model, x = Takes(), torch.tensor([1.0, 2.0, 0.0, 3.0])
    gm = fxopt.trace(model, (x,))
    for given in (x, x * 0, torch.tensor([0.0, 1.0, 0.0, 0.0])):
        try:
            rows, number = gm(given)
        except fxopt.GuardError:
            continue
        assert (rows.tolist(), number) == (model(given)[0].tolist(), model(given)[1])


def a_capture(earlier):
    """The ShapeEnv of a capture, three sizes and a number that only a run knows, and a function that calls relu on rows."""
    shape_env = CaptureShapeEnv()
    mode = CaptureFakeMode(shape_env=shape_env, allow_non_fake_inputs=True)
    symbols = [shape_env.create_symbol(n, ConstantSource(f"x{n}"), DimDynamic.DYNAMIC) for n in (5, 6, 7)]
    sizes = [shape_env.create_symintnode(symbol, hint=n) for n, symbol in enumerate(symbols, 5)]
    sizes.append(shape_env.create_unbacked_symint())
    memo = CallCache(mode, earlier)

    def call(rows):
        with torch.fx.experimental._config.patch(backed_size_oblivious=True), mode:
            x = torch.empty(rows, 4)
            return memo.function_call(torch.relu, (x,), {}), torch.relu(x)

    return shape_env, sizes, call


def test_a_result_is_taken_where_as_much_is_known_of_its_sizes():
    earlier = {}
    for known, assumed in ((False, False), (True, False), (False, True), (True, True)):
        shape_env, (a, b, *_), call = a_capture(earlier)
        if assumed:
            shape_env.assume(sympy.Lt(a.node.expr, b.node.expr), "a test")
        made, result = call(a)
        assert made.known == known
        if known:
            assert made.recall().shape[0].node.expr == a.node.expr
        made.remember(result)


def test_what_is_known_of_other_sizes_does_not_matter():
    shape_env, sizes, _ = a_capture({})
    symbols = [size.node.expr for size in sizes[:3]]
    before = [shape_env.facts.about([symbol]) for symbol in symbols]
    shape_env.assume(sympy.Lt(symbols[0], symbols[1]), "a test")
    after = [shape_env.facts.about([symbol]) for symbol in symbols]
    assert [known[0] == knew[0] for known, knew in zip(before, after, strict=True)] == [False, False, True]
    assert after[0][1] == after[1][1] == set(symbols[:2])


def test_what_torch_could_not_tell_is_asked_again_once_more_is_known():
    _, (a, b, *_), _ = a_capture({})
    with torch.fx.experimental._config.patch(backed_size_oblivious=True):
        assert not guard_or_false(a * 3 < b * 2)
        assert guard_or_true(a * 3 <= b * 2)
        assert a * 3 > b * 2
        assert not guard_or_true(a * 3 <= b * 2)


def of_ones(shape_env, sizes):
    assert sizes[0] != 1


def of_sizes(shape_env, sizes):
    assert sizes[0] * 3 < sizes[1] * 3


def of_data(shape_env, sizes):
    shape_env.decide = lambda expression: sympy.true
    assert sizes[-1] > 7


@pytest.mark.parametrize("ask", [of_ones, of_sizes, of_data])
def test_a_call_that_asks_is_made_by_each_capture(ask):
    earlier = {}
    for _ in range(2):
        shape_env, sizes, call = a_capture(earlier)
        with shape_env.in_operator():
            made, result = call(sizes[0])
            assert not made.known
            ask(shape_env, sizes)
            made.remember(result)


def test_sizes_that_values_decide_are_new_with_each_call():
    class Count(nn.Module):
        def forward(self, x, y):
            return x.nonzero().shape[0] * x, y.nonzero().shape[0] * y

    gm = fxopt.trace(Count(), (X, X))
    x, y = torch.eye(4), torch.ones(4, 4)
    assert all(map(torch.equal, gm(x, y), (4 * x, 16 * y)))


def test_attention_is_not_remembered_from_one_backend_to_another():
    class Attention(nn.Module):
        def forward(self, x):
            made = []
            for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
                with sdpa_kernel(backend):
                    made.append(nn.functional.scaled_dot_product_attention(x, x, x).stride())
            return made

    x = torch.randn(2, 4, 3, 8).transpose(1, 2)
    assert fxopt.trace(Attention(), (x,))(x) == Attention()(x)


def test_gradients_that_the_forward_takes_through_remembered_calls():
    class Gradient(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

        def forward(self, x, y):
            for layer in self.layers:
                x = layer(x).view(2, 8).view(4, 4) * y
            return torch.autograd.grad(x.sum(), [y, self.layers[2].weight, self.layers[0].bias])

    model = Gradient()
    y = torch.randn(4, 4, requires_grad=True)
    assert all(map(torch.equal, fxopt.trace(model, (X, y))(X, y), model(X, y)))


def test_numbers_that_are_known_stay_known():
    model = module(lambda self, x: x[: torch.tensor(3).relu()] * int(torch.tensor(-1).relu() + 2))
    gm = fxopt.trace(model, (X,))
    assert torch.equal(gm(X), X[:3] * 2)


class Counted(nn.Module):
    """Asks twice for a statistic that the second of two equal layers writes in between."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(4), nn.BatchNorm1d(4)

    def forward(self, x):
        y = self.first(x)
        tracked = self.second.num_batches_tracked
        if tracked:
            raise ValueError("called before")
        y = y + self.second(x)
        return y * 2 if tracked else y


def test_a_layer_that_writes_statistics_is_called_each_time():
    model = Counted().train()
    traced = fxopt.trace(copy.deepcopy(model), (X,))
    assert torch.equal(traced(X), model(X))
    with pytest.raises(fxopt.GuardError, match="called before"):
        traced(X)
