"""An optimized module is saved as its graphs, each weight once, and loaded with kernels for the machine."""

import dataclasses
import inspect
import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import fxopt
from fxopt import tuning
from fxopt.kernels import PackedConv2d, PackedLinear, kernels_for
from fxopt.optimizing import prepare as prepare_module
from fxopt.saving import graph_set
from fxopt.submodules import GRAPHS
from fxopt.testing import randomise
from tests.modules import module

pytestmark = pytest.mark.skipif(
    not kernels_for(nn.Linear(16, 16)), reason="this build of torch has no packed kernels"
)


@pytest.fixture(autouse=True)
def no_timing(monkeypatch):
    """Count small models as faster, which is a matter of luck on a busy machine."""
    monkeypatch.setattr(prepare_module, "speedup", lambda *_: 1.5)


class Image(nn.Module):
    """A convolution with a norm that is folded, and a linear layer."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, image, scale=None):
        rows = self.last(self.norm(self.conv(image)).relu().mean((2, 3)))
        return rows if scale is None else rows * scale


@pytest.fixture
def image():
    return randomise(Image().eval())


def reloaded(fast, folder, **options):
    fxopt.save(fast, folder / "fast")
    return fxopt.load(folder / "fast", **options)


@torch.no_grad()
def test_each_kind_of_call_is_computed_to_the_last_bit(image, tmp_path):
    fast = fxopt.optimize(image, tune=False)
    x = torch.randn(2, 3, 8, 8)
    calls = [((x,), {}), ((x,), {"scale": x[0, 0, 0, :4]}), ((), {"image": x[:1]}), ((x[:, :, 1:],), {})]
    wanted = [fast(*args, **kwargs) for args, kwargs in calls]
    assert [graph.reason for graph in fast.report] == [None] * len(fast.report)
    loaded = reloaded(fast, tmp_path)
    for (args, kwargs), value in zip(calls, wanted, strict=True):
        assert torch.equal(loaded(*args, **kwargs), value)
    assert any(isinstance(layer, PackedConv2d) for layer in loaded.modules())
    again = reloaded(loaded, tmp_path)
    assert torch.equal(again(x), wanted[0])


@torch.no_grad()
def test_exact_in_float64(tmp_path, image):
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    loaded = reloaded(fxopt.optimize(image.double(), (x,)), tmp_path)
    torch.testing.assert_close(loaded(x), image(x), atol=1e-12, rtol=1e-12)


@torch.no_grad()
def test_prefill_and_decoding_hold_each_weight_once(tmp_path):
    heads = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(hidden_size=32, intermediate_size=48, vocab_size=60, **heads)
    model = randomise(LlamaForCausalLM(config).eval())
    fast, ids = fxopt.optimize(model, tune=False), torch.tensor([[5, 9, 31, 4]])
    wanted = fast.generate(ids, max_new_tokens=4, do_sample=False)
    loaded = reloaded(fast, tmp_path)
    (file,) = (tmp_path / "fast").glob("model-*.safetensors")
    stored = load_file(file)
    assert sum(t.nbytes for t in stored.values()) <= 1.05 * sum(p.nbytes for p in model.parameters())
    given, cache, place = ids, None, 0
    for number in range(4):
        if cache is None:
            cache = type(model(ids, use_cache=True).past_key_values)(config=config)
        options = {"return_dict": True, "use_cache": True, "logits_to_keep": 1}
        positions = torch.arange(place, place + given.shape[1])[None]
        # As `generate` calls it: transformers 5.24 has renamed the cache.
        name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        output = loaded(input_ids=given, position_ids=positions, **{name: cache}, **options)
        place, given = place + given.shape[1], output.logits[:, -1:].argmax(-1)
        assert given.item() == wanted[0, ids.shape[1] + number]


@torch.no_grad()
def test_other_inputs_are_one_clear_error(image, tmp_path):
    x = torch.randn(2, 3, 8, 8)
    loaded = reloaded(fxopt.optimize(image, (x,), tune=False), tmp_path)
    with pytest.raises(
        fxopt.GuardError, match=r"none of the 1 saved graphs.*dimension.*save this module again"
    ):
        loaded(x[:, :, 1:])
    with pytest.raises(fxopt.GuardError, match=r"for inputs given 1 by position"):
        loaded(x, scale=x)


@torch.no_grad()
def test_keywords_are_taken_in_any_order(tmp_path):
    model = module(
        lambda m, **named: m.layer(sum(i * x for i, x in enumerate(named.values()))), layer=nn.Linear(8, 8)
    )
    fast, a, b = fxopt.optimize(model, tune=False), torch.ones(2, 8), torch.randn(2, 8)
    _ = fast(b=b, a=a), fast(a=a, b=b)
    loaded = reloaded(fast, tmp_path)
    torch.testing.assert_close(loaded(b=b, a=a), model(b=b, a=a))
    torch.testing.assert_close(loaded(a=a, b=b), model(a=a, b=b))
    model = module(lambda m, a, b: m.layer(a) + b, layer=nn.Linear(8, 8))
    fast = fxopt.optimize(model, (), {"b": b, "a": a}, tune=False)
    assert torch.equal(reloaded(fast, tmp_path)(a=a, b=b), fast(a=a, b=b))


def test_what_has_no_graph_is_refused(image, tmp_path):
    fast = fxopt.optimize(image, (torch.randn(2, 3, 8, 8),), tune=False)
    for optimized in (fxopt.optimize(image), fast):
        with torch.no_grad():
            image.last.weight.mul_(2)  # the graph of the old weights is dropped
        with pytest.raises(fxopt.SaveError, match="no graph to save"):
            fxopt.save(optimized, tmp_path / "fast")
    assert not (tmp_path / "fast").exists()


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
@torch.no_grad()
def test_hooks_are_not_dropped(image, tmp_path, register):
    x = torch.randn(2, 3, 8, 8)
    fast = fxopt.optimize(image, tune=False)
    hook = getattr(fast, register)(lambda module, *values: values[-1])
    fast(x)
    with pytest.raises(fxopt.SaveError, match=r"has hooks \(_forward.*remove them"):
        fxopt.save(fast, tmp_path / "fast")
    hook.remove()
    fast(x)
    assert torch.equal(reloaded(fast, tmp_path)(x), fast(x))


@torch.no_grad()
def test_kernels_are_chosen_for_the_machine_that_loads(image, tmp_path, monkeypatch):
    x = torch.randn(2, 3, 8, 8)
    fast = fxopt.optimize(image, (x,), tune=True)
    monkeypatch.setattr(tuning, "_rows", {})
    asked = []

    def fastest(layer, shape, *, rounding, activation):
        asked.append((type(layer), tuple(shape), rounding, activation))
        return tuning.PLAIN, {}

    fast = fxopt.optimize(fxopt.undo(fast), tune=False)
    wanted = fast(x)
    graphs = getattr(fast, GRAPHS)
    graphs.options = dataclasses.replace(graphs.options, tune=True)
    monkeypatch.setattr(graph_set, "fastest", fastest)
    loaded = reloaded(fast, tmp_path)
    assert sorted(asked, key=str) == [
        (nn.Conv2d, (2, 3, 8, 8), False, "relu"),
        (nn.Linear, (2, 8), False, None),
    ]
    packed = [layer for layer in loaded.modules() if isinstance(layer, PackedLinear | PackedConv2d)]
    assert [layer.kernel for layer in packed] == [tuning.PLAIN] * 2
    torch.testing.assert_close(loaded(x), wanted)


@torch.no_grad()
def test_int8_stays(tmp_path, monkeypatch):
    if "int8" not in kernels_for(nn.Linear(64, 64), rounding=True):
        pytest.skip("this build of torch has no kernel for int8")
    model, x = randomise(nn.Sequential(nn.Linear(64, 64)).eval()), torch.randn(1, 64)
    fast = fxopt.optimize(model, (x,), precision="int8", tune=False)
    loaded = reloaded(fast, tmp_path)
    assert [m.kernel for m in loaded.modules() if isinstance(m, PackedLinear)] == ["int8"]
    assert torch.equal(loaded(x), fast(x))
    asked = []
    monkeypatch.setattr(
        graph_set, "fastest", lambda *_, rounding, activation: (asked.append(rounding) or "int8", {})
    )
    loaded.tune = True
    loaded.choose_kernels()
    assert asked == [True]


@torch.no_grad()
def test_damage_is_an_error(image, tmp_path):
    x = torch.randn(2, 3, 8, 8)
    fxopt.save(fxopt.optimize(image, (x,), tune=False), tmp_path / "fast")
    file = tmp_path / "fast" / "graph.json"
    document = json.loads(file.read_text())
    document["modules"] = []
    file.write_text(json.dumps(document))
    with pytest.raises(fxopt.LoadError, match="changed since it was saved"):
        fxopt.load(tmp_path / "fast")
