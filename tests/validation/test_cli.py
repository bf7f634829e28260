from __future__ import annotations

import dataclasses
import datetime
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import fxopt.passes
from validation import store
from validation.cli import app
from validation.records import Outcome, Record
from validation.run import Runner
from validation.zoo import recorded_sites, sites_file


@pytest.fixture
def call():
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def runs(make_records, run, tmp_path):
    """Two nights: in the second one, one case fails. Their tables alone, without views."""
    records = make_records(0)
    failed = Record(records[0].case, Outcome.FAIL, "compare", "logits [bold]differ[/bold]")
    later = dataclasses.replace(run, started=run.started + datetime.timedelta(days=1))
    nights = [tmp_path / "first", tmp_path / "second"]
    for night, made, found in zip(nights, (run, later), (records, [failed, *records[1:]]), strict=True):
        table = store.table_of(found, made)
        store.append_history(table, night / "history")
        (night / "latest").mkdir()
        store.write_table(table, night / "latest")
    return [night / "latest" for night in nights]


def test_report_writes_the_views_beside_the_table(runs, call):
    result = call("report", runs[1] / "records.parquet")
    assert result.exit_code == 0, result.output
    for name in ("report.html", "summary.md", "compatibility/bert-base.md"):
        assert "bert-base" in (runs[1] / name).read_text()
        assert str(runs[1] / name) in result.output
    assert "FAIL bert-base-eager-cpu-parity" in result.output


def test_report_writes_where_it_is_told(runs, call, tmp_path):
    assert call("report", runs[0], "--output", tmp_path / "there").exit_code == 0
    assert (tmp_path / "there/summary.md").is_file()


def test_views_of_a_run_in_the_history_have_a_directory_of_their_own(runs, run, call, tmp_path):
    history = tmp_path / "first/history"
    assert call("report", history / f"{run.id}.parquet").exit_code == 0
    assert (history / run.id / "report.html").is_file()
    assert len(store.history(history)["run"].unique()) == 1


def test_compare_says_what_got_worse_and_fails(runs, call):
    result = call("compare", *runs)
    assert result.exit_code == 1
    assert "logits [bold]differ[/bold] in stage compare" in result.output
    assert "1 regressions, 0 other changes" in result.output


def test_compare_of_a_run_with_itself_is_fine(runs, call):
    result = call("compare", runs[0], runs[0])
    assert (result.exit_code, result.output) == (0, "0 regressions, 0 other changes\n")


def test_what_got_better_is_no_failure(runs, call):
    assert call("compare", *reversed(runs)).exit_code == 0


def test_a_green_run_becomes_the_baseline(runs, call, tmp_path):
    baseline = tmp_path / "baseline"
    for _ in range(2):  # the second time it takes the place of the first
        result = call("baseline", runs[0], "--directory", baseline)
        assert result.exit_code == 0, result.output
    assert [file.name for file in baseline.iterdir()] == ["records.parquet"]
    assert call("compare", baseline, runs[0]).exit_code == 0
    assert call("compare", baseline, runs[1]).exit_code == 1


def test_a_run_with_failures_is_no_baseline(runs, call, tmp_path):
    result = call("baseline", runs[1], "--directory", tmp_path / "baseline")
    assert result.exit_code == 2
    assert "1 cases failed" in result.stderr
    assert not (tmp_path / "baseline").exists()


def test_history_lists_runs(runs, run, call):
    result = call("history", runs[0].parent / "history")
    assert result.exit_code == 0
    assert run.id in result.output


def test_history_follows_a_case(runs, run, call):
    case = "bert-base-MergeLinears-cpu-latency"
    result = call("history", runs[0].parent / "history", "--case", case, "--measurement", "latency_ratio")
    assert result.exit_code == 0, result.output
    assert run.id in result.output


ZOO = """\
models:
  - {name: first, model: torch.nn.Linear, sizes: fixed, config: {in_features: 2, out_features: 3}, inputs: {input: {shape: [1, 2]}}}
  - {name: second, model: torch.nn.GELU, sizes: fixed, inputs: {input: {shape: [1, 2]}}}
  - {name: third, model: nowhere.Model, requires: nowhere, sizes: fixed, inputs: {input: {shape: [1, 2]}}}
"""


@pytest.fixture
def zoo(tmp_path):
    file = tmp_path / "my_zoo.yaml"
    file.write_text(ZOO)
    return file


def test_sites_counts_and_records_beside_the_zoo_file(zoo, call):
    recorded = {
        "third": {"MergeLinears": 4},
        "gone": {"MergeLinears": 1},
        "first": {"Gone": 1, "MergeLinears": 9},
    }
    sites_file(zoo).write_text(yaml.safe_dump(recorded))
    result = call("sites", "--zoo", zoo)
    assert result.exit_code == 0, result.output
    assert "third: skip: nowhere cannot be imported" in result.output
    found = recorded_sites(zoo)
    assert found["third"] == {"MergeLinears": 4}  # it stays: here it cannot be counted
    assert [*found] == ["first", "second", "third"]
    assert [*found["first"]] == [*found["second"]] == [*fxopt.passes.available()]
    assert (found["first"]["ReplaceActivation"], found["second"]["ReplaceActivation"]) == (0, 1)
    assert "second:\n  ChangePrecision: " in sites_file(zoo).read_text()


def test_sites_of_one_model_leave_the_others_as_they_are(zoo, call):
    sites_file(zoo).write_text(yaml.safe_dump({"first": {"MergeLinears": 9}}))
    assert call("sites", "--zoo", zoo, "--model", "second").exit_code == 0
    assert recorded_sites(zoo)["first"] == {"MergeLinears": 9}
    assert len(recorded_sites(zoo)["second"]) == len(fxopt.passes.available())
    result = call("sites", "--zoo", zoo, "--model", "thrid")
    assert result.exit_code == 2
    assert result.stderr == f"error: {zoo}: no model 'thrid'; there are first, second, third\n"


def test_sites_of_a_model_that_fails_stay_and_the_command_fails(zoo, call):
    zoo.write_text(ZOO.replace("input: {shape: [1, 2]}", "input: {shape: [1, 3]}", 1))
    sites_file(zoo).write_text(yaml.safe_dump({"first": {"MergeLinears": 9}}))
    result = call("sites", "--zoo", zoo)
    assert result.exit_code == 2
    assert "first: error: " in result.output
    assert result.stderr.startswith("error: not counted: ChangePrecision in first, ")
    assert "second: counted" in result.output
    assert recorded_sites(zoo)["first"] == {"MergeLinears": 9}


@pytest.mark.parametrize("place", [(Runner, "run"), (Path, "replace")])
def test_sites_that_are_interrupted_leave_the_file_as_it_was(zoo, call, place, monkeypatch):
    sites_file(zoo).write_text(before := yaml.safe_dump({"first": {"MergeLinears": 9}}))

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(*place, interrupt)
    assert call("sites", "--zoo", zoo).exit_code != 0
    assert sites_file(zoo).read_text() == before


@pytest.mark.parametrize(
    "arguments",
    [
        ("sites", "--zoo", "nowhere.yaml"),
        ("report", "nowhere.parquet"),
        ("report", "broken.parquet"),
        ("compare", "broken.parquet", "nowhere.parquet"),
        ("history", "nowhere"),
        ("history", "."),
    ],
)
def test_mistakes_are_one_line(arguments, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 nothing PAR1")
    result = call(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""


def test_unknown_names_are_one_line(runs, call):
    result = call("history", runs[0].parent / "history", "--case", "no-such-case")
    assert result.exit_code == 2
    assert result.stderr == "error: no run in this history has a case 'no-such-case'\n"
