"""Tiny models for the benchmarks, which take seconds there."""

from __future__ import annotations

from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaModel,
    ResNetConfig,
    ResNetForImageClassification,
)

from validation.bench.workloads import Workload, decoding, of_images, of_text


def small_bert() -> Workload:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return of_text("", BertModel(BertConfig(**sizes)), 1, 16)


def small_resnet() -> Workload:
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    return of_images("", ResNetForImageClassification(config), 1, 32)


def small_llama() -> Workload:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(**sizes, intermediate_size=64, vocab_size=1000, use_cache=False)
    return decoding(of_text("", LlamaModel(config), 1, 17))


SMALL = {"bert": small_bert, "resnet": small_resnet, "llama-decode": small_llama}
