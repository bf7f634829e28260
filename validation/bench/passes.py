"""How long the passes take per layer, from few layers to many, beside those of optimum."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from fxopt.passes import available

from .layered import Times, times


def passes(
    layers: Annotated[str, typer.Option(help="Numbers of layers, separated by commas.")] = "12,24,48,96,192",
    rounds: Annotated[int, typer.Option(help="Counted rounds, of which the fastest is shown.")] = 3,
    optimum: Annotated[
        str, typer.Option(help="The python of an environment with optimum.fx, if this one has none.")
    ] = "",
) -> None:
    """Time each pass and its undo per layer: constant where a pass is linear in the graph."""
    torch.set_num_threads(1)
    counts = [int(count) for count in layers.split(",")]
    ours = times({name: cls() for name, cls in available().items()}, counts, rounds)
    theirs = _of_optimum(optimum, counts, rounds)
    Console().print(_table(ours, theirs, counts))


def _of_optimum(python: str, counts: list[int], rounds: int) -> Times | None:
    """The times of optimum's passes, from a process of its own; `None` where it is not installed."""
    if not python and not _has_optimum():
        return None
    command = [python or sys.executable, "-W", "ignore", "-m", f"{__package__}.optimum_passes", str(rounds)]
    root = Path(__file__).parent.parent.parent
    done = subprocess.run([*command, *map(str, counts)], cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise typer.BadParameter(f"{command[0]} cannot run optimum.fx: {done.stderr.strip()[-400:]}")
    found: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return {name: {int(count): value for count, value in row.items()} for name, row in found.items()}


def _has_optimum() -> bool:
    return importlib.util.find_spec("optimum") is not None and (
        importlib.util.find_spec("optimum.fx") is not None
    )


def _table(ours: Times, theirs: Times | None, counts: list[int]) -> Table:
    """One row a pass and direction; the last columns say how the time per layer grows from first to last."""
    peer = "optimum" if theirs is not None else "optimum (not installed)"
    table = Table(
        *("pass", *(f"{count} layers" for count in counts), "growth", peer, "growth"),
        title=f"milliseconds of processor time per layer, torch {torch.__version__}; optimum at {counts[-1]} layers",
    )
    for name, row in ours.items():
        other = (theirs or {}).get(name)
        cells = [f"{1000 * row[count] / count:.2f}" for count in counts]
        last = f"{1000 * other[counts[-1]] / counts[-1]:.2f}" if other else ""
        table.add_row(name, *cells, f"{_growth(row):.2f}", last, f"{_growth(other):.2f}" if other else "")
    return table


def _growth(row: dict[int, float]) -> float:
    """How much more a layer takes among the most layers than among the fewest."""
    return (row[max(row)] / max(row)) / (row[min(row)] / min(row))
