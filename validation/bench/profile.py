"""`python -m validation.bench profile`: where the time of an optimized model goes, node by node, beside the GEMM peak."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from torch import Tensor, nn
from torch.fx import Interpreter, Node

import fxopt
from fxopt.capture import TracedModule
from fxopt.operators import name_of
from fxopt.optimizing.lowering import functions_of, lowered
from fxopt.optimizing.prepare import PRECISIONS, Options, pipeline

from ..report.markdown import pipes
from ..timing import Others, cores
from . import machine
from .engines import fresh
from .machine import write
from .workloads import Workload, chosen

_ROUNDS = 3  # the first ones only warm up


def profile(
    models: Annotated[
        str, typer.Option(help="Models by name, separated by commas.")
    ] = "bert-1x128,resnet50-1,groupvit",
    precision: Annotated[str, typer.Option(help=f"One of {', '.join(PRECISIONS)}.")] = "float32",
    threads: Annotated[int, typer.Option(help="Threads; 0 for all cores.")] = 0,
    seconds: Annotated[float, typer.Option(help="How long the runs of each model go on.")] = 10.0,
    rows: Annotated[int, typer.Option(help="How many operators, and layers, to list.")] = 12,
    small: Annotated[bool, typer.Option(help="Tiny models, to try the benchmark out.")] = False,
    out: Annotated[Path, typer.Option(help="Where profile.md is written.")] = Path("reports/baseline"),
) -> None:
    """The time of each operator and layer of an optimized model, and how near its products come to the GEMM peak.

    The machine should be idle: a run on one that is not is marked.
    """
    torch.set_num_threads(threads or cores())
    parts = [_section(name, workload, precision, seconds, rows) for name, workload in chosen(models, small)]
    write(
        "profile",
        out,
        "Where the time of optimized models goes",
        "Each node of the graph that `fxopt.optimize` makes is timed by itself, and the medians are summed: by operator, and "
        "for linear layers and convolutions by layer. The peak is the best product of two float32 matrices (1024 or 2048 "
        "square) in the same process.",
        *parts,
        how=f"{precision}, ",
    )


def _section(name: str, workload: Workload, precision: str, seconds: float, rows: int) -> str:
    traced = fxopt.trace(workload.model, (), workload.inputs, verify=False)
    for pass_ in pipeline(Options(precision, tune=True)):
        pass_.commit(traced)
    traced.recompile()
    lowered(traced)  # packs the weights, and moves them to huge pages
    others = Others()
    with torch.no_grad():
        table = _timed(traced, workload.inputs, seconds)
    peak, busy, whole = machine.gemm_peak(), others.cores(), table["seconds"].sum()
    idle = "" if busy <= machine.BUSY else f" ⚠️ Other processes used {busy:.1f} cores."
    layers = table[table["flops"] > 0]
    return (
        f"## {name}\n\n{len(table)} nodes take {1e3 * whole:.1f} ms; float32 matrix products reach "
        f"{peak / 1e9:.0f} GFLOP/s.{idle}\n\n"
        f"{pipes(_summed(table, ['operator'], whole, peak).head(rows))}\n\n"
        f"{pipes(_summed(layers, ['layer', 'input'], whole, peak).head(rows))}"
    )


def _timed(traced: TracedModule, inputs: Mapping[str, Any], seconds: float) -> pd.DataFrame:
    """A row for each node that computes: its operator, layer, shape of the input, operations, and median seconds.

    The function of a graph has nodes of its own as well, which make masks ready.
    """
    run = _Timed(traced)
    begun = time.perf_counter()
    while len(run.rounds) < 2 * _ROUNDS or time.perf_counter() - begun < seconds:
        given = fresh(inputs)
        placeholders = traced.graph.find_nodes(op="placeholder")
        run.rounds.append({})
        run.run(*(given.get(str(node.target), *node.args) for node in placeholders))
    median = pd.DataFrame(run.rounds[_ROUNDS:]).median()
    rows = []
    for name, took in median.items():
        node = run.nodes.get(str(name))
        operator, layer = (_operator(traced, node), _layer(traced, node)) if node else (name, "")
        rows.append((operator, layer, run.shapes.get(str(name), ""), run.flops.get(str(name), 0), took))
    return pd.DataFrame(rows, columns=["operator", "layer", "input", "flops", "seconds"])


class _Timed(Interpreter):
    """Runs what `optimize` runs for a graph, and takes the time of each node."""

    def __init__(self, traced: TracedModule) -> None:
        super().__init__(traced, graph=functions_of(traced, {}))
        self.rounds: list[dict[str, float]] = []
        self.shapes: dict[str, str] = {}
        self.flops: dict[str, int] = {}
        self.nodes = {node.name: node for node in traced.graph.nodes}

    def run_node(self, n: Node) -> Any:
        if n.op in ("placeholder", "output"):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        start = time.perf_counter()
        value = getattr(self, n.op)(n.target, args, kwargs)
        self.rounds[-1][n.name] = time.perf_counter() - start
        node = self.nodes.get(n.name)
        if node is not None and node.op == "call_module" and isinstance(value, Tensor):
            layer = self.fetch_attr(str(node.target))
            if isinstance(layer, nn.Linear | nn.Conv2d):
                self.shapes[n.name] = " x ".join(map(str, args[0].shape))
                self.flops[n.name] = 2 * value.numel() * layer.weight[0].numel()
        return value


def _operator(traced: TracedModule, node: Node) -> str:
    if node.op != "call_module":
        return name_of(node) or getattr(node.target, "__name__", str(node.target))
    module = traced.get_submodule(str(node.target))
    return type(module).__name__ + (f", {module.kernel}" if hasattr(module, "kernel") else "")


def _layer(traced: TracedModule, node: Node) -> str:
    """The layer that a node calls with what it does besides, the same for all that are alike."""
    if node.op != "call_module":
        return ""
    activation = node.kwargs.get("activation")
    added = " + add" if node.kwargs.get("other") is not None else ""
    return f"{traced.get_submodule(str(node.target))!r}{added}{f' + {activation}' if activation else ''}"


def _summed(table: pd.DataFrame, by: list[str], whole: float, peak: float) -> pd.DataFrame:
    grouped = table.groupby(by, sort=False).agg(
        calls=("seconds", "size"), seconds=("seconds", "sum"), flops=("flops", "sum")
    )
    grouped = grouped.sort_values("seconds", ascending=False).reset_index()
    rate = grouped["flops"] / grouped["seconds"]
    texts = [f"{each / 1e9:.0f} ({each / peak:.0%})" if each else "-" for each in rate]
    return grouped[[*by, "calls"]].assign(
        **{
            "ms": [f"{1e3 * each:.2f}" for each in grouped["seconds"]],
            "share": [f"{each / whole:.1%}" for each in grouped["seconds"]],
            "GFLOP/s (of GEMM)": texts,
        }
    )
