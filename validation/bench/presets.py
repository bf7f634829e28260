"""`python -m validation.bench presets`: each model of the zoo beside itself after fxopt.optimize, in every precision."""

from __future__ import annotations

import functools
import importlib.util
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
import typer

import fxopt
import fxopt.passes
from fxopt.optimizing.prepare import PRECISIONS

from ..report.markdown import pipes
from ..timing import Others, cores, in_random_order, ratio
from ..zoo import digits
from ..zoo.build import build_model, make_inputs
from ..zoo.entry import Entry, TrainedWeights
from ..zoo.sources import load_zoo
from . import machine
from .engines import quiet
from .machine import write
from .workloads import named

_LONG = 2e-3  # seconds that a turn takes at least, so that the clock does not matter


def presets(
    models: Annotated[str, typer.Option(help="Models of the zoo, separated by commas; empty for all.")] = "",
    precision: Annotated[str, typer.Option(help="Precisions, separated by commas; empty for all.")] = "",
    seconds: Annotated[float, typer.Option(help="How long the rounds of each model go on.")] = 5.0,
    threads: Annotated[int, typer.Option(help="Threads; 0 for all cores.")] = 0,
    zoo: Annotated[Path, typer.Option(help="The zoo file.")] = Path("model_zoo.yaml"),
    out: Annotated[Path, typer.Option(help="Where presets.md is written.")] = Path("reports/baseline"),
) -> None:
    """Eager's time by that of the optimized model, ratios of the same round in random order, and accuracy on digits.

    The machine should be idle: a model that was measured while it was not is marked.
    """
    torch.set_num_threads(threads or cores())
    entries = {entry.name: entry for entry in load_zoo(zoo, fxopt.passes.available())}
    kinds, rows = named(precision, PRECISIONS, "precision"), []
    for name in named(models, entries):
        package = entries[name].requires
        if package is not None and importlib.util.find_spec(package) is None:
            rows.append({"model": name, "eager, ms": f"left out: {package} is not installed"})
        else:
            with quiet():
                rows.append({"model": name} | _measured(entries[name], kinds, seconds))
        typer.echo(rows[-1], err=True)
    write(
        "presets",
        out,
        "The models of the zoo after `fxopt.optimize`",
        "Each number is eager's time by that of the optimized model, in the same round: the median with its 95 % bootstrap "
        "interval. `eager, again` is the model once more: as far as it is from 1, the measurement is off. Where no graph is "
        "faster, the model itself runs.",
        pipes(pd.DataFrame(rows).fillna("-")),
    )


@torch.no_grad()
def _measured(entry: Entry, kinds: list[str], seconds: float) -> dict[str, str]:
    """The cells of a model: the ratio of each precision, and its accuracy where the model was trained."""
    with torch.enable_grad():
        model, inputs = build_model(entry), make_inputs(entry)
    fast: dict[str, Any] = {kind: fxopt.optimize(model, (), inputs, precision=kind) for kind in kinds}
    turns = {
        name: _turn(run, inputs) for name, run in {"eager": model, "eager, again": model, **fast}.items()
    }
    others = Others()
    times = in_random_order(turns, 10, seconds, np.random.default_rng(0))
    cells = {"eager, ms": f"{1e3 * float(np.median(times['eager'])):.2f}"}
    for name in [*turns][1:]:
        itself = " (the model itself)" if name in fast and fast[name].report[-1].reason else ""
        cells[name] = f"{ratio(times['eager'], times[name])}{itself}"
    if isinstance(entry.weights, TrainedWeights):
        batch = len(next(iter(inputs.values())))
        found = {
            name: digits.accuracy(run, torch.float32, "cpu", batch)
            for name, run in {"eager": model, **fast}.items()
        }
        cells["accuracy on digits"] = ", ".join(f"{name} {share:.1%}" for name, share in found.items())
    return cells | {"idle": "yes" if others.cores() <= machine.BUSY else "no ⚠️"}


def _turn(run: Callable[..., Any], inputs: dict[str, Any]) -> Callable[[], float]:
    """The seconds of a call, the mean of as many as fill a turn."""
    timer = timeit.Timer(functools.partial(run, **inputs))
    timer.timeit(3)
    calls = max(1, int(_LONG / timer.timeit(1)))

    def turn() -> float:
        run(**inputs)  # brings its weights back into the caches
        return timer.timeit(calls) / calls

    return turn
