"""Effects of passes on each other's graphs: where the order of two matters, and where a pass rewrites what it has made."""

from __future__ import annotations

import pandas as pd

from ..checks.effect import AGAIN, COMPUTATION, NOTHING
from ..records import Check
from .wording import pipeline_label


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
    if AGAIN not in effects:
        return []
    rows = effects[~effects[AGAIN].fillna("").isin(["", NOTHING])]
    return [
        (pipeline_label(f"{name}+{name}"), model, text)
        for name, model, text in zip(rows["pipeline"], rows["model"], rows[AGAIN], strict=True)
    ]


def _differing(effects: pd.DataFrame) -> list[tuple[str, str, str]]:
    if COMPUTATION not in effects:
        return []
    pairs = effects[effects[COMPUTATION].fillna("") != ""]
    key = (pairs["model"], pairs["device"], pairs["pipeline"])
    seen = dict(
        zip(zip(*key, strict=True), zip(pairs[COMPUTATION], pairs["nodes_after"], strict=True), strict=True)
    )
    found = []
    for (model, device, pipeline), (digest, nodes) in seen.items():
        first, second = pipeline.split("+")
        other, others = seen.get((model, device, f"{second}+{first}"), (digest, nodes))
        if first < second and other != digest:
            text = f"{nodes:.0f} nodes, {others:.0f} nodes in the other order"
            found.append((pipeline_label(pipeline), model, text))
    return found
