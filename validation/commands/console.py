"""Output of commands: tables, and one line for an error that the user can fix."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import pandas as pd
import typer

from fxopt.errors import FxoptError


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Report errors that the user can fix, such as a wrong file or name, as one line on stderr with exit status 2."""
    with warnings.catch_warnings(record=True) as caught:
        try:
            yield
        except (FxoptError, OSError) as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from error
        finally:
            for warning in caught:
                typer.echo(f"warning: {warning.message}", err=True)


def print_table(table: pd.DataFrame) -> None:
    typer.echo(table.to_string(index=False, float_format="{:.4g}".format))
