"""The commands of `fxopt` that belong to the harness; `fxopt.command_line` has the others, and forwards to these."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from .. import report, store
from ..records import FAILING, counted
from ..regressions import trend
from ..regressions.compare import VANISHED
from ..report import architectures, headline
from .console import one_line_errors, print_table
from .validate import EVERYTHING_ELSE, HELP, validate
from .zoo_commands import captured, zoo_app

__all__ = ["app", "captured", "run"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
app.command("validate", context_settings=EVERYTHING_ELSE, epilog=HELP)(validate)
app.add_typer(zoo_app, name="zoo")


Run = Annotated[
    Path, typer.Argument(help="A run: its Parquet file or journal, or the directory with records.parquet.")
]


def run(arguments: Sequence[str]) -> int:
    """Run one of these commands and return its exit status."""
    try:
        app(list(arguments), prog_name="fxopt")
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else 0
    return 0


@app.command("report")
def report_command(
    run: Run,
    output: Annotated[Path | None, typer.Option(help="Where to write; default: beside the run.")] = None,
) -> None:
    """Write the Markdown and HTML views of a run, from its table only."""
    with one_line_errors():
        table = store.read_run(run)
        history = max((place / "history" for place in run.resolve().parents[:2]), key=Path.is_dir)
        written = report.write_views(table, output or _beside(run), history)
    _say_what_is_written(table, written)


PART = "CURRENT is a part: what it lacks has not vanished. By default so where planned cases did not run."


@app.command("compare")
def compare_command(
    baseline: Run,
    current: Run,
    part: Annotated[bool | None, typer.Option(help=PART)] = None,
) -> None:
    """Report the changes from BASELINE to CURRENT. Exit status: 0, or 1 if something got worse, or 2 for a mistake.

    `docs/files.md` defines what counts as worse. Latencies are judged over many runs, in the report and by `fxopt history`.
    """
    with one_line_errors():
        old, new = store.read_run(baseline), store.read_run(current)
        if set(old["id"]).isdisjoint(new["id"]):
            raise store.ReportError(f"{current}: has no case of {baseline}, so that nothing can be compared")
        since = headline.compared(old, new, part=part)
    found = since.changes
    typer.echo("\n".join(report.worse_lines(since)))
    for *words, before, after, why in headline.marked(found).itertuples(index=False, name=None):
        typer.echo("  ".join(filter(None, [*words, " → ".join(filter(None, [before, after])), why])))
    typer.echo(headline.changed(found))
    lacking = len({*old["id"]} - {*new["id"]})
    if lacking and not (found["kind"] == VANISHED).any():
        typer.echo(
            f"{current} is a part: {counted(lacking, 'case')} of {baseline} did not run; --no-part counts them"
        )
    if found["regression"].any():
        raise typer.Exit(1)


PARTS = typer.Argument(help="Parts of a run, reruns, and journals of runs that were cut.")
REPORTS = typer.Option(help="The folder of reports: latest/, and history/ of whole runs.")


@app.command("merge")
def merge_command(runs: Annotated[list[Path], PARTS], output: Annotated[Path, REPORTS]) -> None:
    """Join runs by case; later rows replace earlier ones. Merging the same runs again changes nothing."""
    with one_line_errors():
        table = store.merge([store.read_table(run) for run in runs])
        written = report.write_run(table, output)
    _say_what_is_written(table.to_pandas(), written)


@app.command("accept")
def accept_command(
    name: Annotated[str, typer.Argument(help="The id of a case, or a model: all its cases.")],
    reason: Annotated[str, typer.Option(help="Why its change is right; the baseline keeps it.")],
    current: Annotated[Path, typer.Option(help="The run that has the change.")] = Path("reports/latest"),
    baseline: Annotated[Path, typer.Option(help="The run to compare with.")] = Path("reports/baseline"),
) -> None:
    """Accept what a case or a model did in CURRENT: its rows replace those in BASELINE.

    Cases that CURRENT lacks are removed from BASELINE. A case that fails is refused: add it to known_failures of the zoo,
    with its check, pipeline and reason.
    """
    with one_line_errors():
        store.accept(name, reason, current, baseline)
    typer.echo(f"{store.file_of(baseline)}: {name} is accepted: {reason}")


@app.command("baseline")
def baseline_command(
    run: Run,
    directory: Annotated[Path, typer.Option(help="Where baselines are kept.")] = Path("reports/baseline"),
) -> None:
    """Make a run the baseline; refuse a partial run, and a run with failed cases unless it is a sweep.

    The baseline of a sweep lists the models that are captured and those that are not; it is kept with its page.
    """
    with one_line_errors():
        rows = store.merge([store.read_table(run)])
        table = rows.to_pandas()
        sweep = headline.is_sweep(table)
        failed = int(table["outcome"].isin(FAILING).sum())
        if failed and not sweep:
            raise store.ReportError(
                f"{run}: {counted(failed, 'case')} failed, so that it cannot be a baseline"
            )
        if lacking := store.missing(table):
            raise store.ReportError(
                f"{run}: a part of a run, which lacks {counted(lacking, 'planned case')}; "
                "`fxopt merge` joins parts"
            )
        file = store.write_table(rows, directory, "architectures" if sweep else "records")
        if sweep:
            store.replace(file.with_suffix(".md"), architectures.document(table).encode("utf-8"))
    typer.echo(f"{directory}: {counted(len(table), 'case')} of run {table['run'].iloc[0]}")


@app.command("history")
def history_command(
    directory: Annotated[Path, typer.Argument(help="The directory with one Parquet file a run.")],
    case: Annotated[str, typer.Option(help="Follow one case, by its id.")] = "",
) -> None:
    """List one line a run, oldest first, and lasting changes of latencies; with --case, one case run by run."""
    with one_line_errors():
        table = store.history(directory)
        lines = trend.follow(table, case) if case else trend.runs(table)
    print_table(lines)
    if case:
        return
    changed = trend.latencies([run for _, run in table.groupby("run", sort=False)])
    if not changed.empty:
        typer.echo(f"The latency of {counted(len(changed), 'case')} changed for good:")
        print_table(changed)


def _beside(run: Path) -> Path:
    """The directory for the views of a run: a run in the history, next to others, has its own directory."""
    if run.is_dir():
        return run
    return run.parent if run.name == "records.parquet" else run.with_suffix("")


def _say_what_is_written(table: pd.DataFrame, written: report.Written) -> None:
    typer.echo(report.terminal_summary(table, written))
    for problem in written.problems:
        typer.echo(f"error: {problem}", err=True)
    if written.problems:
        raise typer.Exit(2)
