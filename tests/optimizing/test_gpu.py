"""`fxopt.optimize` on a GPU: engines with CUDA graphs, precision, threads, decoding."""

import gc
import threading
import warnings

import pytest
import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MobileNetV2Config,
    MobileNetV2ForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
)

import fxopt
from fxopt.optimizing import prepare
from tests.capture.test_transformers import bert, resnet

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
ENGINES = ("torch", "inductor", "cudagraphs", "auto")


@pytest.fixture(autouse=True)
def no_timing(monkeypatch):
    """Count small models as faster, which is a matter of luck on a busy machine."""
    monkeypatch.setattr(prepare, "speedup", lambda *_: 1.5)


def layers():
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).eval().cuda()


def random_weights(model):
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.rand_like(tensor) * 0.2 + 0.01)
    return model.eval().cuda()


def drawn(*sizes):
    return torch.randn(*sizes, device="cuda")


def check(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("engine", ENGINES)
@torch.no_grad()
def test_outputs_weights_and_sizes(engine):
    model = layers()
    fast = fxopt.optimize(model, (drawn(4, 16),), engine=engine)
    assert engine == "auto" or fast.report[0].engine == engine, fast.report
    first = drawn(4, 16)
    found, wanted = fast(first), model(first)
    fast(drawn(4, 16))  # does not write into the output before
    check(found, wanted)
    model[0].weight.mul_(2)
    check(fast(first), model(first))
    for rows in (3, 7, 1, 9):
        more = drawn(rows, 16)
        check(fast(more), model(more))
    assert fxopt.undo(fast) is model


@pytest.mark.parametrize("engine", ENGINES)
@torch.no_grad()
def test_models(engine):
    ids = torch.arange(18, device="cuda").reshape(2, 9)
    for model, inputs in (
        (bert(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}),
        (resnet(), {"pixel_values": drawn(2, 3, 32, 32)}),
    ):
        random_weights(model)
        fast = fxopt.optimize(model, (), inputs, engine=engine)
        assert fast.report[0].reason is None, fast.report
        found, wanted = fast(**inputs), model(**inputs)
        assert type(found) is type(wanted)
        check(found[0], wanted[0])


@pytest.mark.parametrize("engine", ENGINES)
@torch.no_grad()
def test_another_thread(engine):
    model = layers()
    fast, x, found = fxopt.optimize(model, (drawn(4, 16),), engine=engine), drawn(4, 16), []

    def call():
        with torch.no_grad():
            found.append(fast(x))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for each in found:
        check(each, model(x))


@pytest.mark.parametrize("engine", ENGINES)
@torch.no_grad()
def test_generate(engine):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    llama = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=100)).eval().cuda()
    small = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 100}
    t5 = T5ForConditionalGeneration(T5Config(**small, decoder_start_token_id=0)).eval().cuda()
    ids = torch.randint(2, 100, (2, 5), device="cuda")
    for model in (llama, t5):
        for options in ({}, {"num_beams": 3}, {"cache_implementation": "static"}):
            fast = fxopt.optimize(model, engine=engine)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a static cache is written: torch computes
                found = fast.generate(ids, max_new_tokens=8, do_sample=False, **options)
            wanted = model.generate(ids, max_new_tokens=8, do_sample=False, **options)
            assert torch.equal(found, wanted), (type(model).__name__, options)


@pytest.mark.parametrize("engine", ["torch", "auto"])
@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
@torch.no_grad()
def test_precision(precision, engine):
    model, x = layers(), drawn(4, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxopt.FallbackWarning)  # such as int8, which is of the CPU
        fast = fxopt.optimize(model, (x,), precision=precision, engine=engine)
        found = fast(x)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, model(x), rtol=0.05, atol=0.05)


@torch.no_grad()
def test_a_model_in_half_precision():
    for dtype in (torch.bfloat16, torch.float16):
        model, x = layers().to(dtype), drawn(4, 16).to(dtype)
        for engine in ("torch", "auto"):
            fast = fxopt.optimize(model, (x,), engine=engine)
            assert fast.report[0].reason is None, fast.report
            torch.testing.assert_close(fast(x), model(x), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("engine", ["inductor", "cudagraphs"])
@torch.no_grad()
def test_streams_modes_and_expanded_inputs(engine):
    model, x = layers(), drawn(64, 16)
    fast = fxopt.optimize(model, (drawn(1, 16).expand(64, 16),), engine=engine)
    assert fast.report[0].engine == engine, fast.report
    wanted, found = model(x), []
    for number in range(20):
        with torch.cuda.stream(torch.cuda.Stream()), torch.inference_mode(number % 2 == 0):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            found.append((fast(x * number), model(x * number)))
    torch.cuda.synchronize()
    for mine, theirs in found:
        check(mine, theirs)
    check(fast(x), wanted)


@pytest.mark.parametrize("engine", ["inductor", "auto"])
@torch.no_grad()
def test_weights_are_asked_for_while_the_gpu_computes(engine):
    model = layers()
    fast, x = fxopt.optimize(model, (drawn(4, 16),), engine=engine), drawn(4, 16)
    for change in (
        lambda: model[0].weight.mul_(2),
        lambda: model.load_state_dict(layers().state_dict()),
        lambda: setattr(model[0].weight, "data", drawn(32, 16)),
        lambda: model.__setitem__(1, nn.ReLU()),
        lambda: model.double().float(),
    ):
        change()
        check(fast(x), model(x))
        check(fast(x), model(x))


@pytest.mark.parametrize("engine", ["inductor", "cudagraphs"])
@torch.no_grad()
def test_others_free_memory(engine):
    model, x = layers(), drawn(4, 16)
    fast, wanted = fxopt.optimize(model, (x,), engine=engine), model(x)
    other = layers()
    torch.compile(other, mode="reduce-overhead")(x)
    torch._dynamo.reset()
    del other
    gc.collect()
    torch.cuda.empty_cache()
    taken = [torch.full((1 << size,), torch.nan, device="cuda") for size in range(4, 26)]
    for _ in range(3):
        check(fast(x), wanted)
    assert fast.report[0].engine == engine
    assert len(taken) == 22  # and this memory is in use until here


class Scaled(nn.Module):
    """Takes a number on the CPU, of which a recording of kernels would hold the value."""

    def forward(self, x, scale):
        return x.softmax(-1) * scale


@pytest.mark.parametrize("engine", ["inductor", "cudagraphs"])
@torch.no_grad()
def test_an_input_on_the_cpu(engine):
    model, x = Scaled().eval(), drawn(4, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxopt.FallbackWarning)
        fast = fxopt.optimize(model, (x, torch.tensor(2.0)), engine=engine)
        for number in (2.0, 3.0, -1.0):
            check(fast(x, torch.tensor(number)), model(x, torch.tensor(number)))


@pytest.mark.parametrize("engine", ["torch", "cudagraphs"])
@torch.no_grad()
def test_convolutions_of_which_some_are_computed_in_tf32(engine):
    torch.manual_seed(0)
    model = MobileNetV2ForImageClassification(MobileNetV2Config()).eval()
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.normal_(0, 0.1), layer.running_var.uniform_(0.5, 2), layer.bias.normal_(0, 0.1)
    for _ in range(3):
        fast = fxopt.optimize(model.cuda(), (drawn(1, 3, 224, 224),), engine=engine)
        assert fast.report[0].reason is None, fast.report


@torch.no_grad()
def test_moved_to_the_cpu_and_back():
    model = layers()
    fast, x = fxopt.optimize(model, (drawn(4, 16),)), torch.randn(4, 16)
    fast.cpu()
    wanted = model(x)
    check(fast(x), wanted)
    fast.cuda()
    check(fast(x.cuda()).cpu(), wanted)


class Looked(nn.Module):
    """Looks up numbers that random inputs, and positions that other sizes, would seek beyond the tables."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(5, 8), nn.Embedding(4, 8)
        self.same = nn.Identity()

    def forward(self, ids, row):
        places = torch.arange(ids.shape[1], device=ids.device)
        return self.words(self.same(ids)) + self.places(self.same(places)) + self.same(row)[ids[0, :1]]


@torch.no_grad()
def test_verify_leaves_the_gpu_as_it_was():
    ids, row = torch.randint(0, 3, (2, 4), device="cuda"), drawn(3, 8)
    model = Looked().eval().cuda()
    free = {"ids": {1: torch.export.Dim.AUTO}, "row": {0: torch.export.Dim.AUTO}}
    gm = fxopt.trace(model, (ids, row), dynamic_shapes=free)
    fxopt.RemoveIdentity()(gm, verify=True)
    assert "same" not in gm.code
    torch.cuda.synchronize()
    check(gm(ids=ids, row=row), model(ids, row))
