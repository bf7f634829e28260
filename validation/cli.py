"""The command line: write the views of a run again, compare, merge and accept runs, look back over many, record sites."""

from __future__ import annotations

import contextlib
import enum
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from fxopt.errors import FxoptError

from . import compare, report, sites, store, trend
from .records import FAILING
from .report import architectures

app = typer.Typer(
    help="What runs of the validation wrote: views, comparisons, history. And what they expect: sites.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Run = Annotated[
    Path, typer.Argument(help="A run: its Parquet file or journal, or the directory with records.parquet.")
]


class Form(enum.StrEnum):
    """How a comparison is printed: for a terminal, for the summary of a job on GitHub, or for a program."""

    TABLE = "table"
    MARKDOWN = "markdown"
    JSON = "json"


@app.command("report")
def report_command(
    run: Run,
    output: Annotated[Path | None, typer.Option(help="Where to write; default: beside the run.")] = None,
) -> None:
    """Writes the Markdown and HTML views of a run, from its table alone."""
    with _one_line_errors():
        table = store.read_run(run)
        written = report.write_views(table, output or _beside(run))
    typer.echo(report.terminal_summary(table, written.files))
    _stop_for(written.problems)


@app.command("compare")
def compare_command(
    baseline: Run,
    current: Run,
    part: Annotated[bool, typer.Option(help="CURRENT is a part: what it lacks has not vanished.")] = False,
    form: Annotated[Form, typer.Option("--format", help="How to print the changes.")] = Form.TABLE,
) -> None:
    """Says what changed from BASELINE to CURRENT. Exit status: 0, or 1 when something got worse, or 2 for a mistake.

    What is worse, and by how much it may move, validation/metric.py says of each metric.
    """
    with _one_line_errors():
        changes = compare.compare(store.read_run(baseline), store.read_run(current), part=part)
    if form is Form.JSON:
        typer.echo(changes.to_json(orient="records", indent=1))
    elif form is Form.MARKDOWN:
        typer.echo(report.changes.document(changes))
    else:
        if not changes.empty:
            marked = changes.assign(regression=["worse" if bad else "" for bad in changes["regression"]])
            _print(marked.rename(columns={"regression": ""}))
        typer.echo(report.changes.headline(changes))
    if changes["regression"].any():
        raise typer.Exit(1)


@app.command("merge")
def merge_command(
    runs: Annotated[
        list[Path], typer.Argument(help="Parts of a run, reruns, and journals of runs that were cut.")
    ],
    output: Annotated[
        Path, typer.Option(help="The folder of reports that gets latest/, and history/ of a whole run.")
    ],
) -> None:
    """Joins runs by case, the later row in the place of the earlier; merging the same again changes nothing."""
    with _one_line_errors():
        table = store.merge([store.read_table(run) for run in runs])
        written = report.write_run(table, output)
    typer.echo(report.terminal_summary(table.to_pandas(), written.files))
    _stop_for(written.problems)


@app.command("accept")
def accept_command(
    case: Annotated[str, typer.Argument(help="The id of a case.")],
    reason: Annotated[str, typer.Option(help="Why its change is right; the baseline keeps it.")],
    current: Annotated[Path, typer.Option(help="The run that has the change.")] = Path("reports/latest"),
    baseline: Annotated[Path, typer.Option(help="The run that others are compared with.")] = Path(
        "reports/baseline"
    ),
) -> None:
    """Expects of one case, from now on, what it did in CURRENT: that row takes the place of the one in BASELINE.

    A case that CURRENT does not have is expected no more. One that fails is refused: known_failures of the zoo is the
    place for it, with the stage and the message.
    """
    with _one_line_errors():
        store.accept(case, reason, current, baseline)
    typer.echo(f"{store.file_of(baseline)}: {case} is accepted: {reason}")


@app.command("baseline")
def baseline_command(
    run: Run,
    directory: Annotated[Path, typer.Option(help="Where baselines are kept.")] = Path("reports/baseline"),
) -> None:
    """Makes a run the one that others are compared with; refuses one in which cases failed, unless it is a sweep.

    The baseline of a sweep says what is captured and what is not: it is kept with its page.
    """
    with _one_line_errors():
        table = store.read_run(run)
        sweep = architectures.is_sweep(table)
        failed = int(table["outcome"].isin(FAILING).sum())
        if failed and not sweep:
            raise store.ReportError(f"{run}: {failed} cases failed, so that it cannot be a baseline")
        directory.mkdir(parents=True, exist_ok=True)
        store.replace(
            directory / f"{'architectures' if sweep else 'records'}.parquet", store.file_of(run).read_bytes()
        )
        if sweep:
            page = architectures.document(table).encode("utf-8")
            store.replace(directory / "architectures.md", page)
    typer.echo(f"{directory}: {len(table)} cases of run {table['run'].iloc[0]}")


@app.command("history")
def history_command(
    directory: Annotated[Path, typer.Argument(help="The directory with one Parquet file a run.")],
    case: Annotated[str, typer.Option(help="Follow one case, by its id.")] = "",
    measurement: Annotated[str, typer.Option(help="What to follow of it.")] = "latency_ratio",
) -> None:
    """One line a run, oldest first, and what drifted; with --case, one measurement of it run by run."""
    with _one_line_errors():
        table = store.history(directory)
        _print(trend.follow(table, case, measurement) if case else trend.runs(table))
    drifted = trend.drift(table, measurement)
    if not case and not drifted.empty:
        typer.echo(f"{measurement} drifted in {len(drifted)} cases:")
        _print(drifted)


@app.command("sites")
def sites_command(
    zoo: Annotated[Path, typer.Option(help="The zoo file.")] = Path("model_zoo.yaml"),
    model: Annotated[list[str] | None, typer.Option(help="Only this, repeatable; default: all.")] = None,
) -> None:
    """Counts the sites that each pass rewrites alone in each model, and records them beside the zoo file."""
    with _one_line_errors():
        for line in sites.record(zoo, model or ()):
            typer.echo(line)


def _beside(run: Path) -> Path:
    """Where the views of a run belong: a run of the history, among others, has a directory of its own."""
    if run.is_dir():
        return run
    return run.parent if run.name == "records.parquet" else run.with_suffix("")


@contextlib.contextmanager
def _one_line_errors() -> Iterator[None]:
    """A wrong file or name is the user's to mend: one line on stderr, exit status 2."""
    with warnings.catch_warnings(record=True) as caught:
        try:
            yield
        except (FxoptError, OSError) as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from error
        finally:
            for warning in caught:
                typer.echo(f"warning: {warning.message}", err=True)


def _stop_for(problems: list[str]) -> None:
    for problem in problems:
        typer.echo(f"error: {problem}", err=True)
    if problems:
        raise typer.Exit(2)


def _print(table: pd.DataFrame) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=10_000)  # a file or a pipe has no edge at which to wrap
    view = Table(*(Column(str(name), overflow="fold") for name in table.columns), box=box.SIMPLE_HEAD)
    for row in table.itertuples(index=False, name=None):
        view.add_row(*(escape(f"{value:.4g}" if isinstance(value, float) else str(value)) for value in row))
    console.print(view)


if __name__ == "__main__":
    app()
