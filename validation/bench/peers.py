"""`python -m validation.bench peers`: eager, fxopt and its peers on models at the sizes at which they are used."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import platform
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from .. import store
from . import machine
from .engine_rows import Row, compare
from .engines import PRECISIONS, Prepare, engines
from .isolated import first_call_alone
from .peers_report import CASE, document, plot
from .workloads import SMALL, WORKLOADS, build

_PEERS = ("torch", "transformers", "onnxruntime", "onnxscript", "openvino")


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
    names = _chosen(models, list(SMALL if small else WORKLOADS), "model", exact=False)
    precisions = _chosen(precision, list(PRECISIONS), "precision")
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
        table = replaced(table, _frame(rows, count, memory))
        out.mkdir(parents=True, exist_ok=True)
        store.replace(file, table.to_parquet(None, index=False))
        store.replace(out / "peers.svg", plot(table, "svg"))
        store.replace(out / "peers.md", document(table).encode())
    typer.echo("\n".join(str(out / f"peers.{suffix}") for suffix in ("parquet", "md", "svg")))


def replaced(table: pd.DataFrame, new: pd.DataFrame) -> pd.DataFrame:
    """The rows of both, but for those of the old table on a model, precision and number of threads measured anew."""
    if table.empty:
        return new
    measured = set(new[CASE].itertuples(index=False, name=None))
    kept = [case not in measured for case in table[CASE].itertuples(index=False, name=None)]
    return pd.concat([table[kept], new], ignore_index=True)


def _frame(rows: list[Row], threads: int, memory: bool) -> pd.DataFrame:
    """The rows with what the whole run shares: the machine, the versions, and how first calls were measured."""
    run = store.Run.now(threads=threads)
    versions = [f"{name} {found}" for name in _PEERS if (found := store.version(name))]
    return pd.DataFrame([dataclasses.asdict(row) for row in rows]).assign(
        alone=memory,
        run=run.id,
        started=run.started,
        commit=run.commit,
        machine=run.devices["cpu"],
        instructions=machine.instruction_sets(),
        settings=machine.settings(),
        system=platform.platform(),
        versions=", ".join([f"Python {run.python}", *versions]),
    )


def _chosen(text: str, known: list[str], what: str, exact: bool = True) -> list[str]:
    """The known names that a list with commas names, or where it is empty all."""
    wanted = [part.strip() for part in text.split(",") if part.strip()]
    chosen = []
    for part in wanted:
        found = [name for name in known if name == part or (not exact and name.startswith(part))]
        if not found:
            raise typer.BadParameter(f"there is no {what} {part!r}: it is one of {', '.join(known)}")
        chosen += found
    return list(dict.fromkeys(chosen)) or known


def _threads(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part == "all" or (part.isdigit() and int(part)) for part in parts):
        raise typer.BadParameter(f"{text!r}: numbers of threads, or `all`, separated by commas")
    return list(dict.fromkeys(machine.all_threads() if part == "all" else int(part) for part in parts))


def _of(known: dict[str, Prepare], text: str) -> dict[str, Prepare]:
    """The engines whose names begin with one in the list with commas, and always eager; where it is empty, all."""
    wanted = tuple(part.strip() for part in text.split(",") if part.strip())
    if not wanted:
        return known
    return {name: prepare for name, prepare in known.items() if name.startswith(("eager", *wanted))}
