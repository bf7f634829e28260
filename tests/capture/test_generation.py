"""Greedy decoding with captured graphs: one serves the prompt, one each further token, and the tokens are eager's."""

import pytest
import torch
from transformers import (
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

STEPS = 32
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
    config = T5Config(vocab_size=90, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
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
