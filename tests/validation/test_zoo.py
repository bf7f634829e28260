"""The zoo file: what it may say, and one clear line for each mistake in it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import fxopt.passes
from validation.records import Case, Check
from validation.zoo import KnownFailure, ZooError, load_zoo

ROOT = Path(__file__).resolve().parents[2]
PASSES = ["FuseBiasInLinear", "MergeLinears"]
GOOD = """\
models:
  - name: tiny-bert
    model: BertModel
    config: {hidden_size: 32}
    inputs:
      input_ids: {shape: [2, 8], integers: [1, 99]}
    sites:
      MergeLinears: {count: 2, reason: one a layer}
"""


def load(tmp_path: Path, text: str) -> list:
    file = tmp_path / "zoo.yaml"
    file.write_text(text)
    return load_zoo(file, PASSES)


def test_an_entry_has_defaults(tmp_path: Path) -> None:
    (entry,) = load(tmp_path, GOOD)
    assert (entry.name, entry.weights.source, entry.dtypes, entry.tags) == (
        "tiny-bert",
        "random",
        ("float32",),
        (),
    )
    assert entry.inputs["input_ids"].shape == (2, 8)
    assert entry.sites["MergeLinears"].count == 2


def test_the_order_of_sites_is_that_of_the_file(tmp_path: Path) -> None:
    text = GOOD + "      FuseBiasInLinear: {count: 1, reason: one}\n"
    assert list(load(tmp_path, text)[0].sites) == ["MergeLinears", "FuseBiasInLinear"]


@pytest.mark.parametrize(
    ("old", "new", "line", "parts"),
    [
        ("model: BertModel", "modell: BertModel", 3, ["tiny-bert", "modell", "not permitted"]),
        ("model: BertModel", "model: BertModell", 3, ["tiny-bert", "model", "BertModell"]),
        ("model: BertModel", "model: nowhere.Bert", 3, ["tiny-bert", "model", "nowhere"]),
        ("{hidden_size: 32}", "{hiden_size: 32}", 4, ["tiny-bert", "config.hiden_size", "BertConfig"]),
        ("[2, 8]", "[2, -8]", 6, ["tiny-bert", "inputs.input_ids.shape", "greater than 0"]),
        ("[2, 8]", "two", 6, ["tiny-bert", "inputs.input_ids.shape"]),
        ("[1, 99]", "[99, 1]", 6, ["tiny-bert", "inputs.input_ids", "empty"]),
        ("integers: [1, 99]", "padding: true, integers: [1, 9]", 6, ["inputs.input_ids", "not both"]),
        ("input_ids:", "token_ids:", 6, ["tiny-bert", "inputs.token_ids", "input_ids"]),
        ("MergeLinears:", "MergeLinear:", 8, ["tiny-bert", "sites.MergeLinear", "MergeLinears"]),
        ("count: 2", "count: -2", 8, ["tiny-bert", "sites.MergeLinears.count", "-2"]),
        (", reason: one a layer", "", 8, ["tiny-bert", "sites.MergeLinears.reason", "required"]),
        ("name: tiny-bert", "name: Tiny Bert", 2, ["Tiny Bert", "name", "pattern"]),
        ("  - name: tiny-bert\n    model", "  - model", 2, ["name", "required"]),
        (
            "    config",
            "    weights: {source: random, sed: 1}\n    config",
            4,
            ["weights.sed", "not permitted"],
        ),
        ("    config", "    weights: {source: hub}\n    config", 4, ["weights", "random"]),
        ("    config", "    weights: {source: pretrained, hub: a/b}\n    config", 4, ["weights", "revision"]),
        ("    config", "    dtypes: [float33]\n    config", 4, ["dtypes.0", "float32"]),
        ("    config", "    model: BertModel\n    config", 4, ["tiny-bert", "model", "given twice"]),
        (
            "    config",
            "    known_failures:\n      - {check: latency, pipeline: Nope, reason: x}\n    config",
            5,
            ["known_failures.0.pipeline", "Nope"],
        ),
        ("    config", "    requires: ''\n    config", 4, ["tiny-bert", "requires", "at least 1"]),
        ("models:", "modles:", 1, ["models", "required"]),
    ],
)
def test_a_mistake_is_one_line_with_entry_field_and_place(
    tmp_path: Path, old: str, new: str, line: int, parts: list[str]
) -> None:
    assert old in GOOD
    with pytest.raises(ZooError) as raised:
        load(tmp_path, GOOD.replace(old, new, 1))
    lines = [text for text in str(raised.value).splitlines() if f"zoo.yaml:{line}:" in text]
    assert any(all(part in text for part in parts) for text in lines), raised.value
    assert "Traceback" not in str(raised.value)


def test_two_entries_may_not_have_one_name(tmp_path: Path) -> None:
    with pytest.raises(ZooError, match=r"zoo\.yaml:9: tiny-bert: name: another entry"):
        load(tmp_path, GOOD + GOOD.partition("\n")[2])


def test_several_mistakes_are_several_lines(tmp_path: Path) -> None:
    text = GOOD.replace("[2, 8]", "[0]").replace("count: 2", "count: -1")
    with pytest.raises(ZooError) as raised:
        load(tmp_path, text)
    assert [re.search(r":(\d+):", line)[1] for line in str(raised.value).splitlines()] == ["6", "8"]


def test_what_is_not_yaml_says_where(tmp_path: Path) -> None:
    with pytest.raises(ZooError, match=r"zoo\.yaml:2: not valid YAML"):
        load(tmp_path, "models:\n  - {name: [}\n")


@pytest.mark.parametrize("text", ["", "models: []\n", "- 1\n", "models: 3\n"])
def test_a_file_without_models_is_a_mistake(tmp_path: Path, text: str) -> None:
    with pytest.raises(ZooError, match=r"zoo\.yaml:1:"):
        load(tmp_path, text)


def test_a_file_that_is_not_there_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ZooError, match="cannot be read"):
        load_zoo(tmp_path / "none.yaml", PASSES)


def test_a_callable_takes_its_config_as_arguments(tmp_path: Path) -> None:
    text = "models: [{name: linear, model: torch.nn.Linear, sizes: fixed, config: {in_features: 2}, inputs: {input: {shape: [1, 2]}}}]"
    with pytest.raises(ZooError, match=r"config: .*out_features"):
        load(tmp_path, text)
    (entry,) = load(tmp_path, text.replace("in_features: 2", "in_features: 2, out_features: 3"))
    assert entry.config == {"in_features": 2, "out_features": 3}


def test_what_only_one_entry_needs_is_not_imported_to_read_the_file(tmp_path: Path) -> None:
    text = GOOD.replace("model: BertModel", "model: nowhere.Bert\n    requires: nowhere")
    assert load(tmp_path, text)[0].requires == "nowhere"


def test_the_zoo_extra_brings_what_the_zoo_of_the_repository_requires() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    zoo = load_zoo(ROOT / "model_zoo.yaml", fxopt.passes.available())
    required = {entry.requires.replace("_", "-") for entry in zoo if entry.requires}
    assert required == set(extras["zoo"]) - {"fxopt[validation]"}
    assert {entry.name for entry in zoo if entry.requires} == {e.name for e in zoo if "extra" in e.tags}


def test_a_known_failure_covers_its_check_pipeline_and_device() -> None:
    failure = KnownFailure(check=Check.EQUIVALENCE, pipeline="A+B", device="cpu", reason="why")
    assert failure.covers(Case("m", ("A", "B"), "cpu", Check.EQUIVALENCE))
    assert not failure.covers(Case("m", ("B", "A"), "cpu", Check.EQUIVALENCE))
    assert not failure.covers(Case("m", ("A", "B"), "cuda", Check.EQUIVALENCE))
    assert not failure.covers(Case("m", ("A", "B"), "cpu", Check.EFFECT))


def test_in_the_zoo_of_the_repository_every_pass_has_a_model_where_it_rewrites_something() -> None:
    passes = fxopt.passes.available()
    zoo = load_zoo(ROOT / "model_zoo.yaml", passes)
    rewritten = {name for entry in zoo for name, sites in entry.sites.items() if sites.count}
    assert rewritten == set(passes)
    small = {name for e in zoo if "smoke" in e.tags for name, sites in e.sites.items() if sites.count}
    assert small == set(passes)
