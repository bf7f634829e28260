"""The rows of a sweep, one for each case, as one for each architecture: how far it came, and what was found on the way."""

from __future__ import annotations

import math

import pandas as pd

from ..records import WORST_FIRST, Check, Outcome
from ..sweep import SOURCE

NUMBERS = (
    *("nodes", "modules", "relative_error"),
    *("forward_runs", "trace_seconds", "peer_seconds", "peer_work_seconds"),
)
FACTS = ("captured", "refusal", "batch", "sequence", "peer", "peer_reason", "peer_sizes")


def is_sweep(table: pd.DataFrame) -> bool:
    """Tell whether the run was a sweep."""
    return SOURCE in table and bool(table[SOURCE].fillna("").ne("").any())


def by_architecture(table: pd.DataFrame) -> pd.DataFrame:
    """One row for each architecture, sorted by name.

    `outcome`, `stage` and `reason` are those of its worst case, `runs` says whether the model itself does, and `right`
    whether its graph gives what it gives. `sites_<pass>` is how many sites the pass rewrote. `relative_error` is the
    largest of any case, where it is judged.
    """
    rank = {outcome: place for place, outcome in enumerate(WORST_FIRST)}
    # What found nothing to rewrite is right; what could not be run, because of a case that says why, is no news.
    outcomes = table["outcome"].replace(Outcome.NO_OP, Outcome.PASS)
    table = table.assign(outcome=outcomes, rank=outcomes.map(rank), parity=table["check"] == Check.PARITY)
    worst = (
        table.sort_values(["rank", "parity"], ascending=[True, False], kind="stable").groupby("model").first()
    )
    parity = table[table["parity"]].drop_duplicates("model").set_index("model")
    rows = worst[["outcome", "stage", "reason"]].copy()
    silent = parity.index[parity["outcome"] == Outcome.SKIP]
    rows.loc[silent, ["outcome", "stage", "reason"]] = parity.loc[silent, ["outcome", "stage", "reason"]]
    rows["runs"] = rows["outcome"] != Outcome.SKIP
    rows["right"] = (parity["outcome"] == Outcome.PASS).reindex(rows.index, fill_value=False)
    rows["seconds"] = table.groupby("model")["seconds"].sum()
    by_model = table.groupby("model")
    for name in FACTS:
        rows[name] = by_model[name].agg(_said) if name in table else ""
    for name in NUMBERS:
        column = "relative_error_float64" if name == "relative_error" else name
        rows[name] = by_model[column].max() if column in table else math.nan
    effects = table[(table["check"] == Check.EFFECT) & table["pipeline"].ne("")]
    if "sites" in effects:
        sites = effects.pivot_table("sites", "model", "pipeline", aggfunc="first")
        rows = rows.join(sites.add_prefix("sites_"))
    return rows.rename_axis("architecture").reset_index()


def _said(texts: pd.Series[str]) -> str:
    return next((text for text in texts if isinstance(text, str) and text), "")
