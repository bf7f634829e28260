"""The README: CI runs its commands, and its figures are those of committed runs. Its examples run in test_docs.py."""

import re
import runpy
from pathlib import Path

import numpy
import pandas
import pytest
import torch
import yaml
from transformers import BertConfig, BertModel

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BASELINE = ROOT / "reports" / "baseline"


def test_ci_runs_every_command():
    scripts = [ROOT / ".ci/run", *(ROOT / ".github/workflows").glob("*.yml")]
    lines = [line for script in scripts for line in script.read_text().splitlines()]
    run = {re.sub(r"^ *(- )?(run: )?| *( #.*)?$", "", line) for line in lines}
    known = runpy.run_path(str(ROOT / ".ci/readme.py"))
    assert {*known["RUN_BY_CI"], ".venv/bin/python .ci/readme.py"} <= run
    assert {*known["RUN_BY_CI"]} < {*known["commands"]()}


def test_it_is_read_in_a_few_minutes():
    assert len(README.splitlines()) <= 90
    assert len(README.split()) <= 650


def test_the_figures_of_the_validation_are_those_of_the_baseline():
    outcomes = pandas.read_parquet(BASELINE / "records.parquet")["outcome"].value_counts()
    assert f"{outcomes.sum():,} cases: {outcomes['pass']:,} pass, {outcomes['no-op']} no-op" in README
    assert f"{outcomes.get('fail', 0)} fail" in README
    assert set(outcomes.index) <= {"pass", "no-op"}


def test_the_baseline_has_every_pass_and_every_model():
    table = pandas.read_parquet(BASELINE / "records.parquet")
    zoo = yaml.safe_load((ROOT / "model_zoo.yaml").read_text())["models"]
    sites = yaml.safe_load((ROOT / "model_zoo.sites.yaml").read_text())
    assert {*map(str, next(iter(sites.values())))} <= {*table["pipeline"]}
    assert {each["name"] for each in zoo if "extra" not in each.get("tags", ())} <= {*table["model"]}


def test_the_figures_of_the_capture_are_those_of_the_sweep():
    sweep = (BASELINE / "architectures.md").read_text()
    ours, all_of_them = re.search(r"right with default arguments \| .*\((\d+) of (\d+)\)", sweep).groups()
    exported = re.search(r"torch.export: captured and right \| .*\((\d+) of", sweep)[1]
    assert f"| {ours} of {all_of_them} architectures |" in README
    assert f"| {exported} of {all_of_them} architectures |" in README
    assert f"{ours} of {all_of_them} architectures by default" in README


def test_the_figures_of_optimize_are_those_of_the_benchmark():
    table = pandas.read_parquet(BASELINE / "zoo.parquet")
    table = table[(table["precision"] == "float32") & (table["threads"] == 2)]
    table = table[table["machine"].str.startswith("AMD")]
    models = ["groupvit", "bert-base", "resnet-50", "llama-24x1024", "llama-24x1024-next-token"]
    speeds = table.pivot(index="model", columns="engine", values="speedup").loc[models]
    ours = speeds["fxopt"]
    assert f"{ours.min():.2f} to {ours.max():.2f} times as fast as eager" in README
    assert (speeds["OpenVINO"] > ours).all()


def test_the_means_of_the_benchmark_are_those_of_the_models_that_all_were_tried_on():
    table = pandas.read_parquet(BASELINE / "zoo.parquet")
    table = table[(table["precision"] == "float32") & (table["threads"] == 2) & (table["reason"] == "")]
    speeds = table[table["machine"].str.startswith("Intel")].pivot(
        index="model", columns="engine", values="speedup"
    )
    speeds = speeds[["fxopt", "fxopt auto", "OpenVINO"]].dropna()
    ours, auto, openvino = numpy.exp(numpy.log(speeds).mean())
    assert (
        f"| {len(speeds)} models on two threads of a Xeon, geometric mean | {ours:.2f} times as fast as eager, {auto:.2f} with "
        f'`engine="auto"`, OpenVINO {openvino:.2f} |'
    ) in README
    assert (speeds["OpenVINO"] > speeds["fxopt"]).mean() > 0.5


def test_other_tools_do_with_bert_what_the_table_says():
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    model = BertModel(BertConfig(**sizes)).eval()
    with pytest.raises(TypeError):
        torch.fx.symbolic_trace(model)
    ids = torch.tensor([[11, 12, 13]])
    exported = torch.export.export(model, (), {"input_ids": ids}, strict=False)
    nodes = exported.module().graph.nodes
    assert torch.ops.aten.linear.default in {node.target for node in nodes}
    assert not any(node.op == "call_module" and "query" in str(node.target) for node in nodes)
    layers = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 2))).graph
    assert [node.target for node in layers.nodes if node.op == "call_module"] == ["0"]


def test_nobody_is_told_to_install_a_name_that_we_do_not_own():
    """A package of the name `fxopt` on an index would be somebody else's."""
    kinds = ("**/*.md", "**/*.py", "**/*.toml", ".ci/*", ".github/**/*.yml", "Makefile")
    skipped = {".venv", "_build", "reports", "tests"}
    named = re.compile(r"pip install (?:-\S+ )*[\"'`]*fxopt(?!\S* @ )|dependencies = \[[^]]*fxopt")
    files = {file for kind in kinds for file in ROOT.glob(kind) if file.is_file()}
    files = {file for file in files if not skipped & {*file.relative_to(ROOT).parts}}
    texts = {file: file.read_text() for file in files if ".venv" not in str(file.relative_to(ROOT))}
    assert len(texts) > 300
    assert [f"{file}: {found[0]}" for file, text in texts.items() for found in named.finditer(text)] == []
