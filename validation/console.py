"""How commands talk: tables for people, JSON for programs, and one line for what the user can mend."""

from __future__ import annotations

import contextlib
import json
import math
import warnings
from collections.abc import Iterator
from typing import Annotated, Any

import pandas as pd
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from fxopt.errors import FxoptError

Json = Annotated[bool, typer.Option("--json", help="Print data for programs.")]


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


def print_json(data: object) -> None:
    """JSON has neither NaN nor infinities: they become null."""
    typer.echo(json.dumps(_finite(data), indent=1, allow_nan=False))


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {name: _finite(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def print_table(table: pd.DataFrame) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=10_000)  # a file or a pipe has no edge at which to wrap
    view = Table(*(Column(str(name), overflow="fold") for name in table.columns), box=box.SIMPLE_HEAD)
    for row in table.itertuples(index=False, name=None):
        view.add_row(*(escape(f"{value:.4g}" if isinstance(value, float) else str(value)) for value in row))
    console.print(view)
