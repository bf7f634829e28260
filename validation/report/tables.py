"""The tables that every view shows, computed only from the table of a run."""

from __future__ import annotations

import json
from collections.abc import Collection

import pandas as pd

from ..checks.effect import PLACES
from ..records import FAILING, WORST_FIRST
from ..regressions.metric import metric_of
from ..store import COLUMNS, measurements_of
from .wording import ABSENT, heading, limit_of, pipeline_label, ratio, shown, with_limit


def errors_of(table: pd.DataFrame) -> list[str]:
    """The most important errors: those that have a limit; if none has, all errors."""
    names = [
        name
        for name in measurements_of(table)
        if metric_of(name).kind == "error" and table[name].notna().any()
    ]
    return [name for name in names if limit_of(name) in table.columns] or names


def conditions(table: pd.DataFrame) -> dict[str, str]:
    """The versions, devices and times of a run; for cases of several runs, the values of all runs."""
    devices = table.groupby("device")["device_name"].unique()
    shared = ("run", "commit", "python", "torch", "transformers", "fxopt", "threads")
    found = {name: ", ".join(str(v) for v in table[name].unique() if str(v)) or "unknown" for name in shared}
    return found | {
        "started": f"{table['started'].min():%Y-%m-%d %H:%M} UTC",
        "devices": "; ".join(
            f"{device}: {' and '.join(filter(None, names)) or 'unknown'}" for device, names in devices.items()
        ),
        "cases": f"{len(table):,}, {table['seconds'].sum():,.0f} s of work",
    }


def problems(table: pd.DataFrame, outcomes: Collection[str] = FAILING) -> pd.DataFrame:
    """The reasons why cases failed: one row a reason, the worst outcomes first, with some of its cases.

    A model that cannot be captured fails in every case for one reason; its first case is the simplest one.
    """
    failed = _ordered(table[table["outcome"].isin(outcomes)])
    grouped = failed.groupby(["outcome", "reason"], sort=False)
    rows = grouped.agg(case=("id", _some), stage=("stage", _distinct), cases=("id", "size")).reset_index()
    rows = rows.iloc[rows["outcome"].map(WORST_FIRST.index).argsort(kind="stable")].reset_index(drop=True)
    return rows[["outcome", "case", "stage", "reason", "cases"]]


def verdicts(table: pd.DataFrame) -> pd.DataFrame:
    """One row a model, device and pipeline: the verdict over all checks, every measurement and fact.

    If several checks measure the same metric, an error is the largest, and any other metric the first.
    """
    measured = measurements_of(table)
    facts = [str(name) for name in table.columns if name not in COLUMNS and name not in measured]
    how = {name: "max" if metric_of(name).kind == "error" else "first" for name in [*measured, *facts]}
    key = ["model", "device", "pipeline"]
    ranked = table.assign(rank=table["outcome"].map(WORST_FIRST.index))
    merged = ranked.groupby(key, sort=False).agg({"rank": "min", **how})
    merged.insert(0, "verdict", merged.pop("rank").map(WORST_FIRST.__getitem__))
    said = table[table["reason"] != ""].groupby(key)["reason"].agg(_distinct)
    merged.insert(1, "reason", said.reindex(merged.index).fillna(""))
    return _ordered(merged.reset_index())


def matrix(table: pd.DataFrame) -> pd.DataFrame:
    """Pipeline × model: the verdicts as words; if there are several devices, each device has its own columns."""
    rows = verdicts(table)
    column = rows["model"] + (" · " + rows["device"] if rows["device"].nunique() > 1 else "")
    words = rows.assign(column=column).pivot(index="pipeline", columns="column", values="verdict")
    words = words.reindex(rows["pipeline"].unique()).fillna(ABSENT)
    words.index = words.index.map(pipeline_label)
    return words.rename_axis(index="passes", columns=None).reset_index()


def compatibility(table: pd.DataFrame) -> pd.DataFrame:
    """Model × pass × device, of one model or one pass: verdict, sites, refusals, errors with their limits, and speed."""
    rows = verdicts(table)
    view = rows[["model", "device", "verdict"]].copy()
    view.insert(1, "passes", rows["pipeline"].map(pipeline_label))
    measured = [name for name in measurements_of(table) if rows[name].notna().any()]
    for name in [name for name in measured if name in ("sites", "refused")]:
        view[heading(name)] = [shown(name, value) for value in rows[name]]
    for name in errors_of(rows):
        view[f"{heading(name)} (limit)"] = [with_limit(row, name) for _, row in rows.iterrows()]
    for name in [name for name in measured if metric_of(name).kind == "accuracy"]:
        view[heading(name)] = [shown(name, value) for value in rows[name]]
    if "latency_ratio" in measured:
        view[f"{heading('latency_ratio')} (95 % interval)"] = [ratio(row) for _, row in rows.iterrows()]
    view["reason"] = rows["reason"].replace("", ABSENT)
    return view.drop(columns=[name for name in ("model", "passes") if view[name].nunique() == 1])


def places(table: pd.DataFrame) -> pd.DataFrame:
    """The places where a pass rewrote: one row a model and site, with its module and line."""
    told = table.reindex(columns=["model", PLACES]).dropna()
    listed = told.assign(site=[json.loads(text or "[]") for text in told[PLACES]]).explode("site")
    return listed[["model", "site"]].dropna().drop_duplicates(ignore_index=True)


def refusals(table: pd.DataFrame) -> pd.DataFrame:
    """The reasons why passes refused sites: one row a pass and reason, with the sites, the models, and one node."""
    refused = table[["model", "refusals"]].explode("refusals").dropna(subset="refusals")
    if refused.empty:
        return pd.DataFrame(columns=["pass", "reason", "sites", "models", "for example"])
    fields = pd.DataFrame(refused["refusals"].tolist(), index=refused.index)
    sites = pd.concat([refused["model"], fields], axis=1).drop_duplicates()
    sites = sites.groupby(["pass", "reason"]).agg(
        sites=("node", "size"),
        models=("model", lambda names: ", ".join(sorted(set(names)))),
        node=("node", "first"),
    )
    sites = sites.reset_index().rename(columns={"node": "for example"})
    return sites.sort_values(["pass", "sites"], ascending=[True, False], ignore_index=True)


def _some(ids: pd.Series[str], most: int = 3) -> str:
    cases = ids.tolist()
    more = f" and {len(cases) - most} more" if len(cases) > most else ""
    return ", ".join(cases[:most]) + more


def _distinct(texts: pd.Series[str]) -> str:
    return "; ".join(dict.fromkeys(text for text in texts if text))


def _ordered(rows: pd.DataFrame) -> pd.DataFrame:
    """Sort rows: no pass first, then single passes, then pipelines of several passes, each by name."""
    length = [len(pipeline.split("+")) if pipeline else 0 for pipeline in rows["pipeline"]]
    by = ["length", "pipeline", "model", "device"]
    return rows.assign(length=length).sort_values(by, kind="stable", ignore_index=True).drop(columns="length")
