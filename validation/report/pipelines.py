"""The table of `fxopt.optimize` in each precision."""

from __future__ import annotations

import pandas as pd

from ..records import Check, Outcome
from ..regressions.metric import EAGER
from ..zoo.plan import OPTIMIZED
from .wording import ABSENT, with_limit


def optimized(table: pd.DataFrame) -> pd.DataFrame:
    """One row a model and precision of `fxopt.optimize`: its speed-up, how far the outputs moved, and why it runs eagerly."""
    rows = table[(table["check"] == Check.OPTIMIZE) & table["outcome"].eq(Outcome.PASS)]
    said = pd.DataFrame({"model": rows["model"], "precision": rows["pipeline"].map(OPTIMIZED)})
    if not rows.empty:
        said["speed-up"] = [
            f"{1 / value:.2f}" if value == value else ABSENT for value in rows["latency_ratio_eager"]
        ]
        said["error (limit)"] = [with_limit(row, "relative_error") for _, row in rows.iterrows()]
        said["no graph, or another precision"] = rows[EAGER].fillna("") if EAGER in rows else ""
    return said.sort_values(["model", "precision"], ignore_index=True)
