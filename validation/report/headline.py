"""A run in a sentence or two: what failed, what was not run and why, and what has changed since the runs before it."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import pandas as pd

from ..records import FAILING, Outcome, counted
from ..regressions.compare import compare
from ..store import ReportError, missing, read_run
from ..zoo.sources import SOURCE

MOST = 10
"""Reasons for not running cases that are told one by one."""


def verdict(table: pd.DataFrame) -> str:
    """How many of the cases that ran have failed; what was skipped did not run.

    Example:
        >>> verdict(pd.DataFrame({"outcome": ["pass", "no-op", "skip"]}))
        'No case of 2 failed'
    """
    count, failed = len(ran(table)), int(table["outcome"].isin(FAILING).sum())
    return f"{failed:,} of {count:,} cases failed" if failed else f"No case of {count:,} failed"


def not_run(table: pd.DataFrame) -> list[str]:
    """A sentence for each reason why cases were not run, and one for the cases that the plan has besides."""
    skipped = table[table["outcome"] == Outcome.SKIP]
    reasons = skipped.groupby("reason").agg(cases=("id", "size"), models=("model", "nunique"))
    reasons = reasons.sort_values("cases", ascending=False)
    told = [
        f"{counted(row.cases, 'case')} of {counted(row.models, 'model')} not run: {reason}"
        for reason, row in reasons.head(MOST).iterrows()
    ]
    if len(reasons) > MOST:
        rest = reasons.iloc[MOST:]
        told.append(f"{counted(int(rest['cases'].sum()), 'case')} not run for {len(rest):,} other reasons")
    if lacking := missing(table):
        told.append(f"Partial: {counted(lacking, 'planned case')} not run")
    return told


def ends(table: pd.DataFrame) -> dict[str, int]:
    """How many cases ended how, without those that were not run."""
    counted = table["outcome"].value_counts()
    return {str(o): int(counted[o]) for o in Outcome if o in counted and o is not Outcome.SKIP}


def ran(table: pd.DataFrame) -> pd.DataFrame:
    """The cases that were run; views leave out the others, but for the headline."""
    return table[table["outcome"] != Outcome.SKIP].reset_index(drop=True)


def is_sweep(table: pd.DataFrame) -> bool:
    """Tell whether the run was a sweep."""
    return SOURCE in table and bool(table[SOURCE].fillna("").ne("").any())


MOST_RUNS = 12
"""The runs of the history that a report shows."""


@dataclasses.dataclass(frozen=True)
class Since:
    """The changes (a table of `compare.compare`) since the run of this id."""

    run: str
    changes: pd.DataFrame


def earlier(table: pd.DataFrame, history: Path) -> list[pd.DataFrame]:
    """The runs of the history before that of a table, oldest first, and of its kind: a sweep, or none."""
    newest, swept = str(table["run"].max()), is_sweep(table)
    found: list[pd.DataFrame] = []
    for file in sorted(history.glob("[!.]*.parquet"), reverse=True):
        if file.stem < newest and len(found) < MOST_RUNS:
            with contextlib.suppress(ReportError):  # `fxopt history` tells of files that cannot be read
                run = read_run(file)
                found += [run] if is_sweep(run) == swept else []
    return found[::-1]


def since(table: pd.DataFrame, runs: list[pd.DataFrame]) -> Since | None:
    """Compare a run with the last of the earlier ones; None where there is none."""
    return Since(str(runs[-1]["run"].iloc[0]), compare(runs[-1], table)) if runs else None


def marked(changes: pd.DataFrame) -> pd.DataFrame:
    """The changes with a word in the place of a truth."""
    return changes.assign(regression=changes["regression"].map({True: "worse", False: ""}))


def changed(changes: pd.DataFrame) -> str:
    """The number of regressions and of other changes, of a table of `compare.compare`."""
    worse = int(changes["regression"].sum())
    return f"{counted(worse, 'regression')}, {counted(len(changes) - worse, 'other change')}"
