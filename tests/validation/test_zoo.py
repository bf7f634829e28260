"""The zoo file: what it may say, and one clear line for each mistake in it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

import fxopt.passes
from validation.commands.zoo_commands import HEADER
from validation.judging.steps import noted
from validation.records import Case, Check, Outcome, Record
from validation.running.run import Runner
from validation.zoo.entry import KnownFailure, judged
from validation.zoo.passes import ZooError, passes_of
from validation.zoo.sources import load_zoo, recorded_sites, sites_file

ROOT = Path(__file__).resolve().parents[2]
PASSES = ["FuseBiasInLinear", "MergeLinears"]
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
    return load_zoo(file, PASSES)


def test_an_entry_has_defaults(tmp_path: Path) -> None:
    (entry,) = load(tmp_path, GOOD)
    assert (entry.name, entry.weights.source, entry.dtypes, entry.tags) == (
        "tiny-bert",
        "random",
        ("float32",),
        ("small",),
    )
    assert entry.inputs["input_ids"].shape == (2, 8)


def test_sites_are_those_recorded_in_the_order_of_the_file(tmp_path: Path) -> None:
    assert load(tmp_path, GOOD)[0].sites == {"MergeLinears": None, "FuseBiasInLinear": None}
    recorded = {"tiny-bert": {"FuseBiasInLinear": 0, "Gone": 1}, "gone": {"MergeLinears": 1}}
    (tmp_path / "zoo.sites.yaml").write_text(yaml.safe_dump(recorded))
    assert [*load(tmp_path, GOOD)[0].sites.items()] == [("MergeLinears", None), ("FuseBiasInLinear", 0)]
    assert [*load(tmp_path, GOOD.partition("\n")[2])[0].sites] == ["FuseBiasInLinear", "MergeLinears"]


@pytest.mark.parametrize(
    "text", ["", "- 1", "tiny-bert: 3", "tiny-bert: {A: -1}", "a: {A: 1.5}", "a: [", "\x00"]
)
def test_a_mistake_among_the_recorded_sites_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "zoo.sites.yaml").write_text(text)
    with pytest.raises(ZooError, match=r"zoo\.sites\.yaml: not what `fxopt zoo sites` writes.*\)$") as raised:
        load(tmp_path, GOOD)
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("old", "new", "line", "parts"),
    [
        ("model: BertModel", "modell: BertModel", 4, ["tiny-bert", "modell", "there is no such key"]),
        ("model: BertModel", "model: BertModell", 4, ["tiny-bert", "model", "BertModell"]),
        ("model: BertModel", "model: nowhere.Bert", 4, ["tiny-bert", "model", "nowhere"]),
        ("{hidden_size: 32}", "{hiden_size: 32}", 5, ["tiny-bert", "config.hiden_size", "BertConfig"]),
        ("[2, 8]", "[2, -8]", 7, ["tiny-bert", "inputs.input_ids.shape", "greater than 0"]),
        ("[2, 8]", "two", 7, ["tiny-bert", "inputs.input_ids.shape", "give a list"]),
        ("{hidden_size: 32}", "[32]", 5, ["tiny-bert", "config", "give keys with values"]),
        ("[1, 99]", "[99, 1]", 7, ["tiny-bert", "inputs.input_ids", "empty"]),
        ("integers: [1, 99]", "padding: true, integers: [1, 9]", 7, ["inputs.input_ids", "not both"]),
        (
            "shape: [2, 8], integers: [1, 99]",
            "shape: [1, 8], padding: true",
            7,
            ["inputs.input_ids", "hides nothing"],
        ),
        ("input_ids:", "token_ids:", 7, ["tiny-bert", "inputs.token_ids", "input_ids"]),
        ("[MergeLinears]", "[FuseBiasInLinear, MergeLinear]", 1, ["order.1", "no such pass", "MergeLinears"]),
        ("tags: [small]", "sites: {MergeLinears: 2}", 8, ["tiny-bert", "sites", "fxopt zoo sites"]),
        ("name: tiny-bert", "name: Tiny Bert", 3, ["Tiny Bert", "name", "pattern"]),
        ("  - name: tiny-bert\n    model", "  - model", 3, ["name", "is missing"]),
        (
            "    config",
            "    weights: {source: random, sed: 1}\n    config",
            5,
            ["weights.sed", "no such key"],
        ),
        ("    config", "    weights: {source: hub}\n    config", 5, ["weights", "random"]),
        ("    config", "    weights: {source: pretrained, hub: a/b}\n    config", 5, ["weights", "revision"]),
        ("    config", "    dtypes: [float33]\n    config", 5, ["dtypes.0", "float32"]),
        ("    config", "    model: BertModel\n    config", 5, ["tiny-bert", "model", "given twice"]),
        (
            "    config",
            "    known_failures:\n      - {check: latency, pipeline: Nope, reason: x}\n    config",
            6,
            ["known_failures.0.pipeline", "Nope"],
        ),
        ("    config", "    requires: ''\n    config", 5, ["tiny-bert", "requires", "at least 1"]),
        ("models:", "modles:", 1, ["models", "is missing"]),
        (
            "order:",
            "pipelines: {MergeLinears: [MergeLinears]}\norder:",
            1,
            ["pipelines.MergeLinears", "this name"],
        ),
        ("order:", "pipelines: {a-b: [MergeLinears]}\norder:", 1, ["pipelines.a-b", "pattern"]),
        ("order:", "pipelines: {deploy: []}\norder:", 1, ["pipelines.deploy", "is empty"]),
        (
            "    config",
            "    pipelines: {deploy: [MergeLinears]}\n    config",
            5,
            ["pipelines", "beside `models`"],
        ),
        *(
            ("    tags: [small]", f"    dynamic_shapes: {shapes}\n    {other}", line, parts)
            for shapes, other, line, parts in [
                ("{ids: {0: batch}}", "", 8, ["dynamic_shapes.ids", "no such input", "input_ids"]),
                (
                    "{input_ids: {2: batch}}",
                    "",
                    8,
                    ["dynamic_shapes.input_ids.2", "no dimension 2", "[2, 8]"],
                ),
                ("{input_ids: {first: batch}}", "", 8, ["dynamic_shapes.input_ids", "integer"]),
                ("{input_ids: {0: n, 1: n}}", "", 8, ["dynamic_shapes.input_ids.1", "n is 8 here, and 2"]),
                ("{input_ids: {0: n}}", "dims: {n: {min: 3}}", 8, ["input_ids.0", "n is 2", "3.."]),
                ("{input_ids: {0: n}}", "dims: {m: {min: 1}}", 9, ["dims.m", "no such dimension"]),
                ("{input_ids: {0: n}}", "dims: {n: {least: 1}}", 9, ["dims.n.least", "no such key"]),
                ("{input_ids: {0: n}}", "sizes: dynamic", 9, ["sizes", "not both"]),
                ("{input_ids: {}}", "", 8, ["dynamic_shapes.input_ids", "is empty"]),
                ("{input_ids: {0: n}}", "dims: {n: {min: 2, max: 2}}", 9, ["dims.n", "2..2", "free"]),
            ]
        ),
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


def test_named_dimensions_stand_in_the_place_of_sizes(tmp_path: Path) -> None:
    text = "    dynamic_shapes: {input_ids: {0: batch, 1: length}}\n    dims: {length: {min: 2, max: 64}}\n"
    (entry,) = load(tmp_path, GOOD + text)
    assert entry.dynamic_shapes == {"input_ids": {0: "batch", 1: "length"}}
    assert (entry.dims["length"].min, entry.dims["length"].max) == (2, 64)


def test_two_names_for_one_size_hide_a_pass_that_confuses_them(tmp_path: Path) -> None:
    shapes = "    dynamic_shapes: {input_ids: {0: batch, 1: length}}\n"
    with pytest.raises(ZooError, match="input_ids.1: length and batch are both 8: give them different sizes"):
        load(tmp_path, GOOD.replace("[2, 8]", "[8, 8]") + shapes)


def test_two_entries_may_not_have_one_name(tmp_path: Path) -> None:
    with pytest.raises(ZooError, match=r"zoo\.yaml:9: tiny-bert: name: another entry"):
        load(tmp_path, GOOD + GOOD.partition("models:\n")[2])


def test_several_mistakes_are_several_lines(tmp_path: Path) -> None:
    text = GOOD.replace("[2, 8]", "[0]").replace("tags: [small]", "tags: small")
    with pytest.raises(ZooError) as raised:
        load(tmp_path, text)
    assert [re.search(r":(\d+):", line)[1] for line in str(raised.value).splitlines()] == ["7", "8"]


def test_what_is_not_yaml_says_where(tmp_path: Path) -> None:
    with pytest.raises(ZooError, match=r"zoo\.yaml:2: not valid YAML"):
        load(tmp_path, "models:\n  - {name: [}\n")


@pytest.mark.parametrize("text", ["", "models: []\n", "- 1\n", "models: 3\n"])
def test_a_file_without_models_is_a_mistake(tmp_path: Path, text: str) -> None:
    with pytest.raises(ZooError, match=r"zoo\.yaml:1:"):
        load(tmp_path, text)


def test_a_file_that_is_not_there_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ZooError, match=r"none\.yaml: no such file; name one"):
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


def test_each_pass_has_sites_in_two_models_of_every_day() -> None:
    passes = passes_of(ROOT / "model_zoo.yaml")
    zoo = [entry for entry in load_zoo(ROOT / "model_zoo.yaml", passes) if "day" in entry.tags]
    alone = {name: [entry.name for entry in zoo if entry.sites[name]] for name in passes}
    few = [name for name, models in alone.items() if len(models) < 2]
    assert few == ["FuseEpilogues"], "which needs packed layers"
    packed = Runner(zoo, passes).run(Case("bert-small", ("packed",), "cpu", Check.EQUIVALENCE))
    assert any(step.name == "FuseEpilogues" and step.sites for step in noted(packed.facts["steps"]))


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


@pytest.mark.parametrize(
    ("fields", "outcome", "stage", "expected"),
    [
        ({}, Outcome.FAIL, "compare", Outcome.EXPECTED),
        ({}, Outcome.ERROR, "compare", Outcome.EXPECTED),
        ({}, Outcome.TIMEOUT, "compare", Outcome.TIMEOUT),
        ({}, Outcome.CRASH, "compare", Outcome.CRASH),
        ({"outcome": "crash"}, Outcome.CRASH, "compare", Outcome.EXPECTED),
        ({"outcome": "crash"}, Outcome.FAIL, "compare", Outcome.FAIL),
        ({"stage": "compare"}, Outcome.FAIL, "compare", Outcome.EXPECTED),
        ({"stage": "capture"}, Outcome.FAIL, "compare", Outcome.FAIL),
        ({"message": "is 0.1 off"}, Outcome.FAIL, "compare", Outcome.EXPECTED),
        ({"message": "NaN"}, Outcome.FAIL, "compare", Outcome.FAIL),
        ({"expires": "2999-01-01"}, Outcome.FAIL, "compare", Outcome.EXPECTED),
        ({"expires": "2020-01-01"}, Outcome.FAIL, "compare", Outcome.FAIL),
        ({"expires": "2020-01-01"}, Outcome.PASS, "", Outcome.FAIL),
        ({"pipeline": "*B*"}, Outcome.FAIL, "compare", Outcome.EXPECTED),
        ({"pipeline": "B*"}, Outcome.FAIL, "compare", Outcome.FAIL),
        ({}, Outcome.SKIP, "load", Outcome.SKIP),
    ],
)
def test_a_known_failure_accepts_what_it_names_and_no_more(fields, outcome, stage, expected) -> None:
    failure = KnownFailure.model_validate(
        {"check": "equivalence", "pipeline": "A+B", "reason": "why", **fields}, strict=False
    )
    record = Record(Case("m", ("A", "B"), "cpu", Check.EQUIVALENCE), outcome, stage, "logits is 0.1 off")
    found = judged([failure], record)
    assert found.outcome is expected
    assert expected is not Outcome.EXPECTED or found.reason.startswith("why (")


def test_of_several_known_failures_one_that_accepts_is_enough() -> None:
    failures = [
        KnownFailure(check=Check.PARITY, message=message, reason=message) for message in ("NaN", "off")
    ]
    record = Record(Case("m", (), "cpu", Check.PARITY), Outcome.FAIL, "compare", "logits is 0.1 off")
    assert judged(failures, record).reason.startswith("off (")


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("a: &a [x, x]\nb: &b [*a, *a, *a]\n", 1, "names a list or a mapping"),
        ("models: &m\n  - *m\n", 1, "names a list or a mapping"),
        ("a: 1\nb: " + "[" * 100_000, 2, "nested deeper"),
        ("a: 1\nb: " + "{a: " * 50, 2, "nested deeper"),
    ],
)
def test_what_a_few_bytes_make_large_or_endless_is_a_mistake(tmp_path: Path, text, line, what) -> None:
    for name in ("zoo.yaml", "zoo.sites.yaml"):
        (tmp_path / "zoo.yaml").write_text(GOOD)
        (tmp_path / name).write_text(text)
        with pytest.raises(ZooError, match=rf"{re.escape(name)}:{line}: .*{what}"):
            load_zoo(tmp_path / "zoo.yaml", PASSES)


def test_a_single_value_may_be_repeated_by_name(tmp_path: Path) -> None:
    assert load(tmp_path, GOOD.replace("[2, 8]", "[&two 2, *two]"))[0].inputs["input_ids"].shape == (2, 2)


def test_in_the_zoo_of_the_repository_every_recorded_pass_has_a_model_where_it_rewrites_something() -> None:
    zoo = load_zoo(ROOT / "model_zoo.yaml", fxopt.passes.available())
    recorded = {name for entry in zoo for name, count in entry.sites.items() if count is not None}
    # The sites of the first are made by the passes that pack layers; branches of convolutions are in no small model of the
    # zoo, and grouped heads in none.
    recorded -= {"FuseEpilogues", "MergeConvs", "RemoveRepeatedHeads"}
    assert len(recorded) >= 7
    for entries in (zoo, [entry for entry in zoo if "smoke" in entry.tags]):
        assert recorded <= {name for entry in entries for name, count in entry.sites.items() if count}


def test_what_is_recorded_in_the_repository_is_what_the_command_writes() -> None:
    file = sites_file(ROOT / "model_zoo.yaml")
    recorded = recorded_sites(ROOT / "model_zoo.yaml")
    assert file.read_text() == f"{HEADER}{yaml.safe_dump(recorded)}"
    assert set(recorded) <= {
        entry.name for entry in load_zoo(ROOT / "model_zoo.yaml", fxopt.passes.available())
    }
