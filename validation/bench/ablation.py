"""`python -m validation.bench ablation`: what each pass of `fxopt.optimize` is worth, by leaving it out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
import typer

import fxopt
from fxopt.optimizing.lowering import lowered
from fxopt.optimizing.prepare import PRECISIONS, Options, pipeline

from ..report.markdown import pipes
from ..timing import Others, cores, in_random_order, ratio, second_of_two
from . import machine
from .engines import fresh
from .machine import write
from .workloads import Workload, chosen

ALL, AGAIN, PLAIN = "all passes", "all passes, again", "none, as captured"


def ablation(
    models: Annotated[
        str, typer.Option(help="Models by name, separated by commas.")
    ] = "bert-1x128,resnet50-1,groupvit",
    precision: Annotated[str, typer.Option(help=f"One of {', '.join(PRECISIONS)}.")] = "float32",
    threads: Annotated[int, typer.Option(help="Threads; 0 for all cores.")] = 0,
    seconds: Annotated[float, typer.Option(help="How long the rounds of each model go on.")] = 30.0,
    out: Annotated[Path, typer.Option(help="Where ablation.md is written.")] = Path("reports/baseline"),
) -> None:
    """How much longer a model takes without each pass of fxopt.optimize: ratios of the same round, in random order.

    The machine should be idle: a run on one that is not is marked.
    """
    torch.set_num_threads(threads or cores())
    tables = [_measured(name, workload, precision, seconds) for name, workload in chosen(models)]
    table = pd.concat(tables, axis=1).fillna("-").rename_axis("without").reset_index()
    write(
        "ablation",
        out,
        "What each pass of `fxopt.optimize` is worth",
        "Each number is the time of a graph without one pass by that of the graph with all of them, in the same round: the "
        "median with its 95 % bootstrap interval, so 1.10 says that the pass is worth 10 %. `-` says that the pass changes "
        f"nothing there. `{AGAIN}` is the graph with all passes once more: as far as it is from 1, the measurement is off. "
        "The passes after one that is left out find other sites than before.",
        pipes(table),
        how=f"{precision}, ",
    )


def _measured(name: str, workload: Workload, precision: str, seconds: float) -> pd.DataFrame:
    """A row for each pass that has sites: the model's time without it by that with all passes."""
    passes = pipeline(Options(precision, tune=True))
    runs = {ALL: _graph(workload, passes), AGAIN: _graph(workload, passes), PLAIN: _graph(workload, [])}
    for pass_ in passes:
        without = _graph(workload, [each for each in passes if each is not pass_])
        if without.traced.code != runs[ALL].traced.code:
            runs[type(pass_).__name__] = without
    others = Others()

    def turn(run: Any) -> Callable[[], float]:
        return second_of_two(lambda inputs: run(**inputs), lambda: fresh(workload.inputs))

    turns = {label: turn(run) for label, run in runs.items()}
    with torch.no_grad():
        times = in_random_order(turns, 10, seconds, np.random.default_rng(0))
    busy = others.cores()
    cells = {label: str(ratio(times[label], times[ALL])) for label in runs}
    column = f"{name}, {1e3 * float(np.median(times[ALL])):.0f} ms" + (
        " (not idle)" if busy > machine.BUSY else ""
    )
    return pd.DataFrame({column: cells}).drop(index=ALL)


def _graph(workload: Workload, passes: list[Any]) -> Any:
    traced = fxopt.trace(workload.model, (), workload.inputs, verify=False)
    for pass_ in passes:
        traced = pass_(traced, lint_and_recompile=False)
    traced.recompile()
    return lowered(traced)
