"""`memory="low"`: the model's weights are in a file, and are the same wherever they are read; nothing holds a weight twice."""

import copy
import errno
import os

import numpy as np
import pytest
import torch
from torch import nn

import fxopt
from fxopt.kernels import kernels_for
from fxopt.optimizing import prepare as prepare_module
from fxopt.optimizing.offloading import Offloaded
from fxopt.submodules import GRAPHS
from fxopt.testing import randomise
from validation.bench.memory import resident

pytestmark = pytest.mark.skipif(
    not kernels_for(nn.Linear(16, 16)) or os.name != "posix", reason="no packed kernels, or no mapped files"
)
X = torch.randn(2, 3, 12, 12)


@pytest.fixture(autouse=True)
def no_timing(monkeypatch):
    monkeypatch.setattr(prepare_module, "speedup", lambda *_: 1.5)


class Net(nn.Module):
    """A fold, a merge, a tie and a weight that is read as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64)
        self.left, self.right = nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False)
        self.tied = nn.Linear(256, 256)
        self.tied.weight = self.left.weight
        self.scale = nn.Parameter(torch.randn(256))

    def forward(self, x):
        x = self.norm(self.conv(x)).relu()[:, :, :8, :8].flatten(2)
        x = nn.functional.pad(x, (0, 192))
        return self.left(x) * self.scale + self.right(x)


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@torch.no_grad()
def test_the_weights_stay_what_they_are(precision):
    model = randomise(Net().eval())
    before, wanted, objects = state(model), model(X), [*model.parameters()]
    fast = fxopt.optimize(model, (X,), precision=precision, tune=False, memory="low")
    (report,) = fast.report
    assert report.reason is None
    assert report.memory <= 1.05, "the packed copies, and the scale"
    assert "are in a file" in str(report)
    assert torch.allclose(fast(X), wanted, rtol=1e-4 if precision == "float32" else 0.1, atol=1e-1)
    for each in (fast, model, fxopt.undo(fast), copy.deepcopy(fast)):
        assert all(torch.equal(value, before[name]) for name, value in state(each).items())
        assert torch.equal(fxopt.undo(each)(X) if each is not model else model(X), wanted)
    assert all(a is b for a, b in zip(objects, model.parameters(), strict=True))
    assert model.tied.weight is model.left.weight


@torch.no_grad()
def test_what_is_written_is_not_lost():
    model = randomise(Net().eval())
    fast = fxopt.optimize(model, (X,), tune=False, memory="low")
    model.left.weight.mul_(2)
    wanted = model(X)
    getattr(fast, GRAPHS).offloaded.evict()
    assert torch.equal(model(X), wanted)
    assert torch.allclose(fast(X), wanted, rtol=1e-4, atol=1e-4), "a new graph"
    assert len(fast.report) == 1


@torch.no_grad()
def test_memory_comes_back_to_the_system():
    layers = nn.Sequential(*(nn.Linear(1000, 1000) for _ in range(8)))  # 32 MB
    wanted, size = layers(torch.ones(1, 1000)), 32e6
    before = resident("VmRSS")
    moved = Offloaded(layers.parameters())
    assert resident("VmRSS") < before - 0.8 * size
    assert torch.equal(layers(torch.ones(1, 1000)), wanted)
    moved.evict()
    assert resident("VmRSS") < before - 0.8 * size


@pytest.mark.parametrize("memory", ["high", "low"])
@torch.no_grad()
def test_no_copy_beside_the_packed_one(memory):
    """A folded weight is held packed alone, and saved bit for bit."""
    model = randomise(nn.Sequential(nn.Conv2d(64, 64, 3), nn.BatchNorm2d(64), nn.Conv2d(64, 64, 3)).eval())
    x = torch.randn(2, 64, 8, 8)
    wanted = fxopt.FoldBatchNorms()(fxopt.trace(copy.deepcopy(model), (x,)))
    fast = fxopt.optimize(model, (x,), tune=False, memory=memory)
    (((graph,),),) = (book.tried.values() for book in getattr(fast, GRAPHS)._books)
    lowered = graph.lowered
    assert lowered.given_up == ("0",)
    assert lowered.traced.get_submodule("0").weight.is_meta
    whole = lowered.with_weights()
    assert torch.equal(whole.get_submodule("0").weight, wanted.get_submodule("0").weight)
    assert torch.allclose(whole(x), fast(x), rtol=1e-4, atol=1e-4)
    assert fast.report[0].memory <= (2.05 if memory == "high" else 1.05)


def _no_gradients(value):
    return nn.Parameter(value, requires_grad=False)


@torch.no_grad()
def test_what_others_see_or_what_is_no_plain_memory_stays_where_it_is():
    layer = nn.Linear(4, 4)
    layer.shared = nn.Parameter(torch.randn(4).share_memory_())
    layer.conjugate = _no_gradients(torch.randn(4, dtype=torch.complex64).conj())
    layer.negative = _no_gradients(torch.randn(4, dtype=torch.complex64).conj().imag)
    with torch.inference_mode():
        layer.inference = nn.Parameter(torch.randn(4))
    layer.register_buffer("tied", layer.bias.data)
    wanted, weight = {name: p.clone() for name, p in layer.named_parameters()}, layer.weight.data_ptr()
    Offloaded(layer.parameters(), layer.buffers())
    assert all(torch.equal(p, wanted[name]) for name, p in layer.named_parameters())
    assert layer.weight.data_ptr() != weight
    assert layer.shared.is_shared()
    assert layer.inference.is_inference()
    layer.bias.add_(1)
    assert torch.equal(layer.tied, layer.bias)


@pytest.mark.parametrize("memory", ["high", "low"])
@torch.no_grad()
def test_complex_weights(memory):
    model = Net().eval()
    model.scale = _no_gradients(torch.randn(256, dtype=torch.complex64).conj())
    wanted = model(X)
    fast = fxopt.optimize(model, (X,), tune=False, memory=memory)
    assert torch.allclose(fast(X), wanted, rtol=1e-4, atol=1e-4)
    assert torch.equal(model(X), wanted)


@torch.no_grad()
def test_saved_and_loaded(tmp_path):
    model = randomise(Net().eval())
    fast = fxopt.optimize(model, (X,), tune=False, memory="low")
    fxopt.save(fast, tmp_path / "saved")
    assert torch.equal(fxopt.load(tmp_path / "saved")(X), fast(X))


def test_errors_say_what_to_do(monkeypatch):
    with pytest.raises(ValueError, match="memory is 'tiny'; give one of 'high', 'low'"):
        fxopt.optimize(Net().eval(), memory="tiny")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(fxopt.PassError, match=r"No space left on device.*another folder.*FXOPT_CACHE"):
        fxopt.optimize(Net().eval(), memory="low")


@torch.no_grad()
def test_arrays_that_begin_at_the_same_place(tmp_path):
    array = np.random.default_rng(0).standard_normal((128, 64), np.float32)
    parts = [torch.from_numpy(array[:64]), torch.from_numpy(array), torch.randn(64, 128)]
    model = nn.Sequential(*(nn.Linear(*reversed(part.shape), bias=False) for part in parts)).eval()
    for layer, part in zip(model, parts, strict=True):
        layer.weight = nn.Parameter(part)
    before, x = state(model), torch.randn(2, 64)
    fast = fxopt.optimize(model, (x,), tune=False, memory="low")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    fxopt.save(fast, tmp_path / "fast")
    assert torch.equal(fxopt.load(tmp_path / "fast")(x), fast(x))
