"""Models, inputs and data are the same every time, and what the zoo says they are."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from tests.validation.planted import (
    entry,
)
from validation.zoo import build
from validation.zoo.entry import Entry


def test_pretrained_weights_come_from_a_folder_as_they_are(tmp_path: Path) -> None:
    config = transformers.BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    saved = transformers.BertModel(config)
    saved.save_pretrained(tmp_path)
    weights = {"pretrained": str(tmp_path)}
    fields = {
        "name": "bert",
        "model": "BertModel",
        "weights": weights,
        "inputs": {"input_ids": {"shape": [1, 2]}},
    }
    loaded = build.build_model(Entry.model_validate(fields))
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in saved.state_dict().items())
    assert not loaded.training


def test_statistics_scales_and_biases_are_random() -> None:
    norm = build.build_model(entry()).norm
    for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
        assert len(tensor.unique()) == 6


def test_a_short_padding_mask_hides_something_too() -> None:
    for length in (2, 3, 4, 5):
        made = build.make_inputs(entry(inputs={"x": {"shape": [2, length], "padding": True}}))
        assert made["x"].tolist() == [[1] * length, [1] * (length - 1) + [0]]
