"""The models of the benchmarks with inputs, with random weights: at their published sizes where nothing else is said."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
import typer
from torch import nn
from torch.export import Dim
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    BertConfig,
    BertModel,
    GroupViTConfig,
    GroupViTModel,
    LlamaConfig,
    LlamaModel,
    ResNetConfig,
    ResNetForImageClassification,
)

from .engines import fresh


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model in eval mode with inputs by name; a run works on `fresh(inputs)`, because it may add to a cache.

    `free` are the dimensions of each input that are free in a dynamic capture, by its name.
    """

    model: nn.Module
    inputs: dict[str, Any]
    name: str = ""
    free: dict[str, dict[int, Any]] = dataclasses.field(default_factory=dict)

    def captured(self, capture: Callable[..., Any], free: bool, **options: Any) -> Callable[[], Any]:
        """A capture of the model that can be run, with free or fixed sizes."""
        shapes = self.free if free else None
        return functools.partial(capture, self.model, (), self.inputs, dynamic_shapes=shapes, **options)

    def flops(self) -> int:
        """Floating-point operations of the matrix products and convolutions of one run, two for each multiply-add."""
        # As matrix products, because the counter does not know the attention kernel of the CPU.
        counter = FlopCounterMode(display=False)
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
            self.model(**fresh(self.inputs))
        return counter.get_total_flops()


def build(name: str) -> Workload:
    """The workload of this name, the same in every process."""
    torch.manual_seed(0)
    return WORKLOADS[name]()


def chosen(names: str) -> Iterator[tuple[str, Workload]]:
    """The workloads of these names, separated by commas, each built when its turn comes."""
    for name in named(names, WORKLOADS):
        yield name, build(name)


def named(text: str, known: Collection[str], what: str = "model", exact: bool = True) -> list[str]:
    """The known names that a list with commas gives, by their beginnings unless `exact`; all where it is empty."""
    found: dict[str, None] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        fitting = [name for name in known if name == part or (not exact and name.startswith(part))]
        if not fitting:
            raise typer.BadParameter(f"there is no {what} {part!r}: it is one of {', '.join(known)}")
        found |= dict.fromkeys(fitting)
    return list(found or known)


def bert_base(batch: int = 3, sequence: int = 7) -> Workload:
    """BERT-base."""
    return of_text("BERT-base", BertModel(BertConfig()), batch, sequence)


def resnet50(batch: int = 3) -> Workload:
    """ResNet-50."""
    return of_images("ResNet-50", ResNetForImageClassification(ResNetConfig()), batch, 224)


def groupvit(batch: int = 3, sequence: int = 7) -> Workload:
    """GroupViT, text and images."""
    model = GroupViTModel(GroupViTConfig())
    text, image = of_text("GroupViT", model, batch, sequence), of_images("", model, batch, 224)
    return dataclasses.replace(text, inputs=text.inputs | image.inputs, free=text.free | image.free)


def llama(layers: int = 24, hidden_size: int = 256, batch: int = 3, sequence: int = 7) -> Workload:
    """A Llama of so many layers, by default narrow: a capture computes nothing, so that width costs it nothing."""
    config = LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 43 // 16,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        use_cache=False,
    )
    name = f"Llama, {layers} layers, hidden size {hidden_size}"
    return of_text(name, LlamaModel(config), batch, sequence)


wide_llama = functools.partial(llama, hidden_size=1024)
"""A Llama of 24 layers as wide as small ones are in use, 1.3 GB: for what is measured against the weights."""

SUBJECTS: tuple[Callable[[], Workload], ...] = (bert_base, resnet50, groupvit, llama)
"""The models of which captures are timed."""


def of_text(name: str, model: nn.Module, batch: int, sequence: int) -> Workload:
    ids = torch.randint(0, 1000, (batch, sequence))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return Workload(model.eval(), inputs, name, {key: {0: Dim.AUTO, 1: Dim.AUTO} for key in inputs})


def of_images(name: str, model: nn.Module, batch: int, size: int) -> Workload:
    images = torch.randn(batch, 3, size, size)
    return Workload(model.eval(), {"pixel_values": images}, name, {"pixel_values": {0: Dim.AUTO}})


def decoding(text: Workload) -> Workload:
    """The step of decoding of the last token; the one before has been decoded, because prefill leaves strided keys in the cache."""
    model, ids = text.model, text.inputs["input_ids"]
    with torch.no_grad():
        cache = model(ids[:, :-2], use_cache=True).past_key_values
        cache = model(ids[:, -2:-1], past_key_values=cache, use_cache=True).past_key_values
    return Workload(model, {"input_ids": ids[:, -1:], "past_key_values": cache, "use_cache": True})


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "bert-1x128": functools.partial(bert_base, 1, 128),
    "bert-8x128": functools.partial(bert_base, 8, 128),
    "resnet50-1": functools.partial(resnet50, 1),
    "resnet50-8": functools.partial(resnet50, 8),
    "groupvit": functools.partial(groupvit, 1, 77),
    "llama-prefill": functools.partial(wide_llama, batch=1, sequence=128),
    "llama-decode": lambda: decoding(wide_llama(batch=1, sequence=129)),
}
