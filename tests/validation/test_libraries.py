"""The models of other libraries: `models.yaml` says of each how it is made, and what its forward takes."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from validation.zoo import libraries


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(libraries, "_models", libraries._models.__wrapped__)


@pytest.mark.usefixtures("installed")
def test_each_model_has_its_own_inputs_in_each_size() -> None:
    models = libraries._models()
    assert len(models) == 249
    for model in models.values():
        few, more = model.inputs(2), model.inputs(3)
        assert few if isinstance(few, dict) else all(isinstance(each, torch.Tensor) for each in few)
        pairs = zip(*(each.values() if isinstance(each, dict) else each for each in (few, more)), strict=True)
        assert any(one.shape != other.shape for one, other in pairs), model.path


@pytest.mark.usefixtures("installed")
def test_what_all_models_of_a_group_have_each_may_change() -> None:
    models = libraries._models()
    assert models["timm.levit_128s"].path == "timm.create_model"
    assert models["timm.levit_128s"].args == ["levit_128s"]
    assert models["timm.levit_128s"].options == {"num_classes": 5, "img_size": 64}
    assert models["neuralop.FNO1d"].path == "neuralop.models.FNO"
    assert models["neuralop.FNO1d"].options["n_modes"] == [4]


def test_parts_of_a_model_are_made_and_lists_are_tuples() -> None:
    options = {"sizes": [[1, 2], 3], "eye": {"make": "torch.eye", "args": [2]}, "f": {"import": "torch.relu"}}
    made = libraries.LibraryModel("builtins.dict", "", [], options).make()
    assert made["sizes"] == ((1, 2), 3)
    assert made["eye"].equal(torch.eye(2))
    assert made["f"] is torch.relu
