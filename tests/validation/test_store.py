from __future__ import annotations

import dataclasses
import datetime
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from validation import store
from validation.judging import repro
from validation.records import Case, Check, Outcome, Record
from validation.regressions import compare

ROOT = Path(__file__).resolve().parents[2]
CASE = Case("bert", ("MergeLinears",), "cpu", Check.EQUIVALENCE)


def written(records, run, directory):
    store.write_table(store.table_of(records, run), directory)
    return store.read_run(directory)


def test_a_table_holds_all_that_the_records_say(records, run, tmp_path):
    table = written(records, run, tmp_path).set_index("id")
    assert len(table) == len(records)
    for record in records:
        row = table.loc[record.case.id]
        assert (row["outcome"], row["stage"], row["reason"]) == (record.outcome, record.stage, record.reason)
        assert row["pipeline"].split("+") == list(record.case.pipeline or [""])
        assert row["device_name"] == run.devices[record.case.device]
        assert [tuple(refusal.values()) for refusal in row["refusals"]] == list(record.refusals)
        measured = {name: row[name] for name in store.measurements_of(table) if not math.isnan(row[name])}
        assert measured == {k: v for k, v in record.measurements.items() if not math.isnan(v)}


def test_numbers_are_numbers_and_missing_is_not_nan(run, tmp_path):
    other = dataclasses.replace(CASE, check=Check.PARITY)
    records = [
        Record(CASE, Outcome.FAIL, measurements={"max_abs_error": math.nan, "sites": 3}),
        Record(other, Outcome.PASS, measurements={"sites": 0}),
    ]
    table = written(records, run, tmp_path)
    assert table[["max_abs_error", "sites", "seconds"]].dtypes.unique().tolist() == [np.dtype("float64")]
    stored = pq.read_table(tmp_path / "records.parquet")["max_abs_error"].to_pylist()
    assert math.isnan(stored[0])
    assert stored[1] is None


def test_a_run_without_records_is_refused(run):
    with pytest.raises(store.ReportError, match="no records"):
        store.table_of([], run)


def test_a_measurement_cannot_take_the_name_of_a_column(run):
    with pytest.raises(store.ReportError, match="seconds"):
        store.table_of([Record(CASE, Outcome.PASS, measurements={"seconds": 1})], run)


@pytest.mark.parametrize("content", [b"", b"PAR1", b"not a table"])
def test_a_broken_file_is_named(content, tmp_path):
    file = tmp_path / "records.parquet"
    file.write_bytes(content)
    with pytest.raises(store.ReportError, match=r"records\.parquet: not a readable Parquet file"):
        store.read_run(file)


def test_a_cut_off_file_is_named(records, run, tmp_path):
    written(records, run, tmp_path)
    file = tmp_path / "records.parquet"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(store.ReportError, match=r"records\.parquet"):
        store.read_run(file)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(store.ReportError, match=r"records\.parquet: no such file"):
        store.read_run(tmp_path)


def test_history_joins_runs_with_different_measurements(run, tmp_path, later):
    for when, name in ((later, "sites"), (run, "max_abs_error")):
        record = Record(CASE, Outcome.PASS, measurements={name: 1})
        store.append_history(store.table_of([record], when), tmp_path)
    table = store.history(tmp_path)
    assert table["run"].tolist() == [run.id, later.id]
    assert table["max_abs_error"].isna().tolist() == [False, True]
    assert table["sites"].isna().tolist() == [True, False]


def test_a_broken_run_in_the_history_is_named_and_passed_over(run, tmp_path):
    store.append_history(store.table_of([Record(CASE, Outcome.PASS)], run), tmp_path)
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 nothing")
    with pytest.warns(UserWarning, match=r"passed over: .*broken\.parquet"):
        assert store.history(tmp_path)["run"].tolist() == [run.id]


def test_an_empty_history_says_what_to_do(tmp_path):
    with pytest.raises(store.ReportError, match="fxopt validate"):
        store.history(tmp_path)


def test_files_of_an_older_version_are_read_with_empty_columns(records, run, tmp_path):
    table = store.table_of(records, run)
    old = table.drop_columns(["content", "plan", "accepted", "seconds", "refusals"]).replace_schema_metadata()
    pq.write_table(old, tmp_path / "records.parquet")
    read = store.read_run(tmp_path)
    assert set(read["content"]) == set(read["plan"]) == {""}
    assert compare.compare(read, table.to_pandas()).empty
    assert store.missing(read) == 0


@pytest.mark.parametrize("name", ["records", "architectures"])
def test_the_committed_baselines_are_read(name):
    table = store.read_run(ROOT / f"reports/baseline/{name}.parquet")
    assert set(store.COLUMNS) <= set(table.columns)


def test_files_of_a_later_version_say_so(records, run, tmp_path):
    table = store.table_of(records, run).replace_schema_metadata({"fxopt.schema": "99"})
    pq.write_table(table, tmp_path / "records.parquet")
    with pytest.raises(store.ReportError, match=r"records\.parquet: written by a later version .*schema 99"):
        store.read_run(tmp_path)


def test_merging_joins_parts_and_reruns_and_merging_again_changes_nothing(records, run):
    later = dataclasses.replace(run, started=run.started + datetime.timedelta(hours=1))
    parts = [store.table_of(records[:40], run), store.table_of(records[30:], run)]
    again = store.table_of([dataclasses.replace(records[0], outcome=Outcome.FAIL, reason="new")], later)
    merged = store.merge([again, *parts])
    assert merged["id"].to_pylist() == sorted(record.case.id for record in records)
    row = merged.to_pandas().set_index("id").loc[records[0].case.id]
    assert (row["outcome"], row["run"]) == ("fail", later.id)
    assert repr(store.merge([merged, *parts, again, merged]).to_pylist()) == repr(merged.to_pylist())


def test_a_part_that_did_not_run_a_case_takes_it_out_of_no_baseline(records, run, tmp_path):
    planned = dataclasses.replace(run, plan=store.plan_of([record.case.id for record in records]))
    written(records, planned, tmp_path / "baseline")
    written(records[1:], planned, tmp_path / "part")
    with pytest.raises(store.ReportError, match="is a part of a run, and may just not have run it"):
        store.accept(records[0].case.id, "it is gone", tmp_path / "part", tmp_path / "baseline")


# --- journals --------------------------------------------------------------------------------------------


def test_a_journal_has_every_record_at_once_and_reads_like_a_run(records, run, tmp_path):
    journal = store.Journal(tmp_path, run)
    for number, record in enumerate(records, 1):
        journal.append(record)
        assert number > 3 or len(store.read_run(journal.file)) == number
    assert repr(store.read_table(journal.file).to_pylist()) == repr(store.table_of(records, run).to_pylist())
    journal.close(written=True)
    assert not journal.file.exists()


def test_a_run_that_was_cut_goes_on_with_the_records_that_it_has(records, run, tmp_path):
    cut = store.Journal(tmp_path, run)
    for record in records[:2]:
        cut.append(record)
    with cut.file.open("a") as file:
        file.write('{"case": {"model"')  # the process ended here
    cut.close(written=False)
    later = dataclasses.replace(run, started=run.started + datetime.timedelta(hours=1))
    resumed = store.Journal(tmp_path, later, resume=True)
    assert (resumed.run, list(resumed.earlier.values())) == (run, list(records[:2]))
    for record in records[2:]:
        resumed.append(record)
    assert resumed.file == cut.file
    assert not resumed.not_resumed
    assert repr(store.read_table(cut.file).to_pylist()) == repr(store.table_of(records, run).to_pylist())
    resumed.close(written=True)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({}, {"commit": "0000cafe"}),
        ({"commit": "acf9a7c1-dirty"}, {"commit": "acf9a7c1-dirty"}),
        ({"commit": ""}, {"commit": ""}),
        ({}, {"torch": "3.0"}),
        ({}, {"plan": "another"}),
    ],
)
def test_nothing_is_resumed_that_may_be_of_other_code(records, run, tmp_path, before, now):
    cut = store.Journal(tmp_path, dataclasses.replace(run, **before))
    cut.append(records[0])
    cut.close(written=False)
    later = dataclasses.replace(run, started=run.started + datetime.timedelta(hours=1), **now)
    fresh = store.Journal(tmp_path, later, resume=True)
    assert (fresh.run, fresh.earlier) == (later, {})
    assert f"Not resumed: {cut.file} is of another commit" in fresh.not_resumed
    fresh.close(written=True)
    assert cut.file.exists()


def test_a_line_that_was_cut_off_costs_its_record_alone(records, run, tmp_path):
    journal = store.Journal(tmp_path, run)
    for record in records[:3]:
        journal.append(record)
    journal.file.write_bytes(journal.file.read_bytes()[:-20])
    assert len(store.read_run(journal.file)) == 2
    journal.file.write_text("no journal\n")
    with pytest.raises(store.ReportError, match="not the journal of a run"):
        store.read_run(journal.file)


def test_of_two_runs_into_one_folder_the_second_is_refused(run, tmp_path):
    first = store.Journal(tmp_path, run)
    with pytest.raises(store.ReportError, match="another run writes here"):
        store.Journal(tmp_path, run)
    first.close(written=False)
    store.Journal(tmp_path, run).close(written=True)


def test_a_folder_that_cannot_be_written_is_named_at_the_start(run, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(store.ReportError, match=r"file/reports: cannot be written"):
        store.Journal(tmp_path / "file" / "reports", run)


def test_run_ids_sort_by_time_and_tell_runs_apart(run):
    later = dataclasses.replace(run, started=run.started + datetime.timedelta(milliseconds=1))
    east = datetime.timezone(datetime.timedelta(hours=9))
    assert run.id < later.id
    assert dataclasses.replace(run, started=run.started.astimezone(east)).id == run.id


def test_now_describes_this_machine():
    here = store.Run.now(threads=3, devices=["cpu"])
    assert here.threads == 3
    assert here.torch[0].isdigit()
    assert "cores" in here.devices["cpu"]


def test_runs_whose_columns_have_other_types_are_not_merged():
    id_and_time = {"id": ["a"], "started": ["2026-11-22"]}
    tables = [pa.table({**id_and_time, "refused": refused}) for refused in (["no"], [1.0])]
    with pytest.raises(
        store.ReportError, match="written by another version of the harness .*refused.* move it away"
    ):
        store.merge(tables)


def test_what_cannot_be_written_as_utf_8_is_escaped_and_costs_no_report(run, tmp_path):
    broken = "no such file: caf\udce9.bin"
    record = Record(
        Case("net", ("Pass",), "cpu", Check.EFFECT),
        Outcome.FAIL,
        reason=broken,
        refusals=(("Pass", "node", broken),),
        facts={"again": broken},
        repro=f"# {broken}",
    )
    table = store.table_of([record], run)
    row = table.to_pandas().iloc[0]
    assert row["reason"] == row["again"] == row["refusals"][0]["reason"] == "no such file: caf\\udce9.bin"
    (file,) = repro.write([record], tmp_path, whole=True)
    assert "caf\\udce9.bin" in file.read_text(encoding="utf-8")
