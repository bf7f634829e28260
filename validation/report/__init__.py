"""Reports: what a run shows. `write_run` is called once, at the end of a run, with all its records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from validation import store
from validation.records import Record
from validation.report import architectures, html, markdown
from validation.report.terminal import terminal_summary

__all__ = ["terminal_summary", "write_run", "write_views"]


def write_run(records: Sequence[Record], directory: Path, run: store.Run) -> list[Path]:
    """Writes the table of the run and its views to `directory/latest`, and adds it to `directory/history`.

    A sweep has a directory of its own, `directory/architectures`, in the place of `latest`.

    Returns the files that were written. All or nothing: whatever goes wrong, the previous `latest` stays.
    Raises `store.ReportError` when there are no records, when `latest` is a directory of something else, or
    when the files cannot be written.
    """
    table = store.table_of(records, run)
    latest = directory / ("architectures" if architectures.is_sweep(table.to_pandas()) else "latest")
    try:
        with store.replacing(latest) as unfinished:
            store.write_table(table, unfinished)
            write_views(store.read_run(unfinished), unfinished)
        history = store.append_history(table, directory / "history")
    except OSError as error:
        raise store.ReportError(f"{directory}: cannot be written ({error})") from error
    return [*sorted(file for file in latest.rglob("*") if file.is_file()), history]


def write_views(table: pd.DataFrame, directory: Path) -> list[Path]:
    """Writes every Markdown and HTML view of a run (a table of `store.read_run`); returns the files."""
    if architectures.is_sweep(table):
        directory.mkdir(parents=True, exist_ok=True)
        file = directory / "architectures.md"
        file.write_text(architectures.document(table), encoding="utf-8")
        return [file]
    pages = directory / "compatibility"
    pages.mkdir(parents=True, exist_ok=True)
    views = {
        directory / "report.html": html.document(table),
        directory / "summary.md": markdown.summary(table),
    }
    for model, stem in markdown.file_stems(table["model"].unique()).items():
        views[pages / f"{stem}.md"] = markdown.compatibility(table, model)
    for stale in set(pages.glob("*.md")) - set(views):
        stale.unlink()
    for file, text in views.items():
        file.write_text(text, encoding="utf-8")
    return sorted(views)
