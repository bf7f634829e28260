"""What each pass of the full pipelines adds, as a table."""

from __future__ import annotations

import math

import pandas as pd

from ..steps import FACT, noted
from .wording import ABSENT, shown


def steps(table: pd.DataFrame) -> pd.DataFrame:
    """One row a pass of `all` and `exact`: its sites, the error of the graph after it, and by what that grew."""
    rows: list[dict[str, object]] = []
    with_steps = table[table[FACT].fillna("") != ""] if FACT in table else table.iloc[:0]
    for row in with_steps.to_dict("records"):
        before = math.nan
        for step in noted(row[FACT]):
            rows.append(
                {
                    "model": row["model"],
                    "pipeline": row["pipeline"],
                    "device": row["device"],
                    "after": step.name or "capture",
                    "sites": step.sites,
                    "error": shown("relative_error", step.error),
                    "by this pass": ABSENT if math.isnan(before) else f"{step.error - before:+.1e}",
                }
            )
            before = step.error
    return pd.DataFrame(rows)
