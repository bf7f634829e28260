"""The runs that are kept: the last one, those before it, and the baseline; each is read of its Parquet file, of any version, or its journal."""

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
    """Writes `records.parquet`, or another file; returns it."""
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / f"{name}.parquet"
    replace(file, parquet(table))
    return file


def append_history(table: pa.Table, directory: Path) -> Path:
    """Adds the table of a run to the history, one file a run, which has the name of its last part; returns the file."""
    return write_table(table, directory, max(table["run"].to_pylist()))


def history(directory: Path) -> pd.DataFrame:
    """The records of every run in the history, oldest run first; measurements a run lacks are missing.

    A file that cannot be read is passed over, with a warning. Raises `ReportError` when no run is left.
    """
    runs = []
    for file in sorted(directory.glob("*.parquet")):
        if not file.name.startswith("."):
            try:
                runs.append(read_table(file).replace_schema_metadata())
            except ReportError as error:
                warnings.warn(f"passed over: {error}", stacklevel=2)
    if not runs:
        raise ReportError(f"{directory}: no runs here; every whole `fxopt validate` adds one")
    joined: pd.DataFrame = pa.concat_tables(runs, promote_options="default").to_pandas()
    return joined.sort_values(["started", "run", "id"], ignore_index=True)


def accept(case: str, reason: str, current: Path, baseline: Path) -> None:
    """Puts the row of one case into a baseline, with the reason, or takes it out where `current` lacks it.

    Raises `ReportError` without a reason, and for a case that neither has, that fails, or that a partial run may just
    not have run.
    """
    if not reason.strip():
        raise ReportError(f"{case}: --reason is empty: say why its change is right")
    if not file_of(baseline).is_file():
        raise ReportError(f"{file_of(baseline)}: no such file; `fxopt baseline RUN` makes a run the baseline")
    new, old = read_table(current), read_table(baseline)
    rest, row = old.filter(pc.not_equal(old["id"], case)), new.filter(pc.equal(new["id"], case))
    if row.num_rows:
        found = row.to_pylist()[0]
        if found["outcome"] in FAILING:
            known = json.dumps({"check": found["check"], "pipeline": found["pipeline"], "reason": reason})
            raise ReportError(f"{case} fails; its model may say so in the zoo: known_failures: [{known}]")
        row = row.set_column(row.column_names.index("accepted"), "accepted", pa.array([reason]))
    elif rest.num_rows == old.num_rows:
        raise ReportError(f"{case}: neither {current} nor {baseline} has this case")
    elif missing(new.to_pandas()):
        raise ReportError(f"{case}: {current} is a part of a run, and may just not have run it")
    joined = pa.concat_tables(
        [part.replace_schema_metadata() for part in (rest, row)], promote_options="default"
    )
    replace(file_of(baseline), parquet(stamped(joined.sort_by("id"))))


def read_run(path: Path) -> pd.DataFrame:
    """The table of one run: of its Parquet file, the directory that holds `records.parquet`, or its journal.

    Raises `ReportError` when there is no such file, or when it is not the table of a run.
    """
    frame: pd.DataFrame = read_table(path).to_pandas()
    return frame


def read_table(path: Path) -> pa.Table:
    """The table that `read_run` reads, with every column of this version; the new ones are empty in a file of an older one."""
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
