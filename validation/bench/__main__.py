"""The command line: one sub-command a benchmark, each in its own file."""

from __future__ import annotations

import typer

from .capture import capture
from .zoo import zoo

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def main() -> None:
    """Measure captures and `fxopt.optimize` in comparison with their peers."""


for command in (capture, zoo):
    app.command()(command)

if __name__ == "__main__":
    app()
