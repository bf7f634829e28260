"""The table of what each pass of the full pipelines adds."""

from __future__ import annotations

import json
import math

import pandas as pd

from ..steps import FACT, LATENCY, noted
from .wording import ABSENT, shown


def steps(table: pd.DataFrame) -> pd.DataFrame:
    """One row a pass of `all` and `exact`: its sites, the error of the graph after it, by what that grew, and by what the
    time of the graph changed, with its 95 % interval.
    """
    key = ["model", "pipeline", "device"]
    latencies = {
        (*(row[name] for name in key), step): f"{median:.3f} [{low:.3f}, {high:.3f}]"
        for row in _with(table, LATENCY)
        for step, median, low, high in json.loads(row[LATENCY])
    }
    rows: list[dict[str, object]] = []
    for row in _with(table, FACT):
        before = math.nan
        for step in noted(row[FACT]):
            rows.append(
                {
                    **{name: row[name] for name in key},
                    "after": step.name or "capture",
                    "sites": step.sites,
                    "error": shown("relative_error", step.error),
                    "by this pass": ABSENT if math.isnan(before) else f"{step.error - before:+.1e}",
                    "latency, after / before": latencies.get(
                        (*(row[name] for name in key), step.name), ABSENT
                    ),
                }
            )
            before = step.error
    return pd.DataFrame(rows)


def _with(table: pd.DataFrame, fact: str) -> list[dict[str, str]]:
    rows = table[table[fact].fillna("") != ""] if fact in table else table.iloc[:0]
    return [{str(name): value for name, value in row.items()} for row in rows.to_dict("records")]
