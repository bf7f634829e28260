from __future__ import annotations

import dataclasses
import datetime
import json
import math

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from validation import store
from validation.records import Case, Check, Outcome, Record

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


def test_how_long_models_took_is_summed_over_the_runs_of_a_directory(run, tmp_path):
    other = dataclasses.replace(CASE, check=Check.PARITY)
    for name, cases in {"one": [CASE, other], "two": [CASE]}.items():
        records = [Record(case, Outcome.PASS, seconds=2.0) for case in cases]
        store.write_table(store.table_of(records, run), tmp_path)
        (tmp_path / "records.parquet").rename(tmp_path / f"{name}.parquet")
    assert store.seconds_by_group(tmp_path) == {"bert-cpu": 6.0}
    assert store.seconds_by_group(tmp_path / "none") == {}


def test_csv_has_the_same_rows(records, run, tmp_path):
    table = written(records, run, tmp_path)
    csv = pd.read_csv(tmp_path / "records.csv", keep_default_na=False)
    assert csv["id"].tolist() == table["id"].tolist()
    assert csv["reason"].tolist() == table["reason"].tolist()
    assert [len(json.loads(cell)) for cell in csv["refusals"]] == [len(cell) for cell in table["refusals"]]


def test_a_run_without_records_is_refused(run):
    with pytest.raises(store.ReportError, match="no records"):
        store.table_of([], run)


def test_two_records_of_one_case_are_refused(run):
    with pytest.raises(store.ReportError, match="bert-MergeLinears-cpu-equivalence"):
        store.table_of([Record(CASE, Outcome.PASS), Record(CASE, Outcome.FAIL)], run)


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


def test_another_table_is_not_a_run(tmp_path):
    pd.DataFrame({"id": ["a"]}).to_parquet(tmp_path / "records.parquet")
    with pytest.raises(store.ReportError, match="no column model"):
        store.read_run(tmp_path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(store.ReportError, match=r"records\.parquet: no such file"):
        store.read_run(tmp_path)


def test_history_joins_runs_with_different_measurements(run, tmp_path):
    later = dataclasses.replace(run, started=run.started + datetime.timedelta(days=1))
    for when, name in ((later, "sites"), (run, "max_abs_error")):
        record = Record(CASE, Outcome.PASS, measurements={name: 1})
        store.append_history(store.table_of([record], when), tmp_path)
    table = store.history(tmp_path)
    assert table["run"].tolist() == [run.id, later.id]
    assert table["max_abs_error"].isna().tolist() == [False, True]
    assert table["sites"].isna().tolist() == [True, False]


def test_a_broken_run_in_the_history_is_named(run, tmp_path):
    store.append_history(store.table_of([Record(CASE, Outcome.PASS)], run), tmp_path)
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(store.ReportError, match=r"broken\.parquet"):
        store.history(tmp_path)


def test_an_empty_history_says_what_to_do(tmp_path):
    with pytest.raises(store.ReportError, match="pytest validation"):
        store.history(tmp_path)


def test_replacing_takes_the_place_of_the_directory(tmp_path):
    target = tmp_path / "latest"
    for text in ("one", "two"):
        with store.replacing(target) as directory:
            (directory / "records.parquet").write_text(text)
    assert (target / "records.parquet").read_text() == "two"
    assert [entry.name for entry in tmp_path.iterdir()] == ["latest"]


def test_an_error_leaves_the_directory_as_it_was(tmp_path):
    target = tmp_path / "latest"
    with store.replacing(target) as directory:
        (directory / "records.parquet").write_text("one")

    def fail_on_the_way():
        with store.replacing(target) as directory:
            (directory / "records.parquet").write_text("two")
            raise RuntimeError("on the way")

    with pytest.raises(RuntimeError, match="on the way"):
        fail_on_the_way()
    assert (target / "records.parquet").read_text() == "one"
    assert [entry.name for entry in tmp_path.iterdir()] == ["latest"]


def test_a_directory_of_something_else_is_not_replaced(tmp_path):
    (tmp_path / "latest").mkdir()
    (tmp_path / "latest" / "thesis.txt").write_text("three years of work")
    with pytest.raises(store.ReportError, match="not a report"), store.replacing(tmp_path / "latest"):
        pytest.fail("the block must not run")
    assert (tmp_path / "latest" / "thesis.txt").read_text() == "three years of work"


def test_a_link_to_a_directory_stays_a_link(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "latest").symlink_to(tmp_path / "disk", target_is_directory=True)
    with store.replacing(tmp_path / "latest") as directory:
        (directory / "records.parquet").write_text("one")
    assert (tmp_path / "latest").is_symlink()
    assert (tmp_path / "disk" / "records.parquet").read_text() == "one"


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
