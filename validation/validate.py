"""`fxopt validate`: pytest over the cases of a zoo, with the options of a command."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated

import pytest
import typer

from .console import Json, print_json
from .gather import received
from .records import Record


class _Records:
    """A plugin that keeps the records of a run."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        record = received(report.user_properties) if report.when == "call" else None
        if record is not None:
            self.records.append(record)


EVERYTHING_ELSE = {"allow_extra_args": True, "ignore_unknown_options": True}
"""All that is no option of the command goes to pytest."""

STATUS = {
    pytest.ExitCode.INTERRUPTED: 130,
    pytest.ExitCode.USAGE_ERROR: 2,
    pytest.ExitCode.NO_TESTS_COLLECTED: 2,
}
"""The exit statuses that pytest's become; the others stay."""


def validate(
    context: typer.Context,
    zoo: Annotated[
        str | None, typer.Option(help="The zoo file, or `transformers`. Default: model_zoo.yaml.")
    ] = None,
    passes: Annotated[
        list[str] | None,
        typer.Option("--pass", help="Only pipelines with this: a name, or my.passes.MyPass."),
    ] = None,
    pipeline: Annotated[
        list[str] | None, typer.Option(help="Only this: a name in the zoo, all, exact, or A+B.")
    ] = None,
    model: Annotated[list[str] | None, typer.Option(help="Only this, repeatable.")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="Only models with this tag, repeatable.")] = None,
    device: Annotated[list[str] | None, typer.Option(help="cpu or cuda. Default: all there are.")] = None,
    part: Annotated[str | None, typer.Option(help="K/N: of the models each Nth, from the Kth on.")] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds that a case may take.")] = None,
    timing: Annotated[
        float | None, typer.Option(help="Seconds of turns for all that is timed of a model. Default: 8.")
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="ray: on a cluster. Default: processes of this machine.")
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="HOST:PORT of the cluster, or auto. Default: one is started here.")
    ] = None,
    budget: Annotated[float | None, typer.Option(help="Seconds after which the run ends.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was cut.")] = False,
    report_dir: Annotated[Path | None, typer.Option(help="Where to write. Default: reports.")] = None,
    as_json: Json = False,
) -> None:
    """Run every case of a zoo: each model with each pass, with pairs, and with all of them.

    All other options go to pytest: -n auto for as many processes as there are cores, -k, -x, --lf, -q. Exit status: 0;
    1 when a case fails; 2 for a mistake, also where no case is chosen; 130 when interrupted.
    """
    single = {"zoo": zoo, "part": part, "timeout": timeout, "timing": timing, "report-dir": report_dir}
    single |= {"engine": engine, "address": address, "budget": budget}
    many = {"pass": passes, "pipeline": pipeline, "model": model, "tag": tag, "device": device}
    options = [f"--fx-{name}={value}" for name, value in single.items() if value is not None]
    options += [f"--fx-{name}={value}" for name, values in many.items() for value in values or ()]
    options += ["--fx-resume"] * resume
    found = _Records()
    # This process has imported fxopt already, so pytest cannot rewrite its assertions, and need not say so.
    quiet = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    arguments = [*quiet, "-p", "pytest_fxopt", "--pyargs", str(__package__), *options, *context.args]
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        ended = pytest.main(arguments, plugins=[found])
    status = STATUS.get(pytest.ExitCode(ended), int(ended))
    if as_json:
        outcomes = Counter(str(record.outcome) for record in found.records)
        cases = [record.to_json() for record in found.records]
        print_json({"status": status, "outcomes": outcomes, "cases": cases})
    raise typer.Exit(status)
