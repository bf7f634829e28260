"""The stored runs: the last run, earlier ones and the baseline. Each is read from a Parquet file of any version, or a journal."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ..records import FAILING
from .journal import read_journal
from .table import (
    COLUMNS,
    REQUIRED,
    ReportError,
    check_schema,
    file_of,
    first_line,
    missing,
    parquet,
    replace,
    stamped,
)


def write_table(table: pa.Table, directory: Path, name: str = "records") -> Path:
    """Write `records.parquet`, or another file; return its path."""
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / f"{name}.parquet"
    replace(file, parquet(table))
    return file


def append_history(table: pa.Table, directory: Path) -> Path:
    """Add the table of a run to the history, as a file with the name of the latest run in it; return the file."""
    return write_table(table, directory, max(table["run"].to_pylist()))


def history(directory: Path) -> pd.DataFrame:
    """The records of every run in the history, oldest run first; measurements that a run lacks are null.

    A file that cannot be read is skipped with a warning. Raises `ReportError` if no run is left.
    """
    runs = []
    for file in sorted(directory.glob("[!.]*.parquet")):
        try:
            runs.append(read_table(file).replace_schema_metadata())
        except ReportError as error:
            warnings.warn(f"passed over: {error}", stacklevel=2)
    if not runs:
        raise ReportError(f"{directory}: no runs here; every whole `fxopt validate` adds one")
    joined: pd.DataFrame = pa.concat_tables(runs, promote_options="default").to_pandas()
    return joined.sort_values(["started", "run", "id"], ignore_index=True)


def accept(name: str, reason: str, current: Path, baseline: Path) -> None:
    """Put the rows of a case or model into a baseline, with the reason; remove cases that `current` lacks.

    Raises `ReportError` if the reason is empty, a case fails, no run has the case, or `current` is a partial run that lacks
    it.
    """
    if not reason.strip():
        raise ReportError(f"{name}: --reason is empty: say why its change is right")
    if not file_of(baseline).is_file():
        raise ReportError(f"{file_of(baseline)}: no such file; `fxopt baseline RUN` makes a run the baseline")
    new, old = read_table(current), read_table(baseline)
    chosen, known = (
        pc.or_(pc.equal(table["id"], name), pc.equal(table["model"], name)) for table in (new, old)
    )
    rows, rest = new.filter(chosen), old.filter(pc.invert(known))
    for found in rows.to_pylist():
        if found["outcome"] in FAILING:
            entry = json.dumps({"check": found["check"], "pipeline": found["pipeline"], "reason": reason})
            raise ReportError(
                f"{found['id']} fails; its model may say so in the zoo: known_failures: [{entry}]"
            )
    gone = {*old.filter(known)["id"].to_pylist()} - {*rows["id"].to_pylist()}
    if not rows.num_rows and not gone:
        raise ReportError(f"{name}: neither {current} nor {baseline} has this case or model")
    if gone and missing(new.to_pandas()):
        raise ReportError(f"{name}: {current} is a part of a run, and may just not have run it")
    rows = rows.set_column(
        rows.column_names.index("accepted"), "accepted", pa.array([reason] * rows.num_rows)
    )
    joined = pa.concat_tables(
        [part.replace_schema_metadata() for part in (rest, rows)], promote_options="default"
    )
    replace(file_of(baseline), parquet(stamped(joined.sort_by("id"))))


def read_run(path: Path) -> pd.DataFrame:
    """The table of one run, from its Parquet file, the directory with `records.parquet`, or its journal.

    Raises `ReportError` if there is no such file, or if the file is not the table of a run.
    """
    frame: pd.DataFrame = read_table(path).to_pandas()
    return frame


def read_table(path: Path) -> pa.Table:
    """The table that `read_run` reads, with every column of this version; columns that an older file lacks are empty."""
    file = file_of(path)
    if not file.is_file():
        raise ReportError(f"{file}: no such file; `fxopt validate` writes one")
    if file.suffix == ".jsonl":
        return read_journal(file)
    try:
        table = pq.read_table(file)
    except (pa.ArrowException, OSError) as error:
        raise ReportError(f"{file}: not a readable Parquet file ({first_line(error)})") from error
    check_schema(file, int((table.schema.metadata or {}).get(b"fxopt.schema", 1)))
    if lacking := [name for name in REQUIRED if name not in table.column_names]:
        raise ReportError(f"{file}: not the table of a run, it has no column {', '.join(lacking)}")
    if not table.num_rows:
        raise ReportError(f"{file}: the table of this run is empty")
    for name, kind in COLUMNS.items():
        if name not in table.column_names:
            empty: object = "" if kind == pa.string() else [] if pa.types.is_list(kind) else None
            table = table.append_column(name, pa.array([empty] * table.num_rows, kind))
    return table
