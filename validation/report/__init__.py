"""Reports: what a run shows. `write_run` is called once, at the end of a run, with all its records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from validation import store
from validation.records import Record


def write_run(records: Sequence[Record], directory: Path, run: store.Run) -> list[Path]:
    """Writes the table of the run and its views to `directory/latest`, and adds it to `directory/history`.

    Returns the files that were written. All or nothing: whatever goes wrong, the previous `latest` stays.
    Raises `store.ReportError` when there are no records, or when `latest` is a directory of something else.
    """
    table = store.table_of(records, run)
    latest = directory / "latest"
    with store.replacing(latest) as unfinished:
        store.write_table(table, unfinished)
    history = store.append_history(table, directory / "history")
    return [*sorted(file for file in latest.rglob("*") if file.is_file()), history]
