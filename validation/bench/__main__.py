"""The command line: one sub-command a benchmark, each in its own file."""

from __future__ import annotations

import typer

from .capture import capture
from .passes import passes, verification
from .profile import profile
from .users import users
from .zoo import zoo

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def main() -> None:
    """Measure what fxopt takes, with its peers beside it, in interleaved runs."""


for command in (capture, passes, profile, users, verification, zoo):
    app.command()(command)

if __name__ == "__main__":
    app()
