from __future__ import annotations

import dataclasses
import datetime
import re

import pyarrow as pa
import pytest
import yaml
from typer.testing import CliRunner

import fxopt.passes
from validation import store
from validation.commands.cli import app
from validation.records import Check, Outcome, Record
from validation.regressions.compare import compare
from validation.zoo.sources import recorded_sites, sites_file


@pytest.fixture
def call():
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def runs(make_records, run, tmp_path, later):
    """Two nights: in the second one, one case fails. Their tables alone, without views."""
    records = make_records(0)
    failed = Record(records[0].case, Outcome.FAIL, "compare", "logits [bold]differ[/bold]")
    nights = [tmp_path / "first", tmp_path / "second"]
    for night, made, found in zip(nights, (run, later), (records, [failed, *records[1:]]), strict=True):
        table = store.table_of(found, made)
        store.append_history(table, night / "history")
        store.write_table(table, night / "latest")
    return [night / "latest" for night in nights]


def test_report_writes_the_views_beside_the_table(runs, call):
    result = call("report", runs[1] / "records.parquet")
    assert result.exit_code == 0, result.output
    for name in ("report.html", "summary.md", "compatibility/bert-base.md"):
        assert name == "report.html" or "bert-base" in (runs[1] / name).read_text()  # its rows are compressed
        assert (runs[1] / name).stat().st_size > 500
    assert "The graph fails in bert-base" in result.output
    assert str(runs[1] / "summary.md") in result.output


def test_report_writes_where_it_is_told(runs, call, tmp_path):
    assert call("report", runs[0], "--output", tmp_path / "there").exit_code == 0
    assert (tmp_path / "there/summary.md").is_file()


def test_report_compares_with_the_nights_of_the_run_wherever_it_writes(runs, later, call, tmp_path):
    table = store.read_table(runs[1])
    for place in ("latest", "history"):
        store.write_table(table, runs[0].parent / place, later.id if place == "history" else "records")
    folder = runs[0].parent
    for night in ("latest", "latest/records.parquet", f"history/{later.id}.parquet"):
        for to in ([], ["--output", tmp_path / "there/again"]):
            assert "1 cause of regressions since" in call("report", folder / night, *to).output


def test_compare_says_what_got_worse_and_fails(runs, call):
    result = call("compare", *runs)
    assert result.exit_code == 1
    text = "\n1. The graph fails in bert-base: logits [bold]differ[/bold] (1 case"
    change = "\nworse  outcome  bert-base-eager-cpu-parity  pass → fail  logits [bold]differ[/bold]\n"
    assert 0 < result.output.index(text) < result.output.index(change)
    assert result.output.endswith("\n1 regression, 0 other changes\n")


def test_compare_of_a_run_with_itself_or_a_worse_one_is_fine(runs, call):
    result = call("compare", runs[0], runs[0])
    text = "Nothing got worse since the run of 2026-01-02 (commit acf9a7c1)\n0 regressions, 0 other changes\n"
    assert (result.exit_code, result.output) == (0, text)
    assert call("compare", *reversed(runs)).exit_code == 0


def test_merge_joins_parts_and_is_a_night_when_they_are_the_whole(make_records, run, call, tmp_path):
    records = make_records(0)
    run = dataclasses.replace(run, plan=store.plan_of([record.case.id for record in records]))
    parts = []
    for number in range(3):
        store.write_table(store.table_of(records[number::3], run), tmp_path / str(number))
        parts.append(tmp_path / str(number))
    out = tmp_path / "out"
    assert call("merge", *parts[:2], "--output", out).exit_code == 0
    assert not (out / "history").exists()
    for _ in range(2):
        assert call("merge", *parts, parts[0], "--output", out).exit_code == 0
        assert sorted(store.read_run(out / "latest")["id"]) == sorted(record.case.id for record in records)
        assert len(store.history(out / "history")) == len(records)


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("commit", "b0bb1e00", "commit (acf9a7c1, b0bb1e00)"),
        ("torch", "2.14.0", "torch (2.13.0, 2.14.0)"),
        ("options", " --zoo other.yaml", "options (none, --zoo other.yaml)"),
    ],
)
def test_merge_refuses_parts_of_two_commits(field, value, told, make_records, run, call, tmp_path):
    records = make_records(0)
    for number, made in enumerate((run, dataclasses.replace(run, **{field: value}))):
        store.write_table(store.table_of(records[number::2], made), tmp_path / str(number))
    result = call("merge", tmp_path / "0", tmp_path / "1", "--output", tmp_path / "out")
    assert result.exit_code == 2
    assert f"these differ in {told}" in result.stderr
    assert not (tmp_path / "out").exists()


def test_merge_names_all_machines(make_records, run, call, tmp_path):
    other = dataclasses.replace(run, devices={"cpu": "Other CPU"})
    for number, made in enumerate((run, other)):
        store.write_table(store.table_of(make_records(0)[number::2], made), tmp_path / str(number))
    assert call("merge", tmp_path / "0", tmp_path / "1", "--output", tmp_path / "out").exit_code == 0
    page = (tmp_path / "out/latest/summary.md").read_text()
    assert "cpu: Other CPU and Example CPU, 2 cores; cuda: Example GPU" in page


def test_a_merged_run_is_not_compared_with_itself(make_records, run, call, tmp_path):
    records = [dataclasses.replace(record, outcome=Outcome.FAIL) for record in make_records(0)]
    plan = store.plan_of([record.case.id for record in records])
    for number in range(2):
        made = dataclasses.replace(run, plan=plan, started=run.started + datetime.timedelta(minutes=number))
        store.write_table(store.table_of(records[number::2], made), tmp_path / str(number))
    again = dataclasses.replace(run, plan=plan, started=run.started + datetime.timedelta(minutes=2))
    store.write_table(store.table_of(records[:1], again), tmp_path / "2")
    for parts in ((0, 1), (0, 1, 2)):  # the second time, the first one is in the history
        places = (tmp_path / str(number) for number in parts)
        said = call("merge", *places, "--output", tmp_path / "out").output
        assert "of failures" in said
        assert "Nothing got worse" not in said


def test_accept_changes_one_expectation(make_records, run, call, tmp_path):
    before, after = make_records(0), make_records(0)
    case = "bert-base-MergeLinears-cpu-effect"
    for index, record in enumerate(after):
        if record.case.check is Check.EFFECT and "MergeLinears" in record.case.pipeline:
            after[index] = dataclasses.replace(record, measurements={**record.measurements, "sites": 1})
    folders = {name: tmp_path / name for name in ("baseline", "latest")}
    for name, records in (("baseline", before), ("latest", after[:-1])):
        store.write_table(store.table_of(records, run), folders[name])
    places = ["--current", folders["latest"], "--baseline", folders["baseline"]]

    def worse():
        changes = compare(*map(store.read_run, folders.values()))
        return {*changes.loc[changes["regression"], "id"]}

    ids = worse()
    assert {case, after[-1].case.id} < ids
    assert call("accept", case, "--reason", "eleven were wrong", *places).exit_code == 0
    assert call("accept", after[-1].case.id, "--reason", "retired", *places).exit_code == 0
    assert worse() == ids - {case, after[-1].case.id}
    accepted = store.read_run(folders["baseline"]).set_index("id")["accepted"]
    assert accepted[accepted != ""].to_dict() == {case: "eleven were wrong"}
    unknown = call("accept", "no-such-case", "--reason", "x", *places)
    assert unknown.exit_code == 2
    assert "neither" in unknown.stderr


def test_accept_takes_all_cases_of_a_model_out(make_records, run, call, tmp_path):
    records = make_records(0)
    store.write_table(store.table_of(records, run), tmp_path / "baseline")
    left = [record for record in records if record.case.model != "bert-base"]
    store.write_table(store.table_of(left, run), tmp_path / "latest")
    places = ["--current", tmp_path / "latest", "--baseline", tmp_path / "baseline"]
    assert call("accept", "bert-base", "--reason", "retired", *places).exit_code == 0
    kept = store.read_run(tmp_path / "baseline")
    assert sorted(kept["id"]) == sorted(record.case.id for record in left)


def test_a_failure_is_not_accepted_but_told_where_it_belongs(runs, call):
    case = "bert-base-eager-cpu-parity"
    result = call("accept", case, "--reason", " ", "--current", runs[1], "--baseline", runs[0])
    assert (result.exit_code, "--reason is empty" in result.stderr) == (2, True)
    result = call("accept", case, "--reason", "so it is", "--current", runs[1], "--baseline", runs[0])
    assert result.exit_code == 2
    assert 'known_failures: [{"check": "parity", "pipeline": "", "reason": "so it is"}]' in result.stderr


def test_history_passes_over_a_broken_file_with_a_warning(runs, run, call):
    (runs[0].parent / "history/broken.parquet").write_bytes(b"PAR1 nothing PAR1")
    result = call("history", runs[0].parent / "history")
    assert result.exit_code == 0
    assert run.id in result.stdout
    assert result.stderr.startswith("warning: passed over: ")


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
    assert "1 case failed" in result.stderr
    assert not (tmp_path / "baseline").exists()


def test_rows_of_two_commits_are_no_baseline(make_records, run, call, tmp_path):
    table = store.table_of(make_records(0), run)
    commits = pa.array(["acf9a7c1", *["b0bb1e00"] * (table.num_rows - 1)])
    mixed = table.set_column(table.column_names.index("commit"), "commit", commits)
    store.write_table(mixed, tmp_path / "latest")
    result = call("baseline", tmp_path / "latest", "--directory", tmp_path / "baseline")
    assert result.exit_code == 2
    assert "these differ in commit (acf9a7c1, b0bb1e00)" in result.stderr


def test_without_a_baseline_accept_says_how_there_is_one(runs, call, tmp_path):
    nowhere = ("--reason", "why", "--current", runs[0], "--baseline", tmp_path / "baseline")
    result = call("accept", "bert-base-eager-cpu-parity", *nowhere)
    assert result.exit_code == 2
    assert "`fxopt baseline RUN`" in result.stderr


def test_a_part_of_a_run_is_no_baseline(records, run, call, tmp_path):
    run = dataclasses.replace(run, plan=store.plan_of([record.case.id for record in records]))
    passing = [record for record in records if record.outcome is Outcome.PASS][:3]
    store.write_table(store.table_of(passing, run), tmp_path / "latest")
    result = call("baseline", tmp_path / "latest", "--directory", tmp_path / "baseline")
    assert result.exit_code == 2
    assert "a part of a run, which lacks" in result.stderr
    assert not (tmp_path / "baseline").exists()


def test_a_part_says_what_it_lacks_and_may_be_held_to_all(records, run, call, tmp_path):
    run = dataclasses.replace(run, plan=store.plan_of([record.case.id for record in records]))
    for name, some in (("before", records), ("after", records[:3])):
        store.write_table(store.table_of(some, run), tmp_path / name)
    result = call("compare", tmp_path / "before", tmp_path / "after")
    assert result.exit_code == 0
    assert f"is a part: {len(records) - 3} cases of" in result.stdout
    result = call("compare", tmp_path / "before", tmp_path / "after", "--no-part")
    assert result.exit_code == 1
    assert "is a part" not in result.stdout
    assert "vanished" in result.stdout


def test_runs_that_have_no_case_in_common_are_not_compared(records, run, call, tmp_path):
    for name, some in (("before", records[:3]), ("after", records[3:6])):
        store.write_table(store.table_of(some, run), tmp_path / name)
    result = call("compare", tmp_path / "before", tmp_path / "after", "--part")
    assert result.exit_code == 2
    assert "so that nothing can be compared" in result.stderr


def test_history_follows_a_case(runs, run, call):
    case = "bert-base-MergeLinears-cpu-latency"
    result = call("history", runs[0].parent / "history", "--case", case)
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
    result = call("zoo", "sites", zoo)
    assert result.exit_code == 0, result.output
    assert "third: left out: nowhere is not installed" in result.output
    found = recorded_sites(zoo)
    assert found["third"] == {"MergeLinears": 4}  # it stays: here it cannot be counted
    assert [*found] == ["first", "second", "third"]
    assert [*found["first"]] == [*found["second"]] == [*fxopt.passes.available()]
    assert (found["first"]["ReplaceActivation"], found["second"]["ReplaceActivation"]) == (0, 1)
    assert "second:\n  ChangePrecision: " in sites_file(zoo).read_text()


def test_sites_of_one_model_leave_the_others_as_they_are(zoo, call):
    sites_file(zoo).write_text(yaml.safe_dump({"first": {"MergeLinears": 9}}))
    assert call("zoo", "sites", zoo, "--model", "second").exit_code == 0
    assert recorded_sites(zoo)["first"] == {"MergeLinears": 9}
    assert len(recorded_sites(zoo)["second"]) == len(fxopt.passes.available())
    sites_file(zoo).unlink()
    result = call("zoo", "sites", zoo, "--model", "third")
    assert (result.exit_code, sites_file(zoo).exists()) == (2, False)
    assert result.stderr == "error: nothing is recorded: all these models are left out\n"
    result = call("zoo", "sites", zoo, "--model", "thrid")
    assert result.exit_code == 2
    assert result.stderr == f"error: {zoo}: no model 'thrid'; there are first, second, third\n"


def test_sites_of_a_model_that_fails_stay_and_the_command_fails(zoo, call):
    zoo.write_text(ZOO.replace("input: {shape: [1, 2]}", "input: {shape: [1, 3]}", 1))
    sites_file(zoo).write_text(yaml.safe_dump({"first": {"MergeLinears": 9}}))
    result = call("zoo", "sites", zoo)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: not counted: ChangePrecision in first (error: ")
    assert "second: " in result.stdout
    assert recorded_sites(zoo)["first"] == {"MergeLinears": 9}


def test_zoo_check_says_what_is_planned_and_what_is_wrong(zoo, call):
    zoo.write_text(ZOO)
    result = call("zoo", "check", zoo)
    assert result.exit_code == 0, result.output
    planned, left_out = result.stdout.splitlines()
    assert re.fullmatch(rf"{zoo}: 3 models, \d{{3}} cases on a device", planned)
    assert left_out == "third: left out: nowhere is not installed"
    zoo.write_text(ZOO.replace("sizes: fixed", "sizes: huge", 1).replace("name: second", "names: second"))
    result = call("zoo", "check", zoo)
    assert result.exit_code == 1
    assert len(result.stderr.splitlines()) == 3
    assert result.stderr.startswith(f"error: {zoo}: first: sizes: ")


@pytest.mark.parametrize("command", [("zoo", "check"), ("zoo", "sites"), ("validate",)])
def test_where_there_is_no_zoo_file_all_commands_say_the_same(command, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = call(*command)
    assert result.exit_code == 2
    assert "model_zoo.yaml: no such file; name one, or write model_zoo.yaml\n" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("zoo", "sites", "nowhere.yaml"),
        ("report", "nowhere.parquet"),
        ("report", "broken.parquet"),
        ("compare", "broken.parquet", "nowhere.parquet"),
        ("history", "nowhere"),
        ("merge", "nowhere.parquet", "--output", "out"),
        ("accept", "case", "--reason", "why", "--current", "nowhere"),
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


def test_the_options_of_validate_are_those_of_the_plugin_and_all_others_are_pytest_s(call, monkeypatch):
    given = []
    monkeypatch.setattr(pytest, "main", lambda arguments: given.extend(arguments) or 0)
    result = call("validate", "--pass", "A", "-k", "bert", "--report-dir=out", "--resume", "--tb=short", "-x")
    assert result.exit_code == 0, result.output
    after = given[given.index("--pyargs") + 2 :]
    wanted = ["--fx-pass=A", "-k", "bert", "--fx-report-dir=out", "--fx-resume", "--tb=short", "-x"]
    assert after == wanted
    assert "--timing SECONDS" in call("validate", "--help").output


@pytest.mark.parametrize(
    ("ended", "status"),
    [(pytest.ExitCode.OK, 0), (pytest.ExitCode.TESTS_FAILED, 1), (pytest.ExitCode.USAGE_ERROR, 2)],
)
def test_validate_ends_as_the_run_does(call, monkeypatch, ended, status):
    monkeypatch.setattr(pytest, "main", lambda arguments: ended)
    assert call("validate").exit_code == status


@pytest.mark.parametrize(
    ("ended", "status", "advice"),
    [
        (pytest.ExitCode.INTERRUPTED, 130, "with --resume, the rest is run"),
        (pytest.ExitCode.NO_TESTS_COLLECTED, 2, "no case is chosen: --collect-only"),
    ],
)
def test_validate_says_what_to_do_where_it_did_not_end(call, monkeypatch, ended, status, advice):
    monkeypatch.setattr(pytest, "main", lambda arguments: ended)
    result = call("validate")
    assert result.exit_code == status
    assert advice in result.output
