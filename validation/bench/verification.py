"""The time that `verify=True` takes on BERT-base, in runs of the model."""

from __future__ import annotations

import functools
import statistics
import time
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch.fx import GraphModule

import fxopt
from fxopt.passes import available
from fxopt.rewriting.rewrite import Rewrite
from fxopt.submodules import sharing_copy

from ..timing import of_runs, spread
from .workloads import bert_base


def verification(
    rounds: Annotated[int, typer.Option(help="Counted rounds.")] = 5,
    batch: Annotated[int, typer.Option(help="Sequences of 128 tokens in a run of the model.")] = 1,
) -> None:
    """Measure the time that verification adds to each pass on BERT-base, as multiples of one run of the model.

    In processor time of one thread, which other work on the machine changes little.
    """
    torch.set_num_threads(1)
    subject = bert_base(batch, 128)
    free = fxopt.symbolic_trace(subject.model, list(subject.inputs))
    fixed = fxopt.trace(subject.model, (), subject.inputs)
    table = Table(
        *("pass", "sites", "free sizes, runs", "fixed sizes, runs"),
        title=f"time of verification by runs of BERT-base on {batch} x 128, median (least to greatest) of {rounds}",
    )
    for name, cls in available().items():
        if not issubclass(cls, Rewrite):
            continue
        sites = len(cls().explain(fixed).sites)
        cells = [
            spread(_runs(cls(), traced, functools.partial(fixed, **subject.inputs), rounds))
            for traced in (free, fixed)
        ]
        table.add_row(name, str(sites), *cells)
    Console().print(table)


def _runs(pass_: Rewrite[Any], traced: GraphModule, run: Any, rounds: int) -> list[float]:
    """The time of verification in each round, as multiples of one run of the model."""

    def apply(verify: bool) -> None:
        pass_(copies.pop(), verify=verify)

    copies = [sharing_copy(traced) for _ in range(2 * (rounds + 1))]
    with torch.no_grad():
        once, plain, verified = of_runs(
            [run, functools.partial(apply, False), functools.partial(apply, True)], rounds, time.process_time
        )
    return [
        max(0.0, with_ - without) / statistics.median(once)
        for with_, without in zip(verified, plain, strict=True)
    ]
