"""Small models of three libraries with random weights, and what users call of them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from fxopt.outputs import mapped
from validation.bench.models import entries
from validation.zoo import architectures

TRANSFORMERS = """
    AlbertModel BertModel DebertaV2Model DistilBertModel ElectraModel ModernBertModel RobertaModel XLNetModel
    BloomForCausalLM GemmaForCausalLM GPT2LMHeadModel LlamaForCausalLM MambaForCausalLM MistralForCausalLM
    MixtralForCausalLM OPTForCausalLM Qwen2ForCausalLM Qwen3ForCausalLM
    BartForConditionalGeneration T5ForConditionalGeneration WhisperForConditionalGeneration
    ConvNextModel DetrForObjectDetection ResNetForImageClassification SegformerModel SwinModel ViTModel
    HubertModel Wav2Vec2Model
    BlipForConditionalGeneration CLIPModel GroupViTModel LxmertModel SiglipModel"""
LIBRARIES = entries(Path(__file__).with_name("libraries.yaml"))
NAMES = [f"transformers.{kind}" for kind in TRANSFORMERS.split()]
NAMES += [f"{entry.library}.{name}" for name, entry in LIBRARIES.items()]
"""The models: classes of transformers, and those of `libraries.yaml`."""

Call = Callable[[Any], Any]
"""Something that a user does with a model, and gets a result of."""

_GENERATE = {"max_new_tokens": 5, "do_sample": False, "use_cache": True}


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model, calls of it, of which the first is made in every state, and calls of other methods."""

    model: Any
    calls: list[Call]
    generations: list[Call] = dataclasses.field(default_factory=list)
    methods: list[Call] = dataclasses.field(default_factory=list)


def subject(name: str) -> Subject:
    """The model of this name, the same in every process."""
    library, _, kind = name.partition(".")
    torch.manual_seed(0)
    return _of_transformers(getattr(transformers, kind)) if library == "transformers" else _of_library(kind)


def _of_transformers(cls: Any) -> Subject:
    model = cls._from_config(architectures.config(cls.config_class.model_type), dtype=torch.float32).eval()
    first, other = (architectures.example_inputs(model, *sizes) for sizes in ((2, 16), (3, 24)))
    generations, methods = [], []
    if hasattr(model, "generate") and model.can_generate():
        model.generation_config.pad_token_id = 0  # what configs of their own leave out
        model.generation_config.decoder_start_token_id = 0
        given = {key: value for key, value in first.items() if not key.startswith("decoder_")}
        left = {"attention_mask": given["attention_mask"].flip(1)} if "attention_mask" in given else {}
        generations = [_call("generate", given | _GENERATE | more) for more in ({}, left, {"num_beams": 2})]
    if hasattr(model, "get_text_features") and not generations:
        for method in ("get_text_features", "get_image_features"):
            taken = inspect.signature(getattr(model, method)).parameters
            methods.append(_call(method, {key: value for key, value in first.items() if key in taken}))
    return Subject(model, _forwards(model, first, other), generations, methods)


def _of_library(name: str) -> Subject:
    entry = LIBRARIES[name]
    model: Any = entry.make()
    methods = []
    if hasattr(model, "encode"):
        latent = torch.randn(2, model.config.latent_channels, 8, 8)
        methods = [
            _call("encode", {"x": torch.randn(2, 3, 16, 16)}, "x"),
            _call("decode", {"z": latent}, "z"),
        ]
    first, other = (entry.inputs(model, batch) for batch in (2, 3))
    return Subject(model, _forwards(model, first, other), [], methods)


def _forwards(model: nn.Module, first: dict[str, Any], other: dict[str, Any]) -> list[Call]:
    """Calls by keyword, with other sizes, with images of another size, and by position."""
    calls = [_call("__call__", inputs) for inputs in (first, other, mapped(first, _larger))]
    name = next(iter(inspect.signature(model.forward).parameters))
    return [*calls, _call("__call__", first, name)] if name in first else calls


def _larger(tensor: Tensor) -> Tensor:
    if tensor.dim() != 4 or not tensor.is_floating_point():
        return tensor.clone()
    return nn.functional.interpolate(tensor, scale_factor=1.5)


def _call(method: str, inputs: dict[str, Any], *positional: str) -> Call:
    """A call with a copy of these inputs, the floating ones in the dtype of the model."""

    def call(model: Any) -> Any:
        dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        given = mapped(inputs, lambda t: t.to(dtype if t.is_floating_point() else t.dtype, copy=True))
        by_position = [given.pop(name) for name in positional]
        return getattr(model, method)(*by_position, **given)

    return call
