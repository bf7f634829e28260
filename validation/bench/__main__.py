"""The command line: one sub-command a benchmark, each in its own file."""

from __future__ import annotations

import typer

from validation.bench.ablation import ablation
from validation.bench.capture import capture
from validation.bench.passes import passes
from validation.bench.peers import peers
from validation.bench.runs import runs
from validation.bench.verification import verification

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def main() -> None:
    """Measure what fxopt takes, with its peers beside it, in interleaved runs."""


app.command()(ablation)
app.command()(capture)
app.command()(passes)
app.command()(peers)
app.command()(runs)
app.command()(verification)

if __name__ == "__main__":
    app()
