"""How long passes take: per layer, from few layers to many, and the time that `verify=True` adds, in runs of BERT-base."""

from __future__ import annotations

import copy
import functools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch.fx import GraphModule
from transformers import BertConfig, BertModel, ResNetConfig, ResNetModel

import fxopt
from fxopt.passes import available
from fxopt.rewriting.history import history
from fxopt.rewriting.rewrite import Rewrite
from fxopt.submodules import sharing_copy

from ..timing import of_runs, spread
from .models import workload

Times = dict[str, dict[int, float]]
"""`"<pass> apply"` or `"<pass> undo"` -> number of layers -> seconds."""


def passes(
    layers: Annotated[str, typer.Option(help="Numbers of layers, separated by commas.")] = "12,24,48,96,192",
    rounds: Annotated[int, typer.Option(help="Counted rounds, of which the fastest is shown.")] = 3,
) -> None:
    """Time each pass and its undo per layer: constant where a pass is linear in the graph. Left out: passes without sites there."""
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
    """The least time of several rounds for each pass that has sites on each number of layers, and for its undo."""
    found: Times = {}
    for name, pass_ in passes.items():
        if (kind := kind_for(pass_)) is None:
            continue
        for count in layers:
            fresh = kind(count)
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


def verification(
    rounds: Annotated[int, typer.Option(help="Counted rounds.")] = 5,
    batch: Annotated[int, typer.Option(help="Sequences of 128 tokens in a run of the model.")] = 1,
) -> None:
    """Measure the time that verification adds to each pass on BERT-base, as multiples of one run of the model.

    In processor time of one thread, which other work on the machine changes little.
    """
    torch.set_num_threads(1)
    subject = workload("bert-base", batch)
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


def text(layers: int) -> GraphModule:
    """The graph of a narrow BERT of so many layers: small, so that the work on the graph is what is timed."""
    config = BertConfig(
        hidden_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=64,
        vocab_size=100,
        attn_implementation="eager",
    )
    ids = torch.ones(2, 8, dtype=torch.long)
    return fxopt.trace(BertModel(config).eval(), (ids,), verify=False)


def images(layers: int) -> GraphModule:
    """The graph of a narrow ResNet of so many layers."""
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[layers], layer_type="basic")
    return fxopt.trace(ResNetModel(config).eval(), (torch.ones(1, 3, 16, 16),), verify=False)


def kind_for(pass_: Any) -> Callable[[int], GraphModule] | None:
    """The first kind of graph in which a pass has sites."""
    return next((kind for kind in (text, images) if history(pass_(kind(2)))), None)
