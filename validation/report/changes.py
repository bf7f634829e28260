"""The runs before one: what has changed since the last of them, and how each case ended in all of them."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import pandas as pd

from ..compare import compare
from ..records import counted
from ..store import ReportError, read_run
from .headline import is_sweep

MOST = 12
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
        if file.stem < newest and len(found) < MOST:
            with contextlib.suppress(ReportError):  # `fxopt history` tells of files that cannot be read
                run = read_run(file)
                found += [run] if is_sweep(run) == swept else []
    return found[::-1]


def since(table: pd.DataFrame, runs: list[pd.DataFrame]) -> Since | None:
    """Compare a run with the last of the earlier ones; None where there is none."""
    return Since(str(runs[-1]["run"].iloc[0]), compare(runs[-1], table)) if runs else None


def headline(changes: pd.DataFrame) -> str:
    """The number of regressions and of other changes, of a table of `compare.compare`."""
    worse = int(changes["regression"].sum())
    return f"{counted(worse, 'regression')}, {counted(len(changes) - worse, 'other change')}"
