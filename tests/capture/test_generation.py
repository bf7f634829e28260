"""Greedy decoding with captured graphs: one serves the prompt, one each further token, and the tokens are eager's."""

import copy
import pickle
import re

import pytest
import torch
from torch.export import Dim
from transformers import (
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import fxopt
from fxopt.testing import randomise

STEPS = 12
DECODER = {
    "vocab_size": 90,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def llama(**options):
    return prepared(LlamaForCausalLM(LlamaConfig(**DECODER | options)))


def qwen3():
    return prepared(Qwen3ForCausalLM(Qwen3Config(**DECODER, head_dim=8)))


def mistral(window=None):
    return prepared(MistralForCausalLM(MistralConfig(**DECODER, sliding_window=window)))


def gpt2():
    return prepared(
        GPT2LMHeadModel(GPT2Config(vocab_size=90, n_embd=32, n_layer=2, n_head=4, n_positions=64))
    )


def t5():
    config = T5Config(
        vocab_size=90, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return prepared(T5ForConditionalGeneration(config))


def prepared(model):
    torch.manual_seed(0)
    randomise(model, seed=0)
    return model.double().eval()


def prompt(batch, length):
    torch.manual_seed(1)
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, :2] = 0  # padded on the left
    return torch.randint(0, 90, (batch, length)), mask


@torch.no_grad()
def greedy(prefill, decode, ids, mask, steps=STEPS):
    """The logits of the prompt's last token and of those that follow, and the cache."""
    output = prefill(input_ids=ids, attention_mask=mask)
    cache, logits = output.past_key_values, [output.logits[:, -1:]]
    for _ in range(steps):
        token = logits[-1].argmax(-1)
        mask = torch.cat([mask, torch.ones_like(token)], dim=1)
        output = decode(input_ids=token, attention_mask=mask, past_key_values=cache)
        assert output.past_key_values is cache
        logits.append(output.logits)
    return torch.cat(logits, dim=1), cache


def assert_same_cache(actual, expected):
    assert type(actual) is type(expected)
    for layer, other in zip(actual.layers, expected.layers, strict=True):
        assert type(layer) is type(other)
        assert vars(layer).keys() == vars(other).keys()
        for name, value in vars(other).items():
            mine = vars(layer)[name]
            assert torch.equal(mine, value) if torch.is_tensor(value) else mine == value, name


@pytest.mark.long
@pytest.mark.parametrize("make", [llama, qwen3, gpt2, mistral])
def test_greedy_decoding(make):
    model = make()
    prefill = fxopt.symbolic_trace(model, ["input_ids", "attention_mask"])
    decode = fxopt.symbolic_trace(model, ["input_ids", "attention_mask", "past_key_values"])
    for batch, length in [(2, 6), (1, 11)]:
        expected, cache = greedy(model, model, *prompt(batch, length))
        actual, mine = greedy(prefill, decode, *prompt(batch, length))
        assert torch.equal(actual, expected)
        assert_same_cache(mine, cache)


@pytest.fixture(scope="module")
def decoder():
    """A Llama with its two graphs."""
    model = llama()
    prefill = fxopt.symbolic_trace(model, ["input_ids", "attention_mask"])
    return model, prefill, fxopt.symbolic_trace(model, ["input_ids", "attention_mask", "past_key_values"])


@pytest.mark.long
def test_a_sliding_window_that_fills_has_two_graphs():
    model = mistral(window=16)
    prefill = fxopt.symbolic_trace(model, ["input_ids", "attention_mask"])
    filling = fxopt.symbolic_trace(model, ["input_ids", "attention_mask", "past_key_values"])
    ids, mask = prompt(2, 20)
    inputs = {"input_ids": ids[:, :1], "attention_mask": torch.ones(2, 21, dtype=torch.long)}
    cache = model(ids, attention_mask=mask).past_key_values
    free = {"input_ids": {0: Dim.AUTO}, "attention_mask": {0: Dim.AUTO, 1: Dim.AUTO}}
    full = fxopt.trace(
        model,
        (),
        inputs | {"past_key_values": cache},
        dynamic_shapes=free | {"past_key_values": {0: Dim.AUTO}},
    )
    refused = []

    def decode(**inputs):
        try:
            return filling(**inputs)
        except fxopt.GuardError as error:
            refused.append(str(error))
            return full(**inputs)

    for batch, length in [(2, 6), (1, 20), (3, 15)]:
        expected, cache = greedy(model, model, *prompt(batch, length))
        actual, mine = greedy(prefill, decode, *prompt(batch, length))
        assert torch.equal(actual, expected)
        assert_same_cache(mine, cache)
    assert len(refused) == (6 + STEPS - 16) + STEPS + (15 + STEPS - 16)
    assert "cumulative_length' is 16; it must be 15" in refused[0]


@pytest.mark.long
def test_an_encoder_and_a_decoder():
    model = t5()
    names = ["encoder_outputs", "attention_mask", "decoder_input_ids"]
    encoder = fxopt.symbolic_trace(model.get_encoder(), ["input_ids", "attention_mask"])
    prefill = fxopt.symbolic_trace(model, names)
    decode = fxopt.symbolic_trace(model, [*names, "past_key_values"])
    ids, mask = prompt(2, 6)
    logits, caches = [], []
    for encode, start, step in [(model.get_encoder(), model, model), (encoder, prefill, decode)]:
        with torch.no_grad():
            given = {"encoder_outputs": encode(input_ids=ids, attention_mask=mask), "attention_mask": mask}
            outputs = [start(**given, decoder_input_ids=torch.zeros(2, 1, dtype=torch.long))]
            for _ in range(STEPS):
                token = outputs[-1].logits.argmax(-1)
                cache = outputs[-1].past_key_values
                outputs.append(step(**given, decoder_input_ids=token, past_key_values=cache))
        logits.append(torch.cat([output.logits for output in outputs], dim=1))
        caches.append(outputs[-1].past_key_values)
    assert torch.equal(*logits)
    eager, mine = caches
    assert type(mine) is type(eager)
    assert mine.is_updated == eager.is_updated
    assert_same_cache(mine.self_attention_cache, eager.self_attention_cache)
    assert_same_cache(mine.cross_attention_cache, eager.cross_attention_cache)


@pytest.mark.long
def test_a_cache_in_another_state_is_refused(decoder):
    model, _, decode = decoder
    ids, _ = prompt(2, 6)

    def refusal(cache):
        with pytest.raises(fxopt.GuardError) as caught:
            decode(ids[:, :1], torch.ones(2, 7, dtype=torch.long), past_key_values=cache)
        return str(caught.value)

    assert "'past_key_values' is NoneType; the graph takes DynamicCache" in refusal(None)
    empty = DynamicCache(config=model.config)
    assert re.search(r"'past_key_values\.layers\[0\]' has no (dtype, )?device", refusal(empty))
    other = llama(num_hidden_layers=1)
    assert "'past_key_values.layers' has 1 entries; the graph was captured with 2" in refusal(
        other(ids).past_key_values
    )
    assert "keys.shape[2] = 5 are outside" in refusal(model(ids[:, :5]).past_key_values)
    filled = model(ids).past_key_values
    filled.layers[1] = filled.layers[0]
    assert "are the same DynamicLayer" in refusal(filled)
    assert "dimension 0 is 1" in refusal(model(ids[:1]).past_key_values)


def test_a_failing_check_leaves_the_cache_as_it_was(decoder):
    model, _, decode = decoder
    ids, _ = prompt(2, 6)
    cache = model(ids).past_key_values
    keys = cache.layers[0].keys
    with pytest.raises(fxopt.GuardError):
        decode(ids[:, :1], torch.ones(2, 9, dtype=torch.long), past_key_values=cache)
    assert cache.layers[0].keys is keys


def test_graphs_with_caches_are_copied_pickled_and_interpreted(decoder):
    model, prefill, decode = decoder
    inputs = prompt(2, 6)
    expected, _ = greedy(model, model, *inputs, steps=3)
    for again in (copy.deepcopy, lambda gm: pickle.loads(pickle.dumps(gm)), interpreted):
        mine = again(prefill), again(decode)
        actual, cache = greedy(*mine, *inputs, steps=3)
        assert torch.equal(actual, expected)
        assert type(cache.layers) is list


def interpreted(gm):
    class Runs(torch.fx.Interpreter):
        def __call__(self, **inputs):
            names = [node.target for node in gm.graph.nodes if node.op == "placeholder"]
            return self.run(*(inputs[name] for name in names))

    return Runs(gm)


def test_passes_on_both_graphs_keep_the_logits(decoder):
    model, prefill, decode = decoder
    inputs = prompt(2, 6)
    expected, _ = greedy(model, model, *inputs, steps=5)
    merge = fxopt.MergeLinears()
    mine = [merge(copy.deepcopy(gm)) for gm in (prefill, decode)]
    for gm in mine:
        merged = [
            node for node in gm.graph.nodes if node.op == "call_module" and "merged" in str(node.target)
        ]
        assert len(merged) == 4
    actual, _ = greedy(*mine, *inputs, steps=5)
    torch.testing.assert_close(actual, expected)
    restored = [merge(gm, reverse=True) for gm in mine]
    assert [gm.code for gm in restored] == [prefill.code, decode.code]
    assert torch.equal(greedy(*restored, *inputs, steps=5)[0], expected)
