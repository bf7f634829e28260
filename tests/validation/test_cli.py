from __future__ import annotations

import dataclasses
import datetime

import pytest
from typer.testing import CliRunner

from validation import store
from validation.cli import app
from validation.records import Outcome, Record


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


@pytest.mark.parametrize(
    "arguments",
    [
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
