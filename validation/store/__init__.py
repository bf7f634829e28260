"""A run is a journal while it lasts and then one Parquet file, one row a case; all else that it shows are views of that."""

from __future__ import annotations

from .files import SCHEMA, ReportError, file_of, replace
from .journal import Journal
from .past import accept, append_history, history, seconds_by_group, write_table
from .place import Place
from .provenance import Run, version
from .reading import read_run, read_table
from .table import COLUMNS, measurements_of, merge, missing, plan_of, table_of

__all__ = [
    "COLUMNS",
    "SCHEMA",
    "Journal",
    "Place",
    "ReportError",
    "Run",
    "accept",
    "append_history",
    "file_of",
    "history",
    "measurements_of",
    "merge",
    "missing",
    "plan_of",
    "read_run",
    "read_table",
    "replace",
    "seconds_by_group",
    "table_of",
    "version",
    "write_table",
]
