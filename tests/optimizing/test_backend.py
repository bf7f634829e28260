"""`torch.compile(model, backend="fxopt")`: as exact as the model, whatever happens to weights, sizes and gradients."""

import copy
import importlib
import tomllib
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxopt
from fxopt.kernels import kernels_for
from fxopt.optimizing import backend
from fxopt.optimizing import prepare as prepare_module
from fxopt.testing import randomise
from tests import small_models

pytestmark = [
    pytest.mark.filterwarnings("error:the model itself runs"),
    pytest.mark.skipif(
        not kernels_for(nn.Linear(16, 16)), reason="this build of torch has no packed kernels"
    ),
]


@pytest.fixture(autouse=True)
def no_timing(monkeypatch):
    """Count small models as faster, which is a matter of luck on a busy machine."""
    monkeypatch.setattr(prepare_module, "speedup", lambda *_: 1.5)
    yield
    torch._dynamo.reset()


@pytest.fixture
def made(monkeypatch):
    """The modules that are optimized meanwhile."""
    found, optimize = [], backend.optimize
    monkeypatch.setattr(
        backend, "optimize", lambda *args, **options: found.append(optimize(*args, **options)) or found[-1]
    )
    return found


class Layers(nn.Module):
    """Layers of each kind that dynamo takes apart, and weights that are used as they are."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.flat, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16)
        self.signal = nn.Conv1d(1, 2, 3)
        self.scale = nn.Parameter(torch.ones(16))
        self.register_buffer("shift", torch.ones(16))

    def forward(self, x):
        rows = self.norm(self.conv(x)).relu().mean((2, 3))
        rows = self.last(F.gelu(self.flat(rows)) * self.scale + self.shift)
        return {"rows": rows, "signal": self.signal(rows[:, None]), "count": x.shape[0]}


def image(batch=2, dtype=torch.float32):
    return torch.randn(batch, 3, 8, 8, dtype=dtype)


def model(dtype=torch.float32):
    torch.manual_seed(0)
    return randomise(Layers().eval().to(dtype))


def compiled(module, **options):
    return torch.compile(module, backend="fxopt", options=options or None)


def assert_same(fast, module, x, **tolerance):
    with torch.no_grad():
        torch.testing.assert_close(fast(x), module(x), **tolerance)


def sites(fast):
    return {each.name: len(each.sites) for graph in fast.report for each in graph.explanations if each.sites}


def test_layers_are_found_and_folded(made):
    assert_same(compiled(model(), tune=False), model(), image())
    assert sites(made[0])["FoldBatchNorms"] == 1
    assert sites(made[0])["PackConvs"] == 1
    assert sites(made[0])["PackLinears"] == 1
    assert made[0].report[0].reason is None


def test_exact_in_float64(made):
    tolerance = {"atol": 1e-12, "rtol": 1e-12}
    assert_same(compiled(model(torch.float64)), model(torch.float64), image(dtype=torch.float64), **tolerance)
    assert sites(made[0])["FoldBatchNorms"] == 1


def test_other_functions_with_weights_stay_what_they_are(made):
    class Keywords(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = (nn.Parameter(torch.linspace(1, 2, 16)) for _ in range(2))
            self.square, self.flat = nn.Parameter(torch.randn(4, 16)), nn.Parameter(torch.randn(16))

        def forward(self, x):
            x = F.layer_norm(input=x, normalized_shape=(16,), weight=self.weight, bias=self.bias)
            x = x + F.prelu(input=x, weight=self.weight[:1]) + F.linear(self.square, x, None).sum()
            x = x + F.linear(weight=self.flat, input=x)[:, None]
            x = x + F.embedding(input=torch.arange(x.shape[0]), weight=self.square)
            return F.linear(weight=self.square, bias=self.bias[:4], input=x), F.linear(
                input=x, weight=self.square
            )

    module, x = Keywords().eval(), torch.randn(3, 16)
    assert_same(compiled(module, tune=False), module, x, atol=1e-4, rtol=1e-4)
    assert [type(layer) for layer in made[0].dynamo.children()] == [nn.Linear]
    assert made[0].report[0].reason is None


def test_any_batch_with_three_graphs(made):
    module = model()
    fast = compiled(module)
    for batch in (2, 3, 5, 2, 7, 11):
        assert_same(fast, module, image(batch))
    assert len(made) == 2  # dynamo's graph of the first size, and its one of any
    assert [len(each.report) for each in made] == [1, 2]


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_transformers(name, made):
    module, inputs = getattr(small_models, name)()
    fast = compiled(module.eval(), tune=False)
    with torch.no_grad():
        torch.testing.assert_close(fast(**inputs)[0], module(**inputs)[0], atol=1e-5, rtol=1e-4)
    assert made
    assert all(graph.reason is None for each in made for graph in each.report)
    assert sum(sites(each).get("PackLinears", 0) + sites(each).get("PackConvs", 0) for each in made) > 0


def test_gradients_are_those_of_the_model(made):
    module, other = model().train(), model().train()
    fast, x = compiled(module), image()
    for each, run in ((module, fast), (other, other)):
        run(x)["rows"].square().sum().backward()
        assert all(p.grad is not None for name, p in each.named_parameters() if "signal" not in name)
    torch.testing.assert_close(
        {n: p.grad for n, p in module.named_parameters() if p.grad is not None},
        {n: p.grad for n, p in other.named_parameters() if p.grad is not None},
    )
    torch.testing.assert_close(module.state_dict(), other.state_dict())  # the statistics, too
    assert not made


@pytest.mark.parametrize("options", [{}, {"fused": True}])
def test_steps_of_an_optimizer_are_seen(options):
    module, x = model(), image()
    fast = compiled(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, **options)
    for _ in range(3):
        assert_same(fast, module, x, atol=1e-4, rtol=1e-4)
        before = module(x)["rows"].detach()
        fast(x)["rows"].square().sum().backward()
        optimizer.step()
        assert not torch.allclose(before, module(x)["rows"])


def in_place(module):
    module.flat.weight.mul_(2)
    module.norm.running_mean.add_(1)


def loaded(module):
    module.load_state_dict({name: value * 2 for name, value in module.state_dict().items()})


def assigned(module):
    state = {name: value * 2 for name, value in module.state_dict().items()}
    module.load_state_dict(state, assign=True)


def replaced(module):
    module.flat.weight = nn.Parameter(module.flat.weight * 2)
    module.shift = module.shift + 1


@pytest.mark.parametrize("change", [in_place, loaded, assigned, replaced])
def test_changed_weights_are_seen(change):
    module, x = model(), image()
    fast = compiled(module)
    for _ in range(2):
        assert_same(fast, module, x)
        with torch.no_grad():
            before = module(x)["rows"]
            change(module)
            assert not torch.allclose(before, module(x)["rows"])
    assert_same(fast, module, x)


def test_blocks_that_share_their_code_have_their_own_weights(made, monkeypatch):
    monkeypatch.setattr(backend, "MOST_WEIGHTS", 3)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x):
            return self.linear(x).relu()

    blocks = [randomise(Block().eval()) for _ in range(5)]
    eager = copy.deepcopy(blocks)
    for block in blocks:
        block.compile(backend="fxopt")
    x = torch.randn(3, 16)
    for _ in range(2):
        for block, plain in zip(blocks, eager, strict=True):
            assert_same(block, plain, x)
    assert len(made) == 3


def test_functions_and_weights_as_inputs():
    def function(x, weight):
        return F.linear(x, weight).relu() + x.shape[0]

    fast = compiled(function)
    for rows in (2, 3, 4, 5):
        x, weight = torch.randn(rows, 16), torch.randn(8, 16)
        torch.testing.assert_close(fast(x, weight), function(x, weight))


def test_numbers_as_inputs():
    fast = compiled(lambda x, number: x * number)
    for number in (2, 3, 4, 5):
        x = torch.randn(3, number)
        torch.testing.assert_close(fast(x, number), x * number)
        torch.testing.assert_close(fast(x, number + 0.5), x * (number + 0.5))


def test_what_a_graph_writes_is_written_once():
    def function(x, cache):
        cache.add_(x)
        return cache * 2

    fast = compiled(function)
    x, cache = torch.randn(3), torch.zeros(3)
    for times in (1, 2, 3):
        torch.testing.assert_close(fast(x, cache), 2 * times * x)
        torch.testing.assert_close(cache, times * x)


def test_an_option_that_changes_from_call_to_call():
    class Options(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 3, 1, 1))

        def forward(self, x, other):
            return F.conv2d(x, self.weight, stride=other.shape[0])

    module, x = randomise(Options().eval()), torch.randn(2, 3, 6, 6)
    fast = compiled(module, tune=False)
    for stride in (1, 2, 3):
        with torch.no_grad():
            torch.testing.assert_close(fast(x, torch.ones(stride)), module(x, torch.ones(stride)))


def test_precision(made):
    module, x = (
        randomise(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval()),
        torch.ones(4, 64),
    )
    fast = compiled(module, precision="bfloat16", tune=False)
    assert_same(fast, module, x, atol=0.1, rtol=0.1)
    assert sites(made[0])["ChangePrecision"] == 1
    with pytest.raises(ValueError, match="precision is 'half'"), torch.no_grad():
        compiled(copy.deepcopy(module), precision="half")(x)


def test_the_entry_point_is_the_backend():
    project = tomllib.loads((Path(fxopt.__file__).parents[1] / "pyproject.toml").read_text())
    module, _, name = project["project"]["entry-points"]["torch_dynamo_backends"]["fxopt"].partition(":")
    assert getattr(importlib.import_module(module), name) is backend.compile_graph
    assert "fxopt" in torch.compiler.list_backends()
