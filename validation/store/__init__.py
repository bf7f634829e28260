"""The storage of runs: a journal while a run lasts, then one Parquet file, one row a case; all reports are views of it."""

from __future__ import annotations

from .journal import Journal
from .past import accept, append_history, history, read_run, read_table, write_table
from .provenance import Run, version
from .table import (
    COLUMNS,
    ReportError,
    file_of,
    left_out,
    measurements_of,
    merge,
    missing,
    plan_of,
    replace,
    table_of,
    unlike,
)

__all__ = [
    "COLUMNS",
    "Journal",
    "ReportError",
    "Run",
    "accept",
    "append_history",
    "file_of",
    "history",
    "left_out",
    "measurements_of",
    "merge",
    "missing",
    "plan_of",
    "read_run",
    "read_table",
    "replace",
    "table_of",
    "unlike",
    "version",
    "write_table",
]
