"""`python -m validation.bench peers`: eager, fxopt and its peers on models at the sizes at which they are used."""

from __future__ import annotations

import dataclasses
import functools
import io
import itertools
import math
import platform
from pathlib import Path
from typing import Annotated, Any

import altair as alt
import pandas as pd
import typer

from .. import store
from ..records import counted
from ..report.markdown import escape, page, pipes
from ..report.wording import ABSENT
from ..timing import cores
from . import machine
from .engine_rows import Row, compare
from .engines import AGAIN, EAGER, PRECISIONS, Prepare, engines
from .memory import first_call_alone
from .workloads import SMALL, WORKLOADS, build, named

_PEERS = ("torch", "transformers", "onnxruntime", "onnxscript", "openvino")

CASE = ["model", "precision", "threads"]
"""The columns that say what was compared: one table each."""

INTRODUCTION = f"""\
`{EAGER}` is the model itself in float32 under `torch.no_grad()`. Every round runs all engines in a new random order, each \
twice, of which the second run counts. *Speed-up* is eager's time divided by the engine's own in the same round: the \
median with its 95 % bootstrap interval. `{AGAIN}` is the same model once more: as far as its speed-up is from 1, the \
measurement is off. All engines have the same number of threads, and those of others than torch do not wait actively \
(`session.intra_op.allow_spinning=0`), but for `onnxruntime, spinning`, which does so within a run, as is its default.

*GFLOP/s* counts matrix products and convolutions, also where an engine saves some; in brackets it is beside the best \
product of two float32 matrices (1024 or 2048 square) that torch reached in the same run. *Error* is the largest difference to \
the model in float64, relative to the largest value of the output, in brackets as a multiple of eager's; *cosine* is the \
similarity to float64; both are of the worst output."""

FIRST_CALL = {
    True: """\
*First call* goes from the model in memory to the first result, in a process of its own that has imported torch and \
transformers, with empty caches. *Resident* is the memory of this process after it and *peak* the most on the way, \
the model that it was made from included; processes that compile for inductor are not counted.""",
    False: """\
Where memory was not measured, *first call* is timed in the process that measures, which has run the model before.""",
}
"""How first calls were measured: in processes of their own or not."""

_NOT_IDLE = f"⚠️ **The machine was not idle**: other processes used {{:.1f}} cores (more than {machine.BUSY}), so the times say little."


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
    engine: Annotated[
        str, typer.Option(help="Only engines that begin so, separated by commas, and eager; empty for all.")
    ] = "",
    memory: Annotated[
        bool,
        typer.Option(help="First calls in processes of their own, with their memory; else here, without."),
    ] = True,
    small: Annotated[bool, typer.Option(help="Tiny models, to try the benchmark out.")] = False,
    add: Annotated[
        bool, typer.Option(help="Keep what the reports already say of other models and threads.")
    ] = False,
    out: Annotated[
        Path, typer.Option(help="Where peers.parquet, peers.md and peers.svg are written.")
    ] = Path("reports/baseline"),
) -> None:
    """Latency, first call, memory and exactness of fxopt beside its peers, in random interleaving.

    The machine should be idle: runs on one that is not are marked. Reports are written after every model.
    """
    names = named(models, SMALL if small else WORKLOADS, exact=False)
    precisions = named(precision, PRECISIONS, "precision")
    counts = _threads(threads)
    file = out / "peers.parquet"
    table = pd.read_parquet(file) if add and file.exists() else pd.DataFrame()
    for name, kind, count in itertools.product(names, precisions, counts):
        measure = functools.partial(first_call_alone, name, small, kind, threads=count)
        rows = compare(
            (name, kind, count),
            build(name, small),
            _of(engines(kind, count), engine),
            rounds=rounds,
            seconds=seconds,
            alone=measure if memory else None,
            say=functools.partial(typer.echo, err=True),
        )
        table = replaced(table, _table(rows, count, memory))
        out.mkdir(parents=True, exist_ok=True)
        store.replace(file, table.to_parquet(None, index=False))
        store.replace(out / "peers.svg", plot(table))
        store.replace(out / "peers.md", document(table).encode())
    typer.echo("\n".join(str(out / f"peers.{suffix}") for suffix in ("parquet", "md", "svg")))


def replaced(table: pd.DataFrame, new: pd.DataFrame) -> pd.DataFrame:
    """The rows of both, but for those of the old table on a model, precision and number of threads measured anew."""
    if table.empty:
        return new
    measured = set(new[CASE].itertuples(index=False, name=None))
    kept = [case not in measured for case in table[CASE].itertuples(index=False, name=None)]
    return pd.concat([table[kept], new], ignore_index=True)


def _table(rows: list[Row], threads: int, memory: bool) -> pd.DataFrame:
    """The rows with what the whole run shares: the machine, the versions, and how first calls were measured."""
    run = store.Run.now(threads=threads)
    versions = [f"{name} {found}" for name in _PEERS if (found := store.version(name))]
    return pd.DataFrame([dataclasses.asdict(row) for row in rows]).assign(
        alone=memory,
        run=run.id,
        started=run.started,
        commit=run.commit,
        machine=run.devices["cpu"],
        instructions=store.processor()[1],
        settings=machine.settings(),
        system=platform.platform(),
        versions=", ".join([f"Python {run.python}", *versions]),
    )


def _threads(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part == "all" or (part.isdigit() and int(part)) for part in parts):
        raise typer.BadParameter(f"{text!r}: numbers of threads, or `all`, separated by commas")
    return list(dict.fromkeys(cores() if part == "all" else int(part) for part in parts))


def _of(known: dict[str, Prepare], text: str) -> dict[str, Prepare]:
    """The engines whose names begin with one in the list with commas, and always eager; where it is empty, all."""
    wanted = tuple(part.strip() for part in text.split(",") if part.strip())
    if not wanted:
        return known
    return {name: prepare for name, prepare in known.items() if name.startswith(("eager", *wanted))}


def document(table: pd.DataFrame) -> str:
    """The page: how it was measured and on which machine, the plot, then one table a case."""
    cases = [_case(rows) for _, rows in table.groupby(CASE, sort=False)]
    return page(
        "# fxopt beside its peers",
        INTRODUCTION,
        "\n\n".join(text for alone, text in FIRST_CALL.items() if (table["alone"] == alone).any()),
        pipes(_conditions(table)),
        "![speed-up over eager, by engine, model and number of threads](peers.svg)",
        *(block for blocks in cases for block in blocks),
    )


def plot(table: pd.DataFrame) -> bytes:
    """Bars of the speed-up over eager with their intervals as SVG, one frame a case."""
    rows = table[(table["reason"] == "") & (table["engine"] != EAGER)]
    titles = pd.Series([_title(row) + _mark(row) for row in rows.itertuples()], rows.index)
    order = rows["engine"].unique().tolist()
    frames = [_frame(str(title), each, order) for title, each in rows.groupby(titles, sort=False)]
    columns = int(titles.groupby(rows["model"]).nunique().max())
    text = io.StringIO()
    chart = alt.concat(*frames, columns=columns).resolve_scale(x="shared", color="shared")
    chart.save(text, format="svg")
    return text.getvalue().encode()


def _frame(title: str, rows: pd.DataFrame, order: list[str]) -> alt.LayerChart:
    """One model at one precision and number of threads; an engine has the same colour in all frames."""
    names = ["engine", "speedup", "speedup_low", "speedup_high"]
    data = alt.Data(values=rows[names].to_dict("records"))
    y = alt.Y("engine:N", sort=rows["engine"].tolist(), title=None, axis=alt.Axis(labelLimit=200))
    x = alt.X("speedup:Q", title="speed-up over eager")
    color = alt.Color("engine:N", scale=alt.Scale(domain=order), legend=None)
    bars = alt.Chart().mark_bar().encode(x=x, y=y, color=color)
    ends = alt.Chart().mark_rule().encode(x=alt.X("speedup_low:Q"), x2="speedup_high:Q", y=y)
    eager = alt.Chart().mark_rule(strokeDash=[4, 3]).encode(x=alt.datum(1))
    chart: alt.LayerChart = alt.layer(bars, ends, eager, data=data, title=title, width=260)
    return chart


def _case(rows: pd.DataFrame) -> list[str]:
    """The blocks of one table: a heading, a mark where the machine was not idle, the table, and who is left out."""
    ran = list(rows[rows["reason"] == ""].itertuples())
    first: Any = ran[0]
    busy = max(first.busy_before, first.busy_during)
    left_out = rows.loc[rows["reason"] != "", ["engine", "reason"]].itertuples(index=False)
    return [
        f"## {_title(first)}",
        "" if first.idle else _NOT_IDLE.format(busy),
        pipes(pd.DataFrame(map(_numbers, ran))),
        f"{first.rounds:,} rounds. Float32 matrix products reach {first.gemm_gflops:,.0f} GFLOP/s; other processes used "
        f"{busy:.2f} cores.",
        "\n".join(f"- Left out: {engine}: {escape(reason)}" for engine, reason in left_out),
    ]


def _numbers(row: Any) -> dict[str, str]:
    """One line of a table."""
    return {
        "engine": row.engine + _mark(row),
        "median, ms": f"{row.median_ms:,.2f}",
        "speed-up (95 %)": f"{row.speedup:.2f} ({row.speedup_low:.2f} to {row.speedup_high:.2f})",
        "GFLOP/s (of GEMM)": f"{row.gflops:,.1f} ({row.gflops / row.gemm_gflops:.0%})",
        "first call, s": f"{row.first_call_s:.2f}",
        "resident, MB": _megabytes(row.resident_mb),
        "peak, MB": _megabytes(row.peak_mb),
        "error (of eager's)": f"{row.error:.1e} ({row.error_ratio:.1f})",
        "cosine": f"{row.cosine:.6f}",
    }


def _conditions(table: pd.DataFrame) -> pd.DataFrame:
    """The machine and versions; where runs differ, all of them."""
    names = ["machine", "instructions", "versions", "settings", "system", "commit"]
    said = table[names].assign(started=pd.to_datetime(table["started"]).dt.strftime("%Y-%m-%d"))
    rows = {name: "; ".join(map(str, filter(None, said[name].unique()))) or ABSENT for name in said}
    rows["threads"] = ", ".join(map(str, sorted(set(table["threads"]))))
    rows["idle"] = "yes" if table["idle"].all() else "no, see the marks ⚠️"
    shown = pd.Series(rows).rename({"settings": "environment", "started": "measured"})
    return shown.rename_axis("made with").reset_index(name="")


def _title(row: Any) -> str:
    return f"{row.model}, {row.precision}, {counted(row.threads, 'thread')}"


def _mark(row: Any) -> str:
    return "" if row.idle else " ⚠️"


def _megabytes(value: float) -> str:
    return ABSENT if math.isnan(value) else f"{value:,.0f}"
