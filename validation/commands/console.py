"""How commands talk: tables, and one line for what the user can mend."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import pandas as pd
import typer

from fxopt.errors import FxoptError


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
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


def print_table(table: pd.DataFrame) -> None:
    typer.echo(table.to_string(index=False, float_format="{:.4g}".format))
