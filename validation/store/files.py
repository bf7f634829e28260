"""The files of runs: their version, and how they are written at once."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from fxopt.errors import FxoptError

SCHEMA = 2
"""The version of the files, in their metadata; a higher one was written by a later version of this package."""


class ReportError(FxoptError):
    """A run cannot be written or read: the message names the file and says what to do."""


def file_of(run: Path) -> Path:
    """The Parquet file of a run: the path itself, or the `records.parquet` in it."""
    return run / "records.parquet" if run.is_dir() else run


def replace(file: Path, content: bytes) -> None:
    """Writes a file at once: nobody ever sees a part of it."""
    unfinished = file.with_name(f".{file.name}.unfinished")
    unfinished.write_bytes(content)
    unfinished.replace(file)


def parquet(table: pa.Table) -> bytes:
    buffer = pa.BufferOutputStream()
    pq.write_table(table, buffer)
    return buffer.getvalue().to_pybytes()  # type: ignore[no-any-return]


def stamped(table: pa.Table) -> pa.Table:
    return table.replace_schema_metadata({"fxopt.schema": str(SCHEMA)})


def check_schema(file: Path, version: int) -> None:
    if version > SCHEMA:
        raise ReportError(
            f"{file}: written by a later version of the harness (schema {version}, this is {SCHEMA})"
        )


def first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
