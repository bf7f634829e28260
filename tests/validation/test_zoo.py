"""The zoo file: what it may say, and one clear line for each mistake in it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import torch
import yaml

import fxopt.passes
from fxopt import history
from validation.commands.zoo_commands import HEADER
from validation.judging.subject import Subject
from validation.records import Case, Check, Outcome, Record
from validation.zoo.entry import KnownFailure, judged
from validation.zoo.sources import load_zoo, recorded_sites, sites_file
from validation.zoo.yaml_file import ZooError

ROOT = Path(__file__).resolve().parents[2]
OTHERS = [name for name in fxopt.passes.available() if name != "MergeLinears"]
GOOD = """\
order: [MergeLinears]
models:
  - name: tiny-bert
    model: BertModel
    config: {hidden_size: 32}
    inputs:
      input_ids: {shape: [2, 8], integers: [1, 99]}
    tags: [small]
"""


def load(tmp_path: Path, text: str) -> list:
    file = tmp_path / "zoo.yaml"
    file.write_text(text)
    return load_zoo(file)[0]


def test_an_entry_has_defaults(tmp_path: Path) -> None:
    (entry,) = load(tmp_path, GOOD)
    assert (entry.name, entry.weights.pretrained, entry.dtype, entry.tags) == (
        "tiny-bert",
        None,
        "float32",
        ("small",),
    )
    assert entry.inputs["input_ids"].shape == (2, 8)


def test_sites_are_those_recorded_in_the_order_of_the_file(tmp_path: Path) -> None:
    assert [*load(tmp_path, GOOD)[0].sites] == ["MergeLinears", *OTHERS]
    recorded = {"tiny-bert": {"FuseBiasInLinear": 0, "Gone": 1}, "gone": {"MergeLinears": 1}}
    (tmp_path / "zoo.sites.yaml").write_text(yaml.safe_dump(recorded))
    assert load(tmp_path, GOOD)[0].sites == dict.fromkeys(["MergeLinears", *OTHERS]) | {"FuseBiasInLinear": 0}
    assert [*load(tmp_path, GOOD.partition("\n")[2])[0].sites] == sorted(fxopt.passes.available())


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", r": give keys with values\. Delete this file: `fxopt zoo sites`"),
        ("- 1", ": give keys with values"),
        ("tiny-bert: 3", ": tiny-bert: give keys with values"),
        ("tiny-bert: {A: -1}", r": tiny-bert\.A: Input should be greater than or equal to 0"),
        ("a: {A: 1.5}", r": a\.A: Input should be a valid integer"),
        ("a: [", ":2: not valid YAML"),
        ("\x00", ": not valid YAML"),
    ],
)
def test_a_mistake_among_the_recorded_sites_is_one_line(tmp_path: Path, text: str, what: str) -> None:
    (tmp_path / "zoo.sites.yaml").write_text(text)
    with pytest.raises(ZooError, match=rf"zoo\.sites\.yaml{what}") as raised:
        load(tmp_path, GOOD)
    assert len(str(raised.value).splitlines()) == 1


MISTAKES = {
    # in the place of a part of `GOOD`: what the one line says
    ("model: BertModel", "modell: BertModel"): "tiny-bert: modell: there is no such key",
    ("model: BertModel", "model: BertModell"): "tiny-bert: model: transformers has no class",
    ("model: BertModel", "model: nowhere.Bert"): "tiny-bert: model: nowhere cannot be imported",
    ("{hidden_size: 32}", "{hiden_size: 32}"): "tiny-bert: config.hiden_size: BertConfig has no option",
    ("[2, 8]", "[2, -8]"): "tiny-bert: inputs.input_ids.shape.1: Input should be greater than 0",
    ("[2, 8]", "two"): "tiny-bert: inputs.input_ids.shape: give a list",
    ("{hidden_size: 32}", "[32]"): "tiny-bert: config: give keys with values",
    ("[1, 99]", "[99, 1]"): "tiny-bert: inputs.input_ids: .*leaves empty",
    ("integers: [1, 99]", "padding: true, integers: [1, 9]"): "inputs.input_ids: .*not both",
    ("shape: [2, 8], integers: [1, 99]", "shape: [1, 8], padding: true"): "inputs.input_ids: .*hides nothing",
    ("input_ids:", "token_ids:"): "tiny-bert: inputs.token_ids: the forward takes no such input; .*input_ids",
    ("[MergeLinears]", "[FuseBiasInLinear, MergeLinear]"): "order.1: no such pass: .*MergeLinears",
    ("tags: [small]", "sites: {MergeLinears: 2}"): "tiny-bert: sites: not written by hand",
    ("tags: [small]", "pipelines: {deploy: [MergeLinears]}"): "tiny-bert: pipelines: .*not for one model",
    ("name: tiny-bert", "name: Tiny Bert"): "Tiny Bert: name: .*pattern",
    ("  - name: tiny-bert\n    model", "  - model"): "entry 1: name: is missing",
    (
        "    config",
        "    weights: {sed: 1}\n    config",
    ): "weights.sed: there is no such key",
    ("    config", "    weights: {pretrained: a/b}\n    config"): "weights: .*revision",
    ("    config", "    dtype: float33\n    config"): "tiny-bert: dtype: .*float32",
    ("    config", "    model: BertModel\n    config"): "zoo.yaml:5: not valid YAML: model is given twice",
    ("    config", "    requires: ''\n    config"): "tiny-bert: requires: .*at least 1",
    ("models:", "modles:"): "models: is missing",
    ("order:", "pipelines: {MergeLinears: [MergeLinears]}\norder:"): "pipelines.MergeLinears: .*this name",
    ("order:", "pipelines: {a-b: [MergeLinears]}\norder:"): "pipelines.a-b.*pattern",
    ("order:", "pipelines: {deploy: []}\norder:"): "pipelines.deploy: is empty",
    ("tags: [small]", "dynamic_shapes: {ids: {0: batch}}"): "dynamic_shapes.ids.0: no input has",
    ("tags: [small]", "dynamic_shapes: {input_ids: {2: batch}}"): "dynamic_shapes.input_ids.2: no input has",
    ("tags: [small]", "dynamic_shapes: {input_ids: {first: n}}"): "dynamic_shapes.input_ids.first.*integer",
    ("tags: [small]", "dynamic_shapes: {input_ids: {0: n, 1: n}}"): "n is 8 here, and 2 elsewhere",
    ("tags: [small]", "dynamic_shapes: {input_ids: {0: n}}\n    sizes: dynamic"): "tiny-bert: .*not both",
    ("tags: [small]", "dynamic_shapes: {input_ids: {}}"): "dynamic_shapes.input_ids: is empty",
    (
        "[2, 8]",
        "[8, 8], integers: [1, 9]}\n    dynamic_shapes: {input_ids: {0: n, 1: m}",
    ): "give them different sizes",
}


@pytest.mark.parametrize(("change", "said"), [*MISTAKES.items()])
def test_a_mistake_is_one_line_with_entry_and_field(
    tmp_path: Path, change: tuple[str, str], said: str
) -> None:
    text = GOOD.replace(*change, 1)
    if "different sizes" in said:
        text = text.replace(", integers: [1, 99]}", "}")
    assert text != GOOD
    with pytest.raises(ZooError) as raised:
        load(tmp_path, text)
    lines = str(raised.value).splitlines()
    assert all(line.startswith(f"{tmp_path}/zoo.yaml:") for line in lines)
    assert any(re.search(said, line) for line in lines), raised.value


def test_named_dimensions_stand_in_the_place_of_sizes(tmp_path: Path) -> None:
    (entry,) = load(tmp_path, GOOD + "    dynamic_shapes: {input_ids: {0: batch, 1: length}}\n")
    assert entry.dynamic_shapes == {"input_ids": {0: "batch", 1: "length"}}


def test_two_entries_may_not_have_one_name(tmp_path: Path) -> None:
    with pytest.raises(ZooError, match=r"zoo\.yaml: tiny-bert: name: another entry"):
        load(tmp_path, GOOD + GOOD.partition("models:\n")[2])


def test_several_mistakes_are_several_lines(tmp_path: Path) -> None:
    text = GOOD.replace("[2, 8]", "[0]").replace("tags: [small]", "tags: small")
    with pytest.raises(ZooError) as raised:
        load(tmp_path, text)
    assert ["shape" in line for line in str(raised.value).splitlines()] == [True, False]


def test_what_is_not_yaml_says_where(tmp_path: Path) -> None:
    with pytest.raises(ZooError, match=r"zoo\.yaml:2: not valid YAML"):
        load(tmp_path, "models:\n  - {name: [}\n")


@pytest.mark.parametrize("text", ["", "models: []\n", "- 1\n", "models: 3\n"])
def test_a_file_without_models_is_a_mistake(tmp_path: Path, text: str) -> None:
    with pytest.raises(ZooError, match=r"zoo\.yaml: "):
        load(tmp_path, text)


def test_a_file_that_is_not_there_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ZooError, match=r"none\.yaml: no such file; name one"):
        load_zoo(tmp_path / "none.yaml")


def test_a_callable_takes_its_config_as_arguments(tmp_path: Path) -> None:
    text = "models: [{name: linear, model: torch.nn.Linear, sizes: fixed, config: {in_features: 2}, inputs: {input: {shape: [1, 2]}}}]"
    with pytest.raises(ZooError, match=r"config: .*out_features"):
        load(tmp_path, text)
    (entry,) = load(tmp_path, text.replace("in_features: 2", "in_features: 2, out_features: 3"))
    assert entry.config == {"in_features": 2, "out_features": 3}


def test_what_only_one_entry_needs_is_not_imported_to_read_the_file(tmp_path: Path) -> None:
    text = GOOD.replace("model: BertModel", "model: nowhere.Bert\n    requires: nowhere")
    assert load(tmp_path, text)[0].requires == "nowhere"


def test_each_pass_has_sites_in_two_models_of_every_day() -> None:
    entries, passes = load_zoo(ROOT / "model_zoo.yaml")
    zoo = [entry for entry in entries if "day" in entry.tags]
    alone = {name: [entry.name for entry in zoo if entry.sites[name]] for name in passes}
    few = [name for name, models in alone.items() if len(models) < 2]
    assert few == ["FuseEpilogues"], "which needs packed layers"
    (bert,) = (entry for entry in zoo if entry.name == "bert-small")
    packed = Subject(bert, "cpu", passes).rewritten(("packed",), torch.float32)
    assert any("FuseEpilogues" in str(step) for step in history(packed.module))


def test_the_zoo_extra_brings_what_the_zoo_of_the_repository_requires() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    zoo, _ = load_zoo(ROOT / "model_zoo.yaml")
    required = {entry.requires.replace("_", "-") for entry in zoo if entry.requires}
    assert required == set(extras["zoo"]) - {"fxopt[validation]"}
    assert {entry.name for entry in zoo if entry.requires} == {e.name for e in zoo if "extra" in e.tags}


@pytest.mark.parametrize(
    ("pipeline", "outcome", "expected"),
    [
        ("A+B", Outcome.FAIL, Outcome.EXPECTED),
        ("A+B", Outcome.ERROR, Outcome.EXPECTED),
        ("A+B", Outcome.TIMEOUT, Outcome.TIMEOUT),
        ("A+B", Outcome.CRASH, Outcome.CRASH),
        ("A+B", Outcome.PASS, Outcome.FAIL),
        ("A+B", Outcome.SKIP, Outcome.SKIP),
        ("*B*", Outcome.FAIL, Outcome.EXPECTED),
        ("B*", Outcome.FAIL, Outcome.FAIL),
    ],
)
def test_a_known_failure_accepts_what_it_names_and_no_more(pipeline, outcome, expected) -> None:
    failure = KnownFailure(check=Check.EQUIVALENCE, pipeline=pipeline, reason="why")
    found = judged(
        [failure], Record(Case("m", ("A", "B"), "cpu", Check.EQUIVALENCE), outcome, "compare", "off")
    )
    assert found.outcome is expected
    assert expected is not Outcome.EXPECTED or found.reason.startswith("why (")


def test_what_is_recorded_in_the_repository_is_what_the_command_writes() -> None:
    file = sites_file(ROOT / "model_zoo.yaml")
    recorded = recorded_sites(ROOT / "model_zoo.yaml")
    assert file.read_text() == f"{HEADER}{yaml.safe_dump(recorded)}"
    assert set(recorded) <= {entry.name for entry in load_zoo(ROOT / "model_zoo.yaml")[0]}
