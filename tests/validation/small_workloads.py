"""Tiny models for the benchmarks, which take seconds there."""

from __future__ import annotations

import torch
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    ResNetConfig,
    ResNetForImageClassification,
)

from validation.bench.models import Workload, decoding


def small_bert() -> Workload:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return Workload(BertModel(BertConfig(**sizes)).eval(), _text(16))


def small_resnet() -> Workload:
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    inputs = {"pixel_values": torch.randn(1, 3, 32, 32)}
    return Workload(ResNetForImageClassification(config).eval(), inputs)


def small_llama() -> Workload:
    return decoding(Workload(LlamaModel(_llama(use_cache=False)).eval(), _text(17)))


def small_generation() -> Workload:
    inputs = _text(8) | {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    return Workload(LlamaForCausalLM(_llama()).eval(), inputs)


def _llama(**options: bool) -> LlamaConfig:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaConfig(**sizes, intermediate_size=64, vocab_size=1000, **options)


def _text(length: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 1000, (1, length))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


SMALL = {
    "bert": small_bert,
    "resnet": small_resnet,
    "llama-decode": small_llama,
    "llama-generate": small_generation,
}
