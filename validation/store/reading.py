"""Reads the table of a run: of its Parquet file, of any version, or of its journal."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from .files import ReportError, check_schema, file_of, first_line
from .journal import read_journal
from .table import COLUMNS, REQUIRED


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
