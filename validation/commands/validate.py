"""`fxopt validate`: pytest over the cases of a zoo, with the options of a command."""

from __future__ import annotations

import re

import pytest
import typer

from pytest_fxopt import OPTIONS

EVERYTHING_ELSE = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Arguments that are not options of the command go to pytest."""

STATUS = {
    pytest.ExitCode.INTERRUPTED: (
        130,
        "interrupted: with --resume, the rest is run, where no tracked file has changes",
    ),
    pytest.ExitCode.USAGE_ERROR: (2, ""),
    pytest.ExitCode.NO_TESTS_COLLECTED: (2, "no case is chosen: --collect-only lists them"),
}
"""Replacements for exit statuses of pytest, each with a message; other statuses stay."""


_LINES = (f"--{name} " + f"{how.get('metavar', '')}  {how['help']}".strip() for name, how in OPTIONS.items())
HELP = "\n\n".join(["Options of the run:", *_LINES])
_WITH_VALUE = "|".join(f"--fx-{name}" for name, how in OPTIONS.items() if "const" not in how)


def validate(context: typer.Context) -> None:
    """Run every case of a zoo: each model with each pass, with pairs of passes, and with all passes.

    pytest and its messages use these options with the prefix --fx-. All other options go to pytest: -n auto for one process
    a core, -k, -x, --lf, -q. Exit status: 0; 1 if a case fails; 2 for a mistake, or if no case is chosen; 130 if
    interrupted.
    """
    given = [re.sub(rf"^--({'|'.join(OPTIONS)})(?=$|=)", r"--fx-\1", each) for each in context.args]
    # Join options and values with `=`: otherwise pytest uses a value that names a folder as its root.
    for place in reversed(range(len(given) - 1)):
        if re.fullmatch(_WITH_VALUE, given[place]):
            given[place : place + 2] = [f"{given[place]}={given[place + 1]}"]
    # This process has imported fxopt already, so pytest cannot rewrite its assertions and would warn.
    quiet = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    arguments = [*quiet, "-p", "pytest_fxopt", "--pyargs", str(__package__).rpartition(".")[0], *given]
    ended = pytest.main(arguments)
    status, advice = STATUS.get(pytest.ExitCode(ended), (int(ended), ""))
    typer.echo(advice, err=True, nl=bool(advice))
    raise typer.Exit(status)
