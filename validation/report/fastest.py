"""The fastest pipeline of each model: of those that are safe, and of all, which may change the outputs."""

from __future__ import annotations

import pandas as pd

from ..records import Check, Outcome
from . import wording

NONE = "none: the graph itself"
COLUMNS = [
    "model",
    "device",
    "fastest safe",
    "graph = 1",
    "eager = 1",
    "grade",
    "fastest of all",
    "of all, graph = 1",
]


def fastest(verdicts: pd.DataFrame) -> pd.DataFrame:
    """One row a model and device, of the verdicts of a run (`tables.verdicts`).

    Safe is a pipeline that preserves the computation and whose checks all passed. Faster is what is faster than the
    graph by more than the A/A floor of the measurement; where nothing is, the graph itself is the fastest.
    """
    if "latency_ratio" not in verdicts:
        return pd.DataFrame(columns=COLUMNS)
    rows = verdicts[verdicts["latency_ratio"].notna()]
    effects = rows.filter(items=["latency_effect", "latency_ratio_low", "latency_ratio_high"])
    faster = pd.Series(
        [wording.effect(row) == "faster" for row in effects.to_dict("records")], rows.index, bool
    )
    faster &= (rows["pipeline"] != "") & (rows["verdict"] == Outcome.PASS)
    exact = faster & rows.get(str(Check.EQUIVALENCE), pd.Series(None, rows.index, str)).notna()
    found = []
    for key, timed in rows.groupby(["model", "device"]):
        safe, best = (_least(timed[mask[timed.index]]) for mask in (exact, faster))
        graph = timed[timed["pipeline"] == ""]
        eager = wording.number(graph.iloc[0].get("latency_ratio")) if len(graph) else wording.ABSENT
        cells = _cells(safe) if safe is not None else [NONE, "1", eager, wording.ABSENT]
        other = best if best is not None and (safe is None or best.name != safe.name) else None
        found.append([*key, *cells, *_short(other)])
    table = pd.DataFrame(found, columns=COLUMNS)
    return table if table["device"].nunique() > 1 else table.drop(columns="device")


def _least(rows: pd.DataFrame) -> pd.Series | None:
    return rows.iloc[int(rows["latency_ratio"].argmin())] if len(rows) else None


def _short(row: pd.Series | None) -> list[str]:
    """The pipeline, and its time by that of the graph."""
    if row is None:
        return [wording.ABSENT] * 2
    return [wording.pipeline_label(row["pipeline"]), wording.number(row["latency_ratio"])]


def _cells(row: pd.Series) -> list[str]:
    """The pipeline, its time by that of the graph and by that of the model, and its grade."""
    eager, grade = row.get("latency_ratio_eager"), row.get("grade")
    named = wording.pipeline_label(row["pipeline"])
    return [
        named,
        wording.ratio(row),
        wording.number(eager),
        grade if isinstance(grade, str) else wording.ABSENT,
    ]
