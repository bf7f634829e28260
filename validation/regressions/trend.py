"""Many runs in a row: one line a run, one case over time, and measurements that drift."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from scipy import stats

from ..records import FAILING
from ..store import ReportError, measurements_of

DRIFT = ["id", "runs", "since", "before", "recent", "change", "p"]


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
    check_name(history, measurement)
    rows = history[history["id"] == case]
    if rows.empty:
        raise ReportError(f"no run in this history has a case {case!r}")
    return rows[["run", "commit", "torch", "device_name", "outcome", measurement]].reset_index(drop=True)


def check_name(history: pd.DataFrame, measurement: str) -> None:
    """Raises `ReportError` for a measurement that no run has."""
    if measurement not in measurements_of(history):
        known = ", ".join(measurements_of(history))
        raise ReportError(f"no run in this history has a measurement {measurement!r}; there are: {known}")


def drift(
    history: pd.DataFrame,
    measurement: str = "latency_ratio",
    *,
    least: int = 3,
    change: float = 0.03,
    p: float = 0.01,
) -> pd.DataFrame:
    """Cases whose measurement changed for good in some night, and since which.

    Slow drift stays under the threshold of a comparison of two runs, and the interval of one run does not know
    how far runs differ from each other; many runs do. For each case, over runs on the same hardware with the same
    number of threads, that night is taken which parts its runs, at least `least` on both sides, into the two most
    unlike groups. How unlike is a t statistic whose variance is moderated by that of all cases (Smyth, 2004), so
    that a few nights suffice. A row is a case whose medians differ by more than the fraction `change`, with a false
    discovery rate of `p` over the cases (Benjamini and Hochberg, 1995), after Bonferroni over the nights.
    """
    if measurement not in history:
        return pd.DataFrame(columns=DRIFT)
    series = [
        (case, rows["run"].to_numpy(), rows[measurement].to_numpy(float))
        for (case, *_), rows in history.dropna(subset=measurement)
        .sort_values(["started", "run"])
        .groupby(["id", "device_name", "threads"])
        if len(rows) >= 2 * least
    ]
    splits = [_split(values, least) for _, _, values in series]
    usual = float(np.median([variance for *_, variance in splits])) if splits else 0.0
    found = []
    for (case, runs_, values), (at, distance, within) in zip(series, splits, strict=True):
        degrees = len(values) - 2
        variance = (degrees * within + PRIOR * usual) / (degrees + PRIOR)
        error = math.sqrt(variance * (1 / at + 1 / (len(values) - at)))
        t = distance / error if error else math.inf if distance else 0.0
        chance = min(1.0, 2 * float(stats.t.sf(t, degrees + PRIOR)) * (len(values) - 2 * least + 1))
        was, now = (float(np.median(part)) for part in np.split(values, [at]))
        relative = (now - was) / abs(was) if was else math.copysign(math.inf, now) if now else 0.0
        found.append((case, len(values), runs_[at], was, now, relative, chance))
    table = pd.DataFrame(found, columns=DRIFT)
    if table.empty:
        return table
    table["p"] = stats.false_discovery_control(table["p"])
    drifted = table[(table["p"] < p) & (table["change"].abs() > change)]
    return drifted.sort_values("change", ascending=False, ignore_index=True)


PRIOR = 4
"""The degrees of freedom that the usual variance of all cases counts for."""


def _split(values: np.ndarray, least: int) -> tuple[int, float, float]:
    """Where a series is parted, how far its parts are from each other, and the variance within them, both relative.

    That leaves the least variance within the parts.
    """
    scale = float(np.median(np.abs(values))) or 1.0
    relative = values / scale

    def within(at: int) -> float:
        return float(sum(((part - part.mean()) ** 2).sum() for part in np.split(relative, [at])))

    at = min(range(least, len(values) - least + 1), key=within)
    before, after = np.split(relative, [at])
    return at, abs(float(after.mean() - before.mean())), within(at) / (len(values) - 2)
