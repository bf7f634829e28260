"""The zoo of every architecture: small configs and inputs by rules."""

from __future__ import annotations

import pytest
import torch

from validation.zoo import architectures
from validation.zoo.build import free_sizes
from validation.zoo.sources import Architecture

DIVERSE = [
    "bert",
    "bart",
    "llama",
    "mixtral",
    "gemma2",
    "mamba",
    "vit",
    "resnet",
    "convnext",
    "hubert",
    "whisper",
    "llava",
    "decision_transformer",
    "layoutlm",
]


def test_every_type_of_the_registry_is_listed() -> None:
    types = architectures.model_types()

    assert types == sorted(set(types))
    assert {"bert", "llama", "vit", "whisper"} <= set(types)


@pytest.mark.parametrize("part", range(2))
def test_every_type_has_a_small_config(part: int) -> None:
    """A twentieth of the registry, whatever it holds; each config keeps its class and few layers."""
    for model_type in architectures.model_types()[10 * part :: 20]:
        small = architectures.config(model_type)

        assert small.model_type == model_type or model_type in type(small).__name__.lower(), model_type
        layers = getattr(small, "num_hidden_layers", None)
        assert layers is None or layers <= 8, model_type


def test_one_layer_of_every_kind_is_kept() -> None:
    small = architectures.config("gemma3_text")

    assert set(small.layer_types) == {"sliding_attention", "full_attention"}
    assert len(small.layer_types) == small.num_hidden_layers


def test_overrides_win_over_rules() -> None:
    rope = architectures.config("ernie4_5_vl_moe").text_config.rope_parameters

    assert rope["mrope_section"] == [3, 3, 2]  # the rule for the sections of a head says [4, 2, 2]


@pytest.mark.parametrize("model_type", DIVERSE)
def test_small_models_run_at_two_sizes_and_stay_finite(model_type: str) -> None:
    model = architectures.build(model_type)

    assert sum(parameter.numel() for parameter in model.parameters()) < 3_000_000
    for sizes in ({}, {"batch": 3, "sequence": 11}):
        with torch.no_grad():
            output = model(**architectures.example_inputs(model, **sizes))
        assert all(
            value.isfinite().all()
            for value in output.values()
            if isinstance(value, torch.Tensor) and value.is_floating_point()
        )


def entry(model_type: str) -> Architecture:
    return Architecture(name=model_type, model=model_type, source=architectures.__name__)


def test_free_dimensions_are_those_that_change_with_the_sizes() -> None:
    model = architectures.build("bert")
    inputs = architectures.example_inputs(model)
    free = free_sizes(entry("bert"), model)

    assert inputs["input_ids"].shape == (architectures.BATCH, architectures.SEQUENCE)
    assert {name: [*dimensions] for name, dimensions in (free or {}).items()} == {
        "input_ids": [0, 1],
        "attention_mask": [0, 1],
    }
