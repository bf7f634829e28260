"""`python -m validation.bench peers`: eager, fxopt and its peers on models at the sizes at which they are used."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer

from .. import store
from ..records import counted
from ..report.markdown import escape, pipes
from ..timing import cores
from . import machine
from .engine_rows import compare
from .engines import AGAIN, EAGER, PRECISIONS, engines
from .workloads import WORKLOADS, build, named

_PEERS = ("transformers", "onnxruntime", "onnxscript", "openvino")

CASE = ["model", "precision", "threads"]
"""The columns that say what was compared: one table each."""

INTRODUCTION = f"""\
`{EAGER}` is the model itself in float32 under `torch.no_grad()`. Every round runs all engines in a new random order, each \
twice, of which the second run counts. *Speed-up* is eager's time divided by the engine's own in the same round: the \
median with its 95 % bootstrap interval. `{AGAIN}` is the same model once more: as far as its speed-up is from 1, the \
measurement is off. All engines have the same number of threads, and those of others than torch do not wait actively \
(`session.intra_op.allow_spinning=0`), but for `onnxruntime, spinning`, which does so within a run, as is its default.

*GFLOP/s* counts matrix products and convolutions, also where an engine saves some; in brackets it is beside the best \
product of two float32 matrices (1024 or 2048 square) that torch reached in the same run. *First call* goes from the model \
in memory to the first result. *Error* is the largest difference to the model in float64, relative to the largest value \
of the output, in brackets as a multiple of eager's; *cosine* is the similarity to float64; both are of the worst output."""


def peers(
    models: Annotated[
        str, typer.Option(help="Models by name or its beginning, separated by commas; empty for all.")
    ] = "",
    precision: Annotated[
        str, typer.Option(help="Of float32, bfloat16 and int8, separated by commas.")
    ] = "float32",
    threads: Annotated[
        str, typer.Option(help="Numbers of threads, or `all`, separated by commas.")
    ] = "1,all",
    rounds: Annotated[int, typer.Option(help="The fewest rounds of each model.")] = 10,
    seconds: Annotated[float, typer.Option(help="Rounds go on for so long.")] = 60.0,
    out: Annotated[Path, typer.Option(help="Where peers.parquet and peers.md are written.")] = Path(
        "reports/baseline"
    ),
) -> None:
    """Latency, first call and exactness of fxopt beside its peers, in random interleaving.

    The machine should be idle: runs on one that is not are marked.
    """
    names = named(models, WORKLOADS, exact=False)
    precisions = named(precision, PRECISIONS, "precision")
    rows = [
        dataclasses.asdict(row)
        for name, kind, count in itertools.product(names, precisions, _threads(threads))
        for row in compare(
            (name, kind, count),
            build(name),
            engines(kind, count),
            rounds=rounds,
            seconds=seconds,
            say=functools.partial(typer.echo, err=True),
        )
    ]
    table = pd.DataFrame(rows)
    versions = ", ".join(f"{name} {found}" for name in _PEERS if (found := store.version(name)))
    machine.write("peers", out, "fxopt beside its peers", INTRODUCTION, *document(table), how=f"{versions}, ")
    store.replace(out / "peers.parquet", table.to_parquet(None, index=False))


def _threads(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part == "all" or (part.isdigit() and int(part)) for part in parts):
        raise typer.BadParameter(f"{text!r}: numbers of threads, or `all`, separated by commas")
    return list(dict.fromkeys(cores() if part == "all" else int(part) for part in parts))


def document(table: pd.DataFrame) -> list[str]:
    """The blocks of the page: of each case a heading, a mark where the machine was not idle, the table, and who is left out."""
    return [block for case, rows in table.groupby(CASE, sort=False) for block in _case(case, rows)]


def _case(case: Any, rows: pd.DataFrame) -> list[str]:
    model, precision, threads = case
    ran = rows[rows["reason"] == ""]
    first = ran.iloc[0]
    mark = "" if first["busy"] < machine.BUSY else "⚠️ **The machine was not idle**, so the times say little."
    return [
        f"## {model}, {precision}, {counted(threads, 'thread')}",
        mark,
        pipes(pd.DataFrame([_numbers(row) for _, row in ran.iterrows()])),
        f"{first['rounds']:,} rounds. Float32 matrix products reach {first['gemm_gflops']:,.0f} GFLOP/s; other processes "
        f"used {first['busy']:.2f} cores.",
        *(
            f"- Left out: {row['engine']}: {escape(row['reason'])}"
            for _, row in rows[rows["reason"] != ""].iterrows()
        ),
    ]


def _numbers(row: pd.Series) -> dict[str, str]:
    """One line of a table."""
    return {
        "engine": row["engine"],
        "median, ms": f"{row['median_ms']:,.2f}",
        "speed-up (95 %)": f"{row['speedup']:.2f} ({row['speedup_low']:.2f} to {row['speedup_high']:.2f})",
        "GFLOP/s (of GEMM)": f"{row['gflops']:,.1f} ({row['gflops'] / row['gemm_gflops']:.0%})",
        "first call, s": f"{row['first_call_s']:.2f}",
        "error (of eager's)": f"{row['error']:.1e} ({row['error_ratio']:.1f})",
        "cosine": f"{row['cosine']:.6f}",
    }
