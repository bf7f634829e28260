"""How long large runs take to be merged, compared and planned, and in how much memory."""

from __future__ import annotations

import datetime
import resource
import time
from typing import Annotated

import numpy as np
import pyarrow as pa
import typer

from .. import store
from ..compare import compare


def made(run: store.Run, rows: int, seed: int) -> pa.Table:
    """The table of a made-up run: errors, sites and latencies with their noise, and a case in a thousand that fails."""
    rng = np.random.default_rng(seed)
    names = [f"model-{number // 100}-Pass{number % 100}-cpu-effect" for number in range(rows)]
    error = 10 ** np.random.default_rng(0).uniform(-9, -6, rows) * rng.uniform(0.5, 2, rows)
    ratio = rng.normal(0.9, 0.05, rows)
    columns = {
        **{name: pa.array([""] * rows) for name, kind in store.COLUMNS.items() if kind == pa.string()},
        "id": pa.array(names),
        "model": pa.array([f"model-{number // 100}" for number in range(rows)]),
        "check": pa.array(["effect"] * rows),
        "device": pa.array(["cpu"] * rows),
        "outcome": pa.array(np.where(rng.random(rows) < 0.001, "fail", "pass")),
        "run": pa.array([run.id] * rows),
        "seconds": pa.array(rng.random(rows)),
        "refusals": pa.array([[]] * rows, store.COLUMNS["refusals"]),
        "started": pa.array(
            [run.started + datetime.timedelta(seconds=seed)] * rows, store.COLUMNS["started"]
        ),
        "threads": pa.array([run.threads] * rows, pa.int64()),
        "relative_error": pa.array(error),
        "max_abs_error": pa.array(error * 3),
        "sites": pa.array(rng.integers(1, 9, rows).astype(float)),
        "latency_ratio": pa.array(ratio),
        "latency_ratio_low": pa.array(ratio - 0.01),
        "latency_ratio_high": pa.array(ratio + 0.01),
        "latency_baseline_ms": pa.array(rng.normal(10, 1, rows)),
    }
    return pa.table(columns)


def runs(rows: Annotated[int, typer.Option(help="How many cases.")] = 100_000) -> None:
    """Merge two runs of so many cases, and compare them."""
    now = store.Run.now(threads=1)
    tables = [made(now, rows, seed) for seed in (0, 1)]
    started = time.process_time()
    merged = store.merge(tables).num_rows
    between = time.process_time()
    changes = len(compare(*(table.to_pandas() for table in tables)))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    typer.echo(
        f"{merged:,} rows: merged in {between - started:.1f} s, compared in {time.process_time() - between:.1f} s "
        f"({changes:,} changes), at most {peak:.2f} GiB"
    )
