"""Every architecture of transformers as a small model: built from its own config class with random weights, and its inputs."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING, MODEL_MAPPING_NAMES

from fxopt.testing import randomise

from .configs import small_config
from .inputs import make_inputs

BATCH, SEQUENCE = 2, 16


def model_types() -> list[str]:
    """Every model type that `transformers.AutoModel` supports, sorted."""
    return sorted(MODEL_MAPPING_NAMES)


def config(model_type: str) -> PreTrainedConfig:
    """The config of a small model of `model_type`, the same each time."""
    defaults: PreTrainedConfig = CONFIG_MAPPING[model_type]()
    return small_config(defaults, _overrides().get(model_type, {}).get("config", {}))


def build(model_type: str) -> nn.Module:
    """A small model of `model_type` in float32 on the CPU, in evaluation mode, with random weights.

    Raises the error of transformers if the type cannot be built, such as `ImportError` for a missing package.

    Example:
        >>> type(build("bert")).__name__
        'BertModel'
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = _model_class(model_type)._from_config(config(model_type), dtype=torch.float32)
    return randomise(model, 0).eval()


def example_inputs(model: nn.Module, batch: int = BATCH, sequence: int = SEQUENCE) -> dict[str, Tensor]:
    """Inputs of a model from `build`, by the parameter names of its forward; floating ones in float32.

    `sequence` is the number of text tokens, or of steps of audio or time, if the architecture allows any. Raises
    `LookupError` if no rule makes an input that the forward requires.
    """
    model_type = getattr(model.config, "model_type", "")
    return make_inputs(model, batch, sequence, _overrides().get(model_type, {}).get("inputs", {}))


def _model_class(model_type: str) -> Any:
    """The class that `AutoModel` uses for a type; the first if there are several."""
    found = MODEL_MAPPING[CONFIG_MAPPING[model_type]]
    return found[0] if isinstance(found, tuple) else found


@functools.cache
def _overrides() -> Mapping[str, Any]:
    """Values that rules cannot derive, by model type."""
    text = Path(__file__).with_name("overrides.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text) or {}
