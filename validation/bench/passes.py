"""How long the passes take per layer, from few layers to many."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from fxopt.passes import available

from .layered import kind_for, traced

Times = dict[str, dict[int, float]]
"""`"<pass> apply"` or `"<pass> undo"` -> number of layers -> seconds."""


def passes(
    layers: Annotated[str, typer.Option(help="Numbers of layers, separated by commas.")] = "12,24,48,96,192",
    rounds: Annotated[int, typer.Option(help="Counted rounds, of which the fastest is shown.")] = 3,
) -> None:
    """Time each pass and its undo per layer: constant where a pass is linear in the graph."""
    torch.set_num_threads(1)
    counts = [int(count) for count in layers.split(",")]
    table = Table(
        *("pass", *(f"{count} layers" for count in counts), "growth"),
        title=f"milliseconds of processor time per layer, torch {torch.__version__}",
        caption="growth: how much more a layer takes among the most layers than among the fewest",
    )
    for name, row in times({name: cls() for name, cls in available().items()}, counts, rounds).items():
        each = [1000 * row[count] / count for count in counts]
        table.add_row(name, *(f"{ms:.2f}" for ms in each), f"{each[-1] / each[0]:.2f}")
    Console().print(table)


def times(passes: Mapping[str, Any], layers: list[int], rounds: int) -> Times:
    """The least time of several rounds for each pass on each number of layers, and for its undo."""
    found: Times = {}
    for count in layers:
        for name, pass_ in passes.items():
            fresh = traced(kind_for(name), count)
            for _ in range(rounds + 1):  # the first one imports and warms up
                graph_module = copy.deepcopy(fresh)
                runs: dict[str, dict[str, bool]] = {f"{name} apply": {}}
                if hasattr(pass_, "reverse"):
                    runs[f"{name} undo"] = {"reverse": True}
                for run, options in runs.items():
                    start = time.process_time()
                    graph_module = pass_(graph_module, **options)
                    seconds = time.process_time() - start
                    least = found.setdefault(run, {})
                    least[count] = min(seconds, least.get(count, seconds))
    return found
