"""How commands talk: tables, and one line for what the user can mend."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import pandas as pd
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

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
    console = Console()
    if not console.is_terminal:
        console = Console(width=10_000)  # a file or a pipe has no edge at which to wrap
    view = Table(*(Column(str(name), overflow="fold") for name in table.columns), box=box.SIMPLE_HEAD)
    for row in table.itertuples(index=False, name=None):
        view.add_row(*(escape(f"{value:.4g}" if isinstance(value, float) else str(value)) for value in row))
    console.print(view)
