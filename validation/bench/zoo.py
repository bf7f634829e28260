"""`python -m validation.bench zoo`: eager, fxopt and its peers on popular models in their published sizes."""

from __future__ import annotations

import dataclasses
import io
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, cast

import numpy as np
import pandas as pd
import torch
import typer

from fxopt.engines import ENGINES

from .. import store
from ..records import counted
from ..report.markdown import escape, page, pipes
from ..timing import cores
from . import models, plot, rows
from .engines import AGAIN, EAGER, PRECISIONS
from .engines import engines as engines_of

_VERSIONS = ("torch", "transformers", "onnxruntime", "openvino")

KEYS = ["model", "precision", "threads", "machine"]
BUSY = 0.1
"""A machine is idle if all other processes together use less than this part of one core."""

SLOWER = 0.97
"""An engine is slower than eager below this speed-up."""

TITLE = "fxopt and its peers on popular models"
INTRODUCTION = f"""\
`{EAGER}` is the model itself in float32 under `torch.no_grad()`. Each round runs all engines in a new random order, each \
twice, of which the second run counts. The *speed-up* is eager's time divided by the engine's in the same round: the \
median with its 95 % bootstrap interval. `{AGAIN}` is the same model once more: the distance of its speed-up from 1 is the \
error of the measurement. All engines have the same number of threads. *Ready* is the time from the model in memory to \
the first result. *Error* is the largest difference from the model in float64, as a multiple of eager's; *cosine* is the similarity \
to float64; both are of the worst output. Of generated tokens, *cosine* is the share that is equal. *Memory* is that of all weights, as a multiple of the model's.

*No graph* counts the models for which `fxopt.optimize` runs the eager model. *Slower* counts speed-ups below {SLOWER}. \
Nothing in fxopt was chosen by looking at an *unseen* model. ⚠️ marks models that were measured while the machine was not idle."""


def zoo(
    chosen: Annotated[
        str, typer.Option("--models", help="By name or its beginning, separated by commas; empty for all.")
    ] = "",
    precision: Annotated[
        str, typer.Option(help="Of float32, bfloat16 and int8, separated by commas.")
    ] = "float32",
    engines: Annotated[
        str, typer.Option(help="Engines by name, separated by commas; empty for all. Eager always runs.")
    ] = "",
    threads: Annotated[int, typer.Option(help="Threads of each engine; 0 for all cores.")] = 0,
    device: Annotated[str, typer.Option(help="`cpu` or `cuda`.")] = "cpu",
    rounds: Annotated[int, typer.Option(help="The fewest rounds of each model.")] = 10,
    seconds: Annotated[float, typer.Option(help="Rounds go on for so long.")] = 20.0,
    limit: Annotated[float, typer.Option(help="Seconds after which the process of a model ends.")] = 900.0,
    again: Annotated[bool, typer.Option(help="Measure models again that the table has.")] = False,
    out: Annotated[Path, typer.Option(help="Where zoo.parquet, zoo.md and zoo.svg are.")] = Path(
        "reports/baseline"
    ),
) -> None:
    """Compare speed, preparation time and exactness of fxopt and its peers; each model has a separate process.

    Models in the table of the folder are not measured again, so that an interrupted run can continue.
    """
    if device != "cpu" and not (device == "cuda" and torch.cuda.is_available()):
        raise typer.BadParameter(f"there is no device {device!r} here")
    out.mkdir(parents=True, exist_ok=True)
    file = out / "zoo.parquet"
    table = pd.read_parquet(file) if file.exists() else pd.DataFrame(columns=KEYS)
    known = models.zoo()
    precisions = models.named(precision, PRECISIONS, "precision")
    every = {name: None for each in precisions for name in engines_of(each, device) if name != AGAIN}
    wanted = {EAGER, AGAIN, *models.named(engines, every, "engine")}
    run = store.Run.now(devices=[device], threads=threads or cores())  # before the table makes the tree dirty
    for case in itertools.product(models.named(chosen, known), precisions, [threads or cores()]):
        there = (table[KEYS] == [*case, run.devices[device]]).all(axis=1)
        if there.any() and not again:
            continue
        typer.echo(" ".join(map(str, case)), err=True)
        measured = rows.of_case(case, wanted, rounds, seconds, limit, device)
        facts = {"commit": run.commit, "machine": run.devices[device], "versions": _versions()}
        entry = {"kind": known[case[0]].said["kind"], "unseen": bool(known[case[0]].said.get("unseen"))}
        new = pd.DataFrame([entry | dataclasses.asdict(row) | facts for row in measured])
        table = pd.concat([table[~there], new], ignore_index=True) if len(table) else new
        buffer = io.BytesIO()
        table.to_parquet(buffer, index=False)
        store.replace(file, buffer.getvalue())
    text = page(f"# {TITLE}", _written_by(run, device), INTRODUCTION, *document(table))
    store.replace(out / "zoo.md", text.encode())
    typer.echo(text)
    drawn = _largest(table[~table["engine"].isin([EAGER, AGAIN])])
    if len(drawn):
        try:
            store.replace(out / "zoo.svg", plot.drawn(drawn))
        except ModuleNotFoundError as error:
            typer.echo(f"no picture: {error.name} is not installed (the extra `peers` brings it)", err=True)


def _written_by(run: store.Run, device: str) -> str:
    return (
        f"Written by `python -m validation.bench zoo`: {run.threads} threads, {run.devices[device]}, "
        f"torch {run.torch}, commit {run.commit}, {run.started:%Y-%m-%d}."
    )


def _largest(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of engines that ran, for the machine, threads and precision with most models, on models tried with all engines."""
    found = [table[:0]]
    for _, group in table.groupby(KEYS[1:]):
        tried = group.groupby("model")["engine"].transform("nunique") == group["engine"].nunique()
        found.append(group[tried & (group["reason"] == "")])
    return max(found, key=lambda group: (group["model"].nunique(), "float32" in {*group["precision"]}))


def _versions() -> str:
    return ", ".join(f"{name} {found}" for name in _VERSIONS if (found := store.version(name)))


def document(table: pd.DataFrame) -> Iterator[str]:
    """The blocks of the page: for each precision the means, the means by kind, and a table of all models."""
    for keys, measured in table.groupby(["machine", "threads", "precision"], sort=False):
        name, threads, precision = cast(tuple[str, int, str], keys)
        yield f"## {precision}, {counted(threads, 'thread')}, {name.partition(';')[0]}"
        for made, rest in measured.groupby(["commit", "versions"], sort=False):
            commit, versions = cast(tuple[str, str], made)
            yield f"{counted(rest['model'].nunique(), 'model')} at {commit}, {versions}, {name}."
        yield pipes(pd.concat([means(part, label) for label, part in _parts(measured)], ignore_index=True))
        ran = measured[measured["reason"] == ""]
        speedups = ran[ran["engine"] != EAGER].pivot_table("speedup", "kind", "engine", plot.mean, sort=False)
        yield pipes(speedups.map("{:.2f}".format).reset_index())
        yield pipes(
            pd.DataFrame([_line(str(model), own) for model, own in measured.groupby("model", sort=False)])
        )
        notes = measured.assign(note=measured["reason"].where(measured["reason"] != "", measured["eager"]))
        yield "\n".join(
            f"- {row['model']}, {row['engine']}: {escape(row['note'])}"
            for _, row in notes[notes["note"] != ""].iterrows()
        )


def _parts(table: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    yield "all", table
    if table["unseen"].any() and not table["unseen"].all():
        yield from (("seen", table[~table["unseen"]]), ("unseen", table[table["unseen"]]))


def means(table: pd.DataFrame, label: str) -> pd.DataFrame:
    """For each engine, the geometric mean of its speed-ups, and the mean of fxopt on the same models."""
    own = next((name for name in table["engine"] if name.startswith("fxopt")), EAGER)
    speedups = table[table["reason"] == ""].pivot(index="model", columns="engine", values="speedup")
    found = []
    for engine in (name for name in table["engine"].unique() if name != EAGER):
        there = speedups.dropna(subset=[engine, own]) if engine in speedups else speedups[:0]
        is_own = table[table["engine"] == engine]
        found.append(
            {
                "models": f"{label}, {len(there)}",
                "engine": engine,
                "geometric mean": f"{plot.mean(there[engine]):.3f}" if len(there) else "",
                "fxopt there": f"{plot.mean(there[own]):.3f}" if len(there) else "",
                "no graph, or left out": str((is_own["eager"] != "").sum() + (is_own["reason"] != "").sum()),
                "slower": str((there[engine] < SLOWER).sum()) if len(there) else "",
                "ready, s": f"{is_own['first_call_s'].median():.1f}",
            }
        )
    return pd.DataFrame(found)


def _line(model: str, own: pd.DataFrame) -> dict[str, str]:
    """The line of a model: the speed-up of each engine, and the engine that `fxopt.optimize` uses."""
    ran = own[own["reason"] == ""]
    mark = " ⚠️" if ran["busy"].max() > BUSY else ""
    unseen = ", unseen" if own["unseen"].any() else ""
    cells = {"model": f"{model}{unseen}{mark}"}
    for median in ran.loc[ran["engine"] == EAGER, "median_ms"]:
        cells["eager, ms"] = f"{median:,.1f}"
    for _, row in ran[ran["engine"] != EAGER].iterrows():
        name = row["engine"]
        if name.startswith("fxopt") and "auto" not in name:
            cells[name] = f"{row['speedup']:.2f} ({row['speedup_low']:.2f} to {row['speedup_high']:.2f})"
            cells["ready, s"] = f"{row['first_call_s']:.1f}"
            cells["error"] = "" if np.isnan(row["error_ratio"]) else f"{row['error_ratio']:,.1f}"
            cells["cosine"] = f"{row['cosine']:.6f}"
            cells["memory"] = "" if np.isnan(row["memory"]) else f"{row['memory']:.2f}"
        else:
            taken = f", {row['taken']}" if {*row["taken"].split("+")} & {*ENGINES} else ""
            cells[name] = f"{row['speedup']:.2f}{taken}"
    return cells
