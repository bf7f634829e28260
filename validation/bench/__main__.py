"""The command line: one sub-command a benchmark, each in its own file."""

from __future__ import annotations

import typer

from .ablation import ablation
from .capture import capture
from .fleet import fleet
from .modes import memory
from .passes import passes
from .peers import peers
from .presets import presets
from .profile import profile
from .runs import runs
from .verification import verification

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def main() -> None:
    """Measure what fxopt takes, with its peers beside it, in interleaved runs."""


app.command()(ablation)
app.command()(capture)
app.command()(fleet)
app.command()(memory)
app.command()(passes)
app.command()(peers)
app.command()(presets)
app.command()(profile)
app.command()(runs)
app.command()(verification)

if __name__ == "__main__":
    app()
