"""Small transformers models with random weights, and inputs for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from fxopt.testing import randomise

Made = tuple[torch.nn.Module, dict[str, torch.Tensor]]


def bert(**options: Any) -> Made:
    """A classifier of one layer; sequences of at most 24 tokens."""
    config = BertConfig(
        **{
            "vocab_size": 50,
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 24,
            "max_position_embeddings": 24,
        }
        | options
    )
    return randomise(BertForSequenceClassification(config)), {"input_ids": ids(7), "attention_mask": mask(7)}


def resnet() -> Made:
    """Two stages of a basic block each, with BatchNorm and a shortcut."""
    config = ResNetConfig(
        embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic", num_labels=3
    )
    model = randomise(ResNetForImageClassification(config))
    return model, {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 32 * 32).reshape(2, 3, 32, 32).sin()}


def gpt2() -> Made:
    """A decoder whose head is tied to its embedding, with dropout."""
    config = GPT2Config(
        vocab_size=50,
        n_embd=16,
        n_layer=1,
        n_head=2,
        n_positions=24,
        use_cache=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    return randomise(GPT2LMHeadModel(config)), {"input_ids": ids(7), "attention_mask": mask(7)}


def llama() -> Made:
    """A decoder with rotary embeddings (in a no_grad block) and grouped heads."""
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=24,
        max_position_embeddings=24,
        use_cache=False,
    )
    return randomise(LlamaForCausalLM(config)), {"input_ids": ids(7), "attention_mask": mask(7)}


def t5() -> Made:
    """An encoder and a decoder that share their embedding."""
    config = T5Config(
        vocab_size=50,
        d_model=16,
        d_kv=8,
        num_layers=1,
        num_heads=2,
        d_ff=24,
        use_cache=False,
        decoder_start_token_id=0,
    )
    model = randomise(T5ForConditionalGeneration(config))
    return model, {"input_ids": ids(7), "decoder_input_ids": ids(5)}


MODELS: dict[str, Callable[[], Made]] = {
    "bert": bert,
    "resnet": resnet,
    "gpt2": gpt2,
    "llama": llama,
    "t5": t5,
}


def ids(length: int, batch: int = 2) -> torch.Tensor:
    """Token ids, (batch, length)."""
    return torch.arange(batch * length).reshape(batch, length) * 7 % 47 + 3


def mask(length: int, batch: int = 2) -> torch.Tensor:
    """An attention mask, (batch, length); the first sequence is padded."""
    made = torch.ones(batch, length, dtype=torch.long)
    made[0, length // 2 + 1 :] = 0
    return made
