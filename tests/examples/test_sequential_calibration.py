"""The sequential pipeline of `examples`, on the families of llm-compressor's tracing guide."""

import pytest
import torch
from torch import nn

from examples.sequential_calibration import (
    capture,
    error,
    gptq,
    llama,
    round_to_nearest,
    run_sequentially,
    text,
)
from fxopt.testing import randomise
from tests.capture import multimodal
from tests.capture.test_coarse_graphs import ON_VALUES, as_double

DECODER_LAYERS = ".*DecoderLayer"


@pytest.mark.sweep(8)
@pytest.mark.parametrize("family", multimodal.FAMILIES, ids=lambda family: family.__name__)
def test_families_layer_by_layer(family):
    """Replayed layer by layer, they give what they give in one piece, bit for bit."""
    torch.manual_seed(0)
    model, make = family()
    randomise(model, seed=0).double().eval()
    samples = [{name: as_double(value) for name, value in make(24).items()} for _ in range(2)]
    samples = [sample | {"use_cache": False} for sample in samples]
    gm = capture(model, samples[0], DECODER_LAYERS, specialize=family in ON_VALUES)
    ran = []

    def look(layer, run_samples):
        ran.append(layer)
        run_samples()

    outputs = run_sequentially(gm, samples, DECODER_LAYERS, look)
    assert len(set(ran)) == len(ran) == 2
    with torch.no_grad():
        for sample, output in zip(samples, outputs, strict=True):
            assert torch.equal(output.logits, model(**sample).logits)


def test_a_layer_sees_what_the_compressed_layers_before_it_give():
    model, samples, seen = llama(), text(2), []

    def silence(layer, run_samples):
        handle = layer.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].clone()))
        run_samples()
        handle.remove()
        with torch.no_grad():  # the layer adds nothing any more
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()

    run_sequentially(capture(model, samples[0], "LlamaDecoderLayer"), samples, "LlamaDecoderLayer", silence)
    embedded = [model.model.embed_tokens(sample["input_ids"]).detach() for sample in samples]
    assert len(seen) == 3 * len(samples)
    assert all(torch.equal(x, embedded[i % 2]) for i, x in enumerate(seen))


def test_gptq_loses_less_than_rounding():
    assert error(gptq, text(16)) < 0.8 * error(round_to_nearest, text(16))


def test_weights_are_on_the_grid():
    layer = nn.Sequential(nn.Linear(8, 4))
    inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    step = layer[0].weight.abs().amax(1, keepdim=True) * 2 / 15
    gptq(layer, lambda: layer(inputs))
    multiples = layer[0].weight / step
    assert torch.allclose(multiples, multiples.round(), atol=1e-4)
    assert not layer[0]._forward_pre_hooks
