"""`python -m validation.bench profile`: where the time of an optimized model goes, by operator and shape, as torch.profiler sees it."""

from __future__ import annotations

from typing import Annotated, Any

import torch
import typer
from torch.profiler import ProfilerActivity

import fxopt
from fxopt.optimizing.prepare import PRECISIONS

from ..timing import cores
from .machine import gemm_peak
from .models import fresh, named, workload, zoo

ROUNDS = 10


def profile(
    models: Annotated[
        str, typer.Option(help="Models by name, separated by commas.")
    ] = "bert-base,resnet-50,groupvit",
    precision: Annotated[str, typer.Option(help=f"One of {', '.join(PRECISIONS)}.")] = "float32",
    threads: Annotated[int, typer.Option(help="Threads; 0 for all cores.")] = 0,
    rows: Annotated[int, typer.Option(help="How many operators to list.")] = 20,
) -> None:
    """Print the time of each operator of an optimized model, and the best product of two float32 matrices beside it."""
    torch.set_num_threads(threads or cores())
    for name in named(models, zoo()):
        subject = workload(name)
        fast: Any = fxopt.optimize(subject.model, (), fresh(subject.inputs), precision=precision)
        with torch.no_grad():
            fast(**fresh(subject.inputs))
            with torch.profiler.profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
                for _ in range(ROUNDS):
                    fast(**fresh(subject.inputs))
        averages: Any = found.key_averages(group_by_input_shape=True)
        typer.echo(f"{name}: float32 matrix products reach {gemm_peak() / 1e9:.0f} GFLOP/s\n")
        typer.echo(averages.table(sort_by="self_cpu_time_total", row_limit=rows))
