"""The work that engines are compared on: a model with inputs at the sizes at which it is used."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
import typer
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaModel,
    ResNetConfig,
    ResNetForImageClassification,
)

from .models import bert_base, groupvit, resnet50, text_inputs, wide_llama
from .nested import fresh


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model in eval mode with inputs by name; a run works on `fresh(inputs)`, because it may add to a cache."""

    model: nn.Module
    inputs: dict[str, Any]

    def flops(self) -> int:
        """Floating-point operations of the matrix products and convolutions of one run, two for each multiply-add."""
        # As matrix products, because the counter does not know the attention kernel of the CPU.
        counter = FlopCounterMode(display=False)
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
            self.model(**fresh(self.inputs))
        return counter.get_total_flops()


def build(name: str, small: bool = False) -> Workload:
    """The workload of this name, the same in every process; small ones are for trying the benchmark out."""
    torch.manual_seed(0)
    return (SMALL if small else WORKLOADS)[name]()


def chosen(names: str, small: bool = False) -> Iterator[tuple[str, Workload]]:
    """The workloads of these names, separated by commas, each built when its turn comes."""
    known = SMALL if small else WORKLOADS
    for name in names.split(","):
        if name not in known:
            raise typer.BadParameter(f"there is no model {name!r}: it is one of {', '.join(known)}")
        yield name, build(name, small)


def _text(model: nn.Module, batch: int, sequence: int) -> Workload:
    return Workload(model, text_inputs(batch, sequence))


def _images(model: nn.Module, batch: int, size: int) -> Workload:
    return Workload(model, {"pixel_values": torch.randn(batch, 3, size, size)})


def _groupvit() -> Workload:
    return Workload(groupvit().model, text_inputs(1, 77) | {"pixel_values": torch.randn(1, 3, 224, 224)})


def _decoding(model: nn.Module, past: int) -> Workload:
    """One step of decoding after so many tokens, of which the last has been decoded: prefill leaves strided keys in a cache."""
    ids = text_inputs(1, past + 1)["input_ids"]
    with torch.no_grad():
        cache = model(ids[:, :-2], use_cache=True).past_key_values
        cache = model(ids[:, -2:-1], past_key_values=cache, use_cache=True).past_key_values
    return Workload(model, {"input_ids": ids[:, -1:], "past_key_values": cache, "use_cache": True})


def _small_bert() -> nn.Module:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model: nn.Module = BertModel(BertConfig(**sizes)).eval()
    return model


def _small_resnet() -> nn.Module:
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    model: nn.Module = ResNetForImageClassification(config).eval()
    return model


def _small_llama() -> nn.Module:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    model: nn.Module = LlamaModel(
        LlamaConfig(**sizes, intermediate_size=64, vocab_size=1000, use_cache=False)
    ).eval()
    return model


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "bert-1x128": lambda: _text(bert_base().model, 1, 128),
    "bert-8x128": lambda: _text(bert_base().model, 8, 128),
    "resnet50-1": lambda: _images(resnet50().model, 1, 224),
    "resnet50-8": lambda: _images(resnet50().model, 8, 224),
    "groupvit": _groupvit,
    "llama-prefill": lambda: _text(wide_llama().model, 1, 128),
    "llama-decode": lambda: _decoding(wide_llama().model, 128),
}

SMALL: dict[str, Callable[[], Workload]] = {
    "bert": lambda: _text(_small_bert(), 1, 16),
    "resnet": lambda: _images(_small_resnet(), 1, 32),
    "llama-decode": lambda: _decoding(_small_llama(), 16),
}
