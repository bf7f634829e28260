"""Tables on pipelines: the fastest of each model, where the order of two passes matters, and what each pass of several adds."""

from __future__ import annotations

import json
import math
from typing import Any

import pandas as pd

from ..checks.effect import AGAIN, COMPUTATION, NOTHING
from ..checks.optimize import EAGER
from ..judging.steps import FACT, LATENCY, noted
from ..records import Check, Outcome
from ..zoo.plan import OPTIMIZED
from .wording import ABSENT, effect, number, pipeline_label, ratio, shown, with_limit

KEY = ["model", "pipeline", "device"]
NONE = "none: the graph itself"
FASTEST = ["fastest safe", "graph = 1", "eager = 1", "grade", "fastest of all", "of all, graph = 1"]


def fastest(verdicts: pd.DataFrame) -> pd.DataFrame:
    """One row a model and device, of the verdicts of a run (`tables.verdicts`).

    Safe is a pipeline that preserves the computation and whose checks all passed. Faster is what is faster than the
    graph by more than the A/A floor of the measurement; where nothing is, the graph itself is the fastest.
    """
    columns = ["model", "device", *FASTEST]
    if "latency_ratio" not in verdicts:
        return pd.DataFrame(columns=columns)
    rows = verdicts[verdicts["latency_ratio"].notna()]
    effects = rows.filter(items=["latency_effect", "latency_ratio_low", "latency_ratio_high"]).to_dict(
        "records"
    )
    faster = pd.Series([effect(row) == "faster" for row in effects], rows.index, bool)
    faster &= (rows["pipeline"] != "") & (rows["verdict"] == Outcome.PASS)
    exact = faster & rows.get(str(Check.EQUIVALENCE), pd.Series(None, rows.index, str)).notna()
    found = []
    for key, timed in rows.groupby(["model", "device"]):
        safe, best = (_least(timed[mask[timed.index]]) for mask in (exact, faster))
        graph = timed[timed["pipeline"] == ""]
        cells = [NONE, "1", number(graph.iloc[0].get("latency_ratio")) if len(graph) else ABSENT, ABSENT]
        if safe is not None:
            grade = safe.get("grade")
            cells = [pipeline_label(safe["pipeline"]), ratio(safe), number(safe.get("latency_ratio_eager"))]
            cells.append(grade if isinstance(grade, str) else ABSENT)
        other = [ABSENT, ABSENT]
        if best is not None and (safe is None or best.name != safe.name):
            other = [pipeline_label(best["pipeline"]), number(best["latency_ratio"])]
        found.append([*key, *cells, *other])
    table = pd.DataFrame(found, columns=columns)
    return table if table["device"].nunique() > 1 else table.drop(columns="device")


def _least(rows: pd.DataFrame) -> pd.Series | None:
    return rows.iloc[int(rows["latency_ratio"].argmin())] if len(rows) else None


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


def orders(table: pd.DataFrame) -> pd.DataFrame:
    """One row a pair of passes that gives another graph in the other order, or a pass that does more the second time."""
    effects = table[table["check"] == Check.EFFECT]
    found = [*_again(effects), *_differing(effects)]
    rows = pd.DataFrame(found, columns=["passes", "model", "what"])
    grouped = rows.groupby("passes").agg(
        models=("model", "nunique"), example=("model", "first"), what=("what", "first")
    )
    return grouped.reset_index().rename(columns={"example": "for example"})


def _again(effects: pd.DataFrame) -> list[tuple[str, str, str]]:
    return [
        (pipeline_label(f"{row['pipeline']}+{row['pipeline']}"), row["model"], row[AGAIN])
        for row in _with(effects, AGAIN)
        if row[AGAIN] != NOTHING
    ]


def _differing(effects: pd.DataFrame) -> list[tuple[str, str, str]]:
    seen = {
        (row["model"], row["device"], row["pipeline"]): (row[COMPUTATION], row["nodes_after"])
        for row in _with(effects, COMPUTATION, "nodes_after")
    }
    found = []
    for (model, device, pipeline), (digest, nodes) in seen.items():
        first, second = pipeline.split("+")
        other, others = seen.get((model, device, f"{second}+{first}"), (digest, nodes))
        if first < second and other != digest:
            text = f"{nodes:.0f} nodes, {others:.0f} nodes in the other order"
            found.append((pipeline_label(pipeline), model, text))
    return found


def steps(table: pd.DataFrame) -> pd.DataFrame:
    """One row a pass of `all` and `exact`: its sites, the error of the graph after it, by what that grew, and by what the
    time of the graph changed, with its 95 % interval.
    """
    latencies = {
        (*(row[name] for name in KEY), step): f"{median:.3f} [{low:.3f}, {high:.3f}]"
        for row in _with(table, LATENCY)
        for step, median, low, high in json.loads(row[LATENCY])
    }
    rows: list[dict[str, object]] = []
    for row in _with(table, FACT):
        before, case = math.nan, {name: row[name] for name in KEY}
        for step in noted(row[FACT]):
            said = {
                "after": step.name or "capture",
                "sites": step.sites,
                "error": shown("relative_error", step.error),
                "by this pass": ABSENT if math.isnan(before) else f"{step.error - before:+.1e}",
                "latency, after / before": latencies.get((*case.values(), step.name), ABSENT),
            }
            rows.append(case | said)
            before = step.error
    return pd.DataFrame(rows)


def _with(table: pd.DataFrame, fact: str, *others: str) -> list[dict[Any, Any]]:
    """The rows that have a fact: their pipelines, it, and others."""
    if fact not in table:
        return []
    return table.loc[table[fact].fillna("") != "", [*KEY, fact, *others]].to_dict("records")
