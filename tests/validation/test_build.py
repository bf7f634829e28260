"""Models, inputs and data are the same every time, and what the zoo says they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from tests.validation.planted import (
    entry,
)
from validation.zoo import build, digits
from validation.zoo.entry import Entry


def test_models_and_inputs_are_the_same_every_time() -> None:
    first, second = (build.build_model(entry()) for _ in range(2))
    assert all(
        torch.equal(a, b)
        for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    )
    assert torch.equal(build.make_inputs(entry())["x"], build.make_inputs(entry())["x"])


def test_pretrained_weights_come_from_a_folder_as_they_are(tmp_path: Path) -> None:
    config = transformers.BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    saved = transformers.BertModel(config)
    saved.save_pretrained(tmp_path)
    parameters = sum(tensor.numel() for tensor in (*saved.parameters(), *saved.buffers()))
    weights = {"source": "pretrained", "folder": str(tmp_path)}
    fields = {
        "name": "bert",
        "model": "BertModel",
        "weights": weights,
        "inputs": {"input_ids": {"shape": [1, 2]}},
    }
    assert build.memory_of(Entry.model_validate(fields)) == pytest.approx(
        build.BASE + build.FACTOR * 4 * parameters
    )
    loaded = build.build_model(Entry.model_validate(fields))
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in saved.state_dict().items())
    assert not loaded.training


def test_the_memory_of_a_model_is_reckoned_without_making_its_weights() -> None:
    fields = {"name": "bert", "model": "BertModel", "inputs": {"input_ids": {"shape": [1, 2]}}}
    huge = {
        "hidden_size": 2**14,
        "num_hidden_layers": 40,
        "num_attention_heads": 64,
        "intermediate_size": 2**16,
    }  # 0.5 TB
    weights = (build.memory_of(Entry.model_validate(fields | {"config": huge})) - build.BASE) / build.FACTOR
    assert weights == pytest.approx(40 * 12 * 2**28 * 4, rel=0.01)
    assert build.memory_of(Entry.model_validate(fields | {"memory": 2.5})) == 2.5e9


def test_a_model_whose_memory_cannot_be_reckoned_is_named() -> None:
    with pytest.warns(UserWarning, match=r"^net: the memory .* cannot be reckoned \(.*: say `memory`"):
        assert (
            build.memory_of(entry().model_copy(update={"model": f"{__name__}.reads_its_weights"}))
            == build.BASE
        )


def reads_its_weights() -> nn.Module:
    """A model that looks at its own weights when it is made."""
    made = nn.Linear(2, 2)
    assert made.weight.sum().item() != 0
    return made


def test_statistics_scales_and_biases_are_random() -> None:
    norm = build.build_model(entry()).norm
    for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
        assert len(tensor.unique()) == 6


def test_a_short_padding_mask_hides_something_too() -> None:
    for length in (2, 3, 4, 5):
        made = build.make_inputs(entry(inputs={"x": {"shape": [2, length], "padding": True}}))
        assert made["x"].tolist() == [[1] * length, [1] * (length - 1) + [0]]


def test_a_padding_mask_has_ragged_rows() -> None:
    fields = {"inputs": {"x": {"shape": [4, 8], "padding": True}}}
    assert build.make_inputs(entry(**fields))["x"].sum(1).tolist() == [8, 6, 4, 2]


@pytest.mark.long
def test_a_model_learns_the_digits() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    assert digits.accuracy(model, torch.float32, "cpu", 250) < 0.3
    digits.train(model, seed=0)
    assert digits.accuracy(model, torch.float32, "cpu", 250) > 0.93
    assert not model.training
