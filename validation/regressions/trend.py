"""Many successive runs: one line a run, one case over time, and lasting changes of latencies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from ..records import FAILING
from ..store import ReportError, measurements_of
from .metric import BUSY, MOST_BUSY

LATENCY = "latency_ratio"
CHANGED = ["id", "runs", "since", "before", "recent", "change"]

MARGINS = {2: 0.2, 3: 0.12, 5: 0.06}
"""The relative change of a latency that counts, by the number of runs with the new latency."""

SIGMAS = 4.5

FEWEST_BEFORE = 2
"""The number of runs that must have the old latency."""


def runs(history: pd.DataFrame) -> pd.DataFrame:
    """One row a run, oldest first: cases, failures, versions. `history` is a table of `store.history`."""
    grouped = history.assign(failed=history["outcome"].isin(FAILING)).groupby("run", sort=False)
    table = grouped.agg(
        started=("started", lambda times: f"{times.min():%Y-%m-%d %H:%M}"),
        commit=("commit", "first"),
        torch=("torch", "first"),
        transformers=("transformers", "first"),
        cases=("id", "size"),
        failed=("failed", "sum"),
    )
    return table.reset_index()


def follow(history: pd.DataFrame, case: str) -> pd.DataFrame:
    """Follow one case run by run: its outcome and its measurements. Raises `ReportError` for an unknown case."""
    rows = history[history["id"] == case]
    if rows.empty:
        raise ReportError(f"no run in this history has a case {case!r}")
    measured = [name for name in measurements_of(rows) if rows[name].notna().any()]
    return rows[["run", "commit", "torch", "outcome", *measured]].reset_index(drop=True)


def latencies(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """The cases whose latency (the ratio to the graph's in the same run) changed for good: one row a case.

    The runs are given oldest first. A run counts for a case if its machine was idle, and if machine, threads and definition
    of the case are those of the last run. A latency changed in a run if two conditions hold. From that run on, the interval
    of each run is beyond four fifths of the intervals before. The medians from that run on and before it differ by more
    than `MARGINS` and by `SIGMAS` standard errors. So a large change counts from the second run on, a small one from the
    fifth. The standard deviation between runs is the median over all cases, or that of the case if larger. A single run
    proves nothing.

    Returns:
        A table with the columns of `CHANGED`: a positive change is slower, and `since` is the first run with the change.
    """
    having = [table for table in tables if LATENCY in table]
    if not having:
        return pd.DataFrame(columns=CHANGED)
    rows = pd.concat([_idle(table) for table in having], ignore_index=True)
    last = rows.drop_duplicates("id", keep="last").set_index("id")
    alike = ["device_name", "threads", "content"]
    rows = rows[(rows[alike].to_numpy() == last.loc[rows["id"], alike].to_numpy()).all(axis=1)]
    rows = rows[rows["id"].isin(tables[-1]["id"])]
    groups = dict(list(rows.sort_values(["started", "run"]).groupby("id")))
    spreads = {case: _spread(group["value"].to_numpy(float)) for case, group in groups.items()}
    usual = float(np.median([spread for case, spread in spreads.items() if len(groups[case]) > 1] or [0.0]))
    found = [
        (case, len(group), *change)
        for case, group in groups.items()
        if (change := _change(group, max(usual, spreads[case]))) is not None
    ]
    table = pd.DataFrame(found, columns=CHANGED)
    return table.sort_values("change", ascending=False, ignore_index=True)


def _idle(table: pd.DataFrame) -> pd.DataFrame:
    """The rows with a latency measured on an idle machine; rows that do not state the load count too."""
    busy = table[BUSY] if BUSY in table else pd.Series(0.0, table.index)
    columns = ["id", "run", "started", "device_name", "threads", "content"]
    chosen = table[table[LATENCY].notna() & ~(busy > MOST_BUSY)]
    ends = {
        end: chosen.get(f"{LATENCY}_{end}", chosen[LATENCY]).fillna(chosen[LATENCY])
        for end in ("low", "high")
    }
    return chosen[columns].assign(value=chosen[LATENCY], **ends).fillna({"content": ""})


def _spread(values: np.ndarray) -> float:
    """The relative standard deviation of runs, from differences of successive runs, few of which are real changes."""
    steps = np.abs(np.diff(np.log(values)))
    return 1.4826 * float(np.median(steps)) / math.sqrt(2) if len(steps) else 0.0


def _change(group: pd.DataFrame, spread: float) -> tuple[Any, ...] | None:
    """The first run with another latency of one case, and the medians before and since; None if there is no change."""
    values, low, high = (group[name].to_numpy(float) for name in ("value", "low", "high"))
    best, least_error = None, math.inf
    for at in range(FEWEST_BEFORE, len(values) - min(MARGINS) + 1):
        margin = MARGINS[max(number for number in MARGINS if number <= len(values) - at)]
        was, now = float(np.median(values[:at])), float(np.median(values[at:]))
        change = now / was - 1
        least = max(math.log1p(margin), SIGMAS * spread * math.sqrt(1 / at + 1 / (len(values) - at)))
        slower = low[at:].min() > np.quantile(high[:at], 0.8) and math.log(now / was) > least
        faster = high[at:].max() < np.quantile(low[:at], 0.2) and math.log(was / now) > least
        # The split that fits best: one night too late moves the medians little, but leaves that night far from its median.
        error = float(np.abs(np.log(values / np.where(np.arange(len(values)) < at, was, now))).sum())
        if (slower or faster) and error < least_error:
            best, least_error = (group["run"].iloc[at], was, now, change), error
    return best
