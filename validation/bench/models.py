"""The models of the benchmarks, with random weights: at their published sizes where nothing else is said."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.export import Dim
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


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model with example inputs by name, and the dimensions of each that are free in a dynamic capture."""

    name: str
    model: torch.nn.Module
    inputs: dict[str, Any]
    free: dict[str, dict[int, Any]]

    def captured(self, capture: Callable[..., Any], free: bool, **options: Any) -> Callable[[], Any]:
        """A capture of the model that can be run, with free or fixed sizes."""
        shapes = self.free if free else None
        return functools.partial(capture, self.model, (), self.inputs, dynamic_shapes=shapes, **options)


def bert_base() -> Subject:
    """BERT-base."""
    inputs = text_inputs()
    return Subject("BERT-base", BertModel(BertConfig()).eval(), inputs, free(inputs, 0, 1))


def resnet50() -> Subject:
    """ResNet-50."""
    inputs = image_inputs()
    return Subject("ResNet-50", ResNetForImageClassification(ResNetConfig()).eval(), inputs, free(inputs, 0))


def groupvit() -> Subject:
    """GroupViT, text and images."""
    text, image = text_inputs(), image_inputs()
    free_sizes = free(text, 0, 1) | free(image, 0)
    return Subject("GroupViT", GroupViTModel(GroupViTConfig()).eval(), text | image, free_sizes)


def llama(layers: int = 24, hidden_size: int = 256) -> Subject:
    """A Llama of so many layers, by default narrow: a capture computes nothing, so that width costs it nothing."""
    config = LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 43 // 16,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        use_cache=False,
    )
    inputs = text_inputs()
    return Subject(
        f"Llama, {layers} layers, hidden size {hidden_size}",
        LlamaModel(config).eval(),
        inputs,
        free(inputs, 0, 1),
    )


def wide_llama() -> Subject:
    """A Llama of 24 layers as wide as small ones are in use, 1.3 GB: for what is measured against the weights."""
    return llama(hidden_size=1024)


def text_inputs(batch: int = 3, sequence: int = 7) -> dict[str, Any]:
    ids = torch.randint(0, 1000, (batch, sequence))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def image_inputs() -> dict[str, Any]:
    return {"pixel_values": torch.randn(3, 3, 224, 224)}


def free(inputs: dict[str, Any], *dimensions: int) -> dict[str, dict[int, Any]]:
    """These dimensions of every input, left free."""
    return {name: dict.fromkeys(dimensions, Dim.AUTO) for name in inputs}


# The models that every capture is measured on.
SUBJECTS = (bert_base, resnet50, groupvit, llama)

# And those of which a capture's memory is measured.
WEIGHED = (*SUBJECTS, wide_llama)
