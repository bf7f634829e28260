"""Reports: the views of a run. `write_run` is called once, at the end of a run, with its table."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from fxopt.errors import error_text

from .. import store
from . import architectures, headline, html, markdown

T = TypeVar("T")

MOST_CAUSES = 20

PAGES = ("summary.md", "report.html", "architectures.md")
"""The pages of a run, and the page of a sweep."""


@dataclasses.dataclass
class Written:
    """The written files, a line for each file that could not be written, and the changes since earlier runs."""

    files: list[Path] = dataclasses.field(default_factory=list)
    problems: list[str] = dataclasses.field(default_factory=list)
    since: headline.Since | None = None  # what changed
    directory: Path = Path()  # of the table and its views
    stays: str = ""  # why `latest` stays unchanged, and where this part is

    def attempt(self, what: Path, write: Callable[[], T]) -> T | None:
        """Write one file; if this fails, note the problem and go on with the other files."""
        try:
            made = write()
        except Exception as error:  # a full disk, a plotting library, an unexpected value
            self.problems.append(f"{what}: not written: {error_text(error)}")
            return None
        self.files += [made] if isinstance(made, Path) else []
        return made


def write_run(table: pa.Table, directory: Path, planned: Collection[str] | None = None) -> Written:
    """Add a run to `directory/history` and make it `directory/latest`: first its table, then the views.

    A partial run is not added to the history, and replaces only its own cases in `latest`. Other cases stay if they are
    still `planned`, or all stay if `planned` is None. Parts of another commit, other versions or another zoo gather in
    `directory/part`, and `latest` stays, until the parts are a whole run, which replaces `latest`. A sweep uses
    `directory/architectures` in place of `latest`.
    """
    written, frame, history = Written(), table.to_pandas(), directory / "history"
    latest = directory / ("architectures" if headline.is_sweep(frame) else "latest")
    if not store.missing(frame):
        written.attempt(history, lambda: store.append_history(table, history))
    else:
        table, latest = _with_earlier(written, table, latest, directory / "part")
        if planned is not None:
            table = table.filter(pc.is_in(table["id"], pa.array(sorted(planned), pa.string())))
    written.directory = latest
    file, part = written.attempt(latest, lambda: store.write_table(table, latest)), directory / "part"
    with contextlib.suppress(store.ReportError):  # usually there is no such file
        if file and latest != part and {*store.read_run(part)["run"]} <= {*table["run"].to_pylist()}:
            shutil.rmtree(part, ignore_errors=True)  # it is an older state of this run
    return write_views(table.to_pandas(), latest, history, written)


def _with_earlier(written: Written, table: pa.Table, latest: Path, part: Path) -> tuple[pa.Table, Path]:
    """Join a part with the rows of the run that it belongs to; return the table and its folder."""
    for place in (latest, part):
        if not store.file_of(place).is_file():
            return table, place
        earlier = written.attempt(place, functools.partial(store.read_table, place))
        try:
            joined = table if earlier is None else store.merge([earlier, table])
        except store.ReportError as error:
            written.stays = written.stays or f"{latest} stays: {error}. This part is in {part}."
            continue
        if store.missing(joined.to_pandas()):
            return joined, place
        written.stays = ""
        return joined, latest
    return table, part  # the parts in both folders are of other runs


def write_views(
    table: pd.DataFrame, directory: Path, history: Path | None = None, written: Written | None = None
) -> Written:
    """Write every Markdown and HTML view of a run (a table of `store.read_run`), each independently of the others.

    The views show the changes since the last good run before it in `history` (default: the folder next to `directory`). A
    view that cannot be made is deleted, because it would show another run.
    """
    written, history = written or Written(), history or directory.parent / "history"
    since = written.attempt(history, lambda: headline.since(table, *headline.earlier(table, history)))
    ran = headline.ran(table)
    views: dict[str, Callable[[], str]] = {
        "summary.md": lambda: markdown.summary(table, since),
        "report.html": lambda: html.document(table, since),
    }
    pages = {f"compatibility/{name}.md": (table, name, "model") for name in ran["model"].unique()}
    pages |= {f"passes/{name}.md": (ran, name, "pipeline") for name in markdown.single_passes(ran)}
    views |= {file: functools.partial(markdown.compatibility, *given) for file, given in pages.items()}
    if headline.is_sweep(table):
        views = {"architectures.md": lambda: architectures.document(table)}
    for old in {*directory.glob("compatibility/*.md"), *directory.glob("passes/*.md")}:
        old.unlink()
    for name, view in views.items():
        file = directory / name
        if not written.attempt(file, functools.partial(_write, file, view)):
            file.unlink(missing_ok=True)
    written.since = since
    return written


def _write(file: Path, view: Callable[[], str]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    store.replace(file, view().encode("utf-8"))
    return file


def terminal_summary(table: pd.DataFrame, written: Written) -> str:
    """The causes of regressions or failures, the pages, and finally the verdict of the run, as plain text."""
    # For a part, only the causes in the part itself; the views also contain cases that were not run again.
    whole = None if store.missing(table) else written.since
    told = worse_lines(whole or headline.since(table, []))
    numbers = architectures.summary(table).to_string(index=False) if headline.is_sweep(table) else ""
    ends = [*(str(file) for file in written.files if file.name in PAGES), headline.verdict(table)]
    parts = [told, [numbers], headline.not_run(table), [written.stays], ends]
    return "\n\n".join(filter(None, map("\n".join, parts)))


def worse_lines(since: headline.Since) -> list[str]:
    """The causes of regressions or failures, each with the command that runs one of its cases, as plain text."""
    lines = [headline.got_worse(since)] if since.causes or since.run else []
    for number, cause in enumerate(since.causes[:MOST_CAUSES], 1):
        lines += [f"{number}. {cause.text} ({headline.told(cause)})", f"   {cause.command}"]
    more = len(since.causes) - MOST_CAUSES
    lines += [f"... and {more} more causes, all in the report"] if more > 0 else []
    return [*lines, *filter(None, [headline.to_do(since)])]
