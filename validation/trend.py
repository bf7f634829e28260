"""Many runs in a row: one line a run, one case over time, and measurements that drift."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from scipy import stats

from validation.records import FAILING
from validation.store import ReportError, measurements_of

DRIFT = ["id", "runs", "before", "recent", "change", "p"]


def runs(history: pd.DataFrame) -> pd.DataFrame:
    """One row a run, oldest first: cases, failures, versions. `history` is a table of `store.history`."""
    grouped = history.assign(failed=history["outcome"].isin(FAILING)).groupby("run", sort=False)
    table = grouped.agg(
        started=("started", lambda times: f"{times.min():%Y-%m-%d %H:%M}"),
        commit=("commit", "first"),
        torch=("torch", "first"),
        transformers=("transformers", "first"),
        models=("model", "nunique"),
        cases=("id", "size"),
        failed=("failed", "sum"),
    )
    return table.reset_index()


def follow(history: pd.DataFrame, case: str, measurement: str) -> pd.DataFrame:
    """One measurement of one case, run by run, with the outcome; raises `ReportError` for an unknown name."""
    if measurement not in measurements_of(history):
        known = ", ".join(measurements_of(history))
        raise ReportError(f"no run in this history has a measurement {measurement!r}; there are: {known}")
    rows = history[history["id"] == case]
    if rows.empty:
        raise ReportError(f"no run in this history has a case {case!r}")
    return rows[["run", "commit", "torch", "device_name", "outcome", measurement]].reset_index(drop=True)


def drift(
    history: pd.DataFrame,
    measurement: str = "latency_ratio",
    *,
    recent: int = 5,
    least: int = 5,
    change: float = 0.03,
    p: float = 0.01,
) -> pd.DataFrame:
    """Cases whose measurement in the last `recent` runs differs from that in the runs before.

    Slow drift stays under the threshold of a comparison of two runs, and the interval of one run does not
    know how far runs differ from each other; many runs do. A row is a case whose medians differ by more than
    the fraction `change` and whose Mann-Whitney test, over runs on the same hardware with the same number of
    threads, says so with a false discovery rate of `p` (Benjamini and Hochberg, 1995). Cases with fewer than
    `least` runs before the recent ones are left out.
    """
    if measurement not in history:
        return pd.DataFrame(columns=DRIFT)
    found = []
    for (case, *_), rows in history.dropna(subset=measurement).groupby(["id", "device_name", "threads"]):
        values = rows.sort_values(["started", "run"])[measurement].to_numpy()
        before, last = values[:-recent], values[-recent:]
        if len(last) == recent and len(before) >= least:
            test = stats.mannwhitneyu(before, last, method="auto")
            was, now = float(np.median(before)), float(np.median(last))
            relative = (now - was) / abs(was) if was else math.copysign(math.inf, now) if now else 0.0
            found.append((case, len(values), was, now, relative, float(test.pvalue)))
    table = pd.DataFrame(found, columns=DRIFT)
    if table.empty:
        return table
    table["p"] = stats.false_discovery_control(table["p"])
    drifted = table[(table["p"] < p) & (table["change"].abs() > change)]
    return drifted.sort_values("change", ascending=False, ignore_index=True)
