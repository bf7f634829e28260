"""Caches that a caller makes, of a fixed length or of sliding windows: greedy decoding as in eager, or GuardError."""

import pytest
import torch
from torch.export import Dim
from transformers import DynamicCache, Gemma3ForCausalLM, Gemma3TextConfig, StaticCache

import fxopt
from tests.capture.test_generation import DECODER, assert_same_cache, llama, mistral, prepared

STEPS = 8
WINDOW = 4


def gemma3():
    layers = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(**DECODER, head_dim=8, sliding_window=WINDOW, layer_types=layers)
    return prepared(Gemma3ForCausalLM(config))


def sliding_mistral():
    return mistral(WINDOW)


def cache_of(kind, model):
    return kind(model.config, max_cache_len=20) if kind is StaticCache else kind(config=model.config)


@torch.no_grad()
def greedy(model, prefill, decodings, ids, cache):
    """The logits of the prompt's last token and those that follow, the cache, and what each graph has refused."""
    output = prefill(input_ids=ids, past_key_values=cache)
    logits, refused = [output.logits[:, -1:]], []
    for _ in range(STEPS):
        inputs = {"input_ids": logits[-1].argmax(-1), "past_key_values": output.past_key_values}
        for decode in decodings:
            try:
                output = decode(**inputs)
                break
            except fxopt.GuardError as error:
                refused.append(str(error))
        else:
            raise AssertionError(refused)
        logits.append(output.logits)
    return torch.cat(logits, dim=1), output.past_key_values, refused


def decoding(model, kind, length):
    """The graph for one token after `length` others."""
    ids = torch.zeros(2, length, dtype=torch.long)
    with torch.no_grad():
        cache = model(input_ids=ids, past_key_values=cache_of(kind, model)).past_key_values
    free = {2: Dim.AUTO} if kind is DynamicCache else {}  # what is counted in the cache is free in both
    return fxopt.trace(
        model,
        (),
        {"input_ids": ids[:, :1], "past_key_values": cache},
        dynamic_shapes={"past_key_values": free},
    )


@pytest.mark.long
@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
@pytest.mark.parametrize("make", [llama, sliding_mistral, gemma3])
def test_greedy_decoding_with_a_cache_of_the_caller(make, kind):
    model = make()
    slides = make is not llama
    filling, full = decoding(model, kind, 2), decoding(model, kind, WINDOW + 2)
    for length in (2, WINDOW - 1, WINDOW + 3):
        ids = torch.randint(0, DECODER["vocab_size"], (2, length))
        prefill = fxopt.trace(model, (), {"input_ids": ids, "past_key_values": cache_of(kind, model)})
        expected, cache, _ = greedy(model, model, [model], ids, cache_of(kind, model))
        decodings = [filling, full] if slides else [filling]
        actual, mine, refused = greedy(model, prefill, decodings, ids, cache_of(kind, model))
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
        assert torch.equal(actual.argmax(-1), expected.argmax(-1))
        assert_same_cache(mine, cache)
        # A window that is full takes another graph than one that fills; neither serves for the other.
        assert len(refused) == sum(slides and length + step >= WINDOW for step in range(STEPS))
        assert all("cumulative_length" in message for message in refused)


def test_a_full_window_is_no_window_that_fills():
    model = gemma3()
    full = decoding(model, StaticCache, WINDOW + 2)
    ids = torch.zeros(2, 2, dtype=torch.long)
    cache = model(input_ids=ids, past_key_values=cache_of(StaticCache, model)).past_key_values
    with pytest.raises(fxopt.GuardError, match="cumulative_length_int' is 2"):
        full(input_ids=ids[:, :1], past_key_values=cache)


def test_caches_of_two_kinds_take_two_graphs():
    model = llama()
    graph = decoding(model, StaticCache, 3)
    ids = torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(
        fxopt.GuardError, match="'past_key_values' is DynamicCache; the graph takes StaticCache"
    ):
        graph(input_ids=ids[:, :1], past_key_values=model(input_ids=ids).past_key_values)
    longer = StaticCache(model.config, max_cache_len=30)
    with pytest.raises(fxopt.GuardError, match="max_cache_len|dimension 2 is 30"):
        graph(
            input_ids=ids[:, :1], past_key_values=model(input_ids=ids, past_key_values=longer).past_key_values
        )
