"""Reports: what a run shows. `write_run` is called once, at the end of a run, with its table."""

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
"""The pages of a run, and that of a sweep."""


@dataclasses.dataclass
class Written:
    """The files that were written, a line for each that could not be, and what the views say of the runs before."""

    files: list[Path] = dataclasses.field(default_factory=list)
    problems: list[str] = dataclasses.field(default_factory=list)
    since: headline.Since | None = None  # what changed
    directory: Path = Path()  # of the table and its views
    stays: str = ""  # why the last run stays, and where this part is

    def attempt(self, what: Path, write: Callable[[], T]) -> T | None:
        """Whatever goes wrong with one file is no reason to lose the others."""
        try:
            made = write()
        except Exception as error:  # a full disk, a plotting library, a value that nobody thought of
            self.problems.append(f"{what}: not written: {error_text(error)}")
            return None
        self.files += [made] if isinstance(made, Path) else []
        return made


def write_run(table: pa.Table, directory: Path, planned: Collection[str] | None = None) -> Written:
    """Adds a run to `directory/history` and makes it `directory/latest`: its table first, then the views of it.

    A run of a part stays out of the history, and takes the place of its own cases in `latest` alone; others stay there
    that are still `planned`, or all where that is not known. Parts of another commit, other versions or another zoo gather in
    `directory/part` until they are a whole run, which takes their place, and `latest` stays. A sweep has a directory of its own, `directory/architectures`, in the place of `latest`.
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
    with contextlib.suppress(store.ReportError):  # mostly there is none
        if file and latest != part and {*store.read_run(part)["run"]} <= {*table["run"].to_pylist()}:
            shutil.rmtree(part, ignore_errors=True)  # it shows a run as it was when it was cut
    return write_views(table.to_pandas(), latest, history, written)


def _with_earlier(written: Written, table: pa.Table, latest: Path, part: Path) -> tuple[pa.Table, Path]:
    """A part with the rows of the run that it belongs to, and the folder for them."""
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
    return table, part  # whose run is yet another one


def write_views(
    table: pd.DataFrame, directory: Path, history: Path | None = None, written: Written | None = None
) -> Written:
    """Writes every Markdown and HTML view of a run (a table of `store.read_run`), each by itself.

    They say what changed since the last good run before it in `history`; that is where it is beside `directory`, if it is not
    given. A view that cannot be made is deleted, for it would show another run.
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
    """The causes of regressions or failures, the pages, and last what the run found, as plain text."""
    # Those of a part are its own: the views also hold what was not run again.
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
