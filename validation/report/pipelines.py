"""Tables on pipelines: the fastest of each model, and `fxopt.optimize` in each precision."""

from __future__ import annotations

import pandas as pd

from ..checks.optimize import EAGER
from ..records import Check, Outcome
from ..zoo.plan import OPTIMIZED
from .wording import ABSENT, number, pipeline_label, ratio, with_limit

NONE = "none: the graph itself"
FASTEST = ["fastest safe pipeline", "time / graph (95 % interval)", "time / eager model"]
EAGERLY = "latency_ratio_eager"


def fastest(verdicts: pd.DataFrame) -> pd.DataFrame:
    """One row a model and device, of the verdicts of a run (`tables.verdicts`): the fastest safe pipeline.

    Safe is a pipeline that preserves the computation and whose checks all passed. Faster is what is faster than the
    graph by more than the A/A floor of the measurement; where nothing is, the graph itself is the fastest.
    """
    if "latency_ratio" not in verdicts:
        return pd.DataFrame(columns=["model", "device", *FASTEST])
    timed = verdicts[verdicts["latency_ratio"].notna()]
    exact = timed.get(str(Check.EQUIVALENCE), pd.Series(None, timed.index, str)).notna()
    faster = timed.get("latency_effect", pd.Series("", timed.index)) == "faster"
    safe = timed[exact & faster & (timed["verdict"] == Outcome.PASS)].sort_values("latency_ratio")
    rows = [
        (row["model"], row["device"], pipeline_label(row["pipeline"]), ratio(row), number(row.get(EAGERLY)))
        for _, row in safe.drop_duplicates(["model", "device"]).iterrows()
    ]
    keys = {row[:2] for row in rows}
    graphs = timed[timed["pipeline"] == ""]
    for _, row in graphs.iterrows():
        if (row["model"], row["device"]) not in keys:
            rows.append((row["model"], row["device"], NONE, ABSENT, number(row["latency_ratio"])))
    return pd.DataFrame(sorted(rows), columns=["model", "device", *FASTEST])


def optimized(table: pd.DataFrame) -> pd.DataFrame:
    """One row a model and precision of `fxopt.optimize`: its speed-up, how far the outputs moved, and why it runs eagerly."""
    rows = table[(table["check"] == Check.OPTIMIZE) & table["outcome"].eq(Outcome.PASS)]
    said = pd.DataFrame({"model": rows["model"], "precision": rows["pipeline"].map(OPTIMIZED)})
    if not rows.empty:
        said["speed-up"] = [f"{1 / value:.2f}" if value == value else ABSENT for value in rows[EAGERLY]]
        said["error (limit)"] = [with_limit(row, "relative_error") for _, row in rows.iterrows()]
        said["no graph, or another precision"] = rows[EAGER].fillna("") if EAGER in rows else ""
    return said.sort_values(["model", "precision"], ignore_index=True)
