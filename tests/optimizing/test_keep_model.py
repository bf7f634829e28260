"""`keep_model=False`: a graph without its model, in which nothing is held twice."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

import fxopt
from fxopt.kernels import kernels_for
from fxopt.optimizing import prepare as prepare_module
from fxopt.submodules import GRAPHS
from fxopt.testing import randomise
from tests.modules import module

pytestmark = pytest.mark.skipif(not kernels_for(nn.Linear(16, 16)), reason="no packed kernels")


@pytest.fixture(autouse=True)
def no_timing(monkeypatch):
    monkeypatch.setattr(prepare_module, "speedup", lambda *_: 1.5)


def folded():
    layers = nn.Sequential(nn.Conv2d(64, 64, 3), nn.BatchNorm2d(64), nn.Conv2d(64, 64, 3))
    return randomise(layers.eval()), torch.randn(2, 64, 8, 8)


@torch.no_grad()
def test_a_folded_weight_is_held_packed_alone_and_saved_bit_for_bit():
    model, x = folded()
    wanted = fxopt.FoldBatchNorms()(fxopt.trace(copy.deepcopy(model), (x,)))
    fast = fxopt.optimize(model, (x,), tune=False)
    ((graph,),) = (cache.graphs for cache in getattr(fast, GRAPHS).caches)
    assert graph.lowered.given_up == ("0",)
    assert graph.lowered.traced.get_submodule("0").weight.is_meta
    whole = graph.lowered.with_weights()
    assert torch.equal(whole.get_submodule("0").weight, wanted.get_submodule("0").weight)
    assert torch.allclose(whole(x), fast(x), rtol=1e-4, atol=1e-4)
    assert fast.report[0].memory <= 2.1


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@torch.no_grad()
def test_nothing_of_the_model_is_held(precision):
    model, x = folded()
    wanted, weights = model(x), [weakref.ref(layer.weight) for layer in (model[0], model[2])]
    alone = fxopt.optimize(model, (x,), precision=precision, tune=False, keep_model=False)
    del model
    gc.collect()
    assert [weight() for weight in weights] == [None, None]
    assert alone.report[0].memory <= 1.1
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if precision == "float32" else {"rtol": 0.1, "atol": 1.0}
    torch.testing.assert_close(alone(x), wanted, **tolerance)
    with pytest.raises(fxopt.GuardError, match="dimension 0 is 3"):
        alone(torch.randn(3, 64, 8, 8))
    with (
        torch.enable_grad(),
        pytest.raises(fxopt.GuardError, match="for inference: call it in eval mode and under"),
    ):
        alone(x)
    with pytest.raises(fxopt.GuardError, match="for inference: call it in eval mode and under"):
        torch.func.vmap(alone)(x[None])
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(fxopt.GuardError, match="for inference: call it in eval mode and under"):
            alone.forward(x)
    finally:
        handle.remove()


@torch.no_grad()
def test_errors_say_what_to_do(tmp_path):
    model, x = folded()
    alone = fxopt.optimize(model, (x,), keep_model=False, tune=False)
    for asked in (
        lambda: fxopt.save(alone, tmp_path),
        lambda: fxopt.undo(alone),
        lambda: pickle.dumps(alone),
    ):
        with pytest.raises(fxopt.PassError, match="holds one graph and no model, so that it cannot be saved"):
            asked()
    assert torch.equal(copy.deepcopy(alone)(x), alone(x))
    with pytest.raises(fxopt.errors.GuardError, match="call it in eval mode"):
        copy.deepcopy(alone).train()(x)
    with pytest.raises(
        TypeError, match="keep_model=False keeps the graph for example inputs: give optimize some"
    ):
        fxopt.optimize(model, keep_model=False)
    with pytest.raises(ValueError, match="methods: give methods"):
        fxopt.optimize(model, (x,), methods=("decode",), keep_model=False)
    with pytest.raises(ValueError, match="keep_model=False keeps one graph, of the forward"):
        fxopt.optimize(model, (x,), methods=("append",), keep_model=False)
    listed = module(lambda m, x: x[x > 0].tolist())
    with (
        pytest.warns(UserWarning, match="falls back to eager"),
        pytest.raises(fxopt.PassError, match=r"there is no graph, and keep_model=False keeps nothing else"),
    ):
        fxopt.optimize(listed.eval(), (x,), keep_model=False)
