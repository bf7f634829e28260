"""The tables that every view shows, computed from the table of a run alone."""

from __future__ import annotations

import json

import pandas as pd

from ..checks.effect import PLACES
from ..records import FAILING, WORST_FIRST, Check, Outcome
from ..regressions.metric import metric_of
from ..store import COLUMNS, measurements_of, missing
from .wording import ABSENT, heading, limit_of, pipeline_label, ratio, shown, with_limit


def errors_of(table: pd.DataFrame) -> list[str]:
    """The errors to look at first: those that are held against a limit; all of them when none is."""
    names = [
        name
        for name in measurements_of(table)
        if metric_of(name).kind == "error" and table[name].notna().any()
    ]
    return [name for name in names if limit_of(name) in table.columns] or names


def conditions(table: pd.DataFrame) -> dict[str, str]:
    """The versions, devices and times of a run; of several runs whose cases stand together, all of it."""
    devices = table.groupby("device")["device_name"].first()
    started, lacking = table["started"].min(), missing(table)
    found = {
        "run": _all(table["run"]),
        "started": f"{started:%Y-%m-%d %H:%M} UTC",
        "commit": _all(table["commit"]) or "unknown",
        "python": _all(table["python"]),
        "torch": _all(table["torch"]),
        "transformers": _all(table["transformers"]),
        "fxopt": _all(table["fxopt"]) or "unknown",
        "devices": "; ".join(f"{device}: {name or 'unknown'}" for device, name in devices.items()),
        "threads when timed": _all(table["threads"]),
        "cases": f"{len(table):,}, {table['seconds'].sum():,.0f} s of work",
    }
    if lacking:
        found["partial"] = f"{lacking:,} of {lacking + len(table):,} planned cases were not run"
    return found


def counts(table: pd.DataFrame) -> pd.DataFrame:
    """Model × outcome: how many cases ended how, with only the outcomes that occur, best first."""
    counted = pd.crosstab(table["model"], table["outcome"])
    order = [str(o) for o in (Outcome.PASS, Outcome.NO_OP, Outcome.SKIP, Outcome.EXPECTED)]
    order += [str(o) for o in WORST_FIRST if o in FAILING]
    counted = counted[[outcome for outcome in order if outcome in counted]]
    seconds = table.groupby("model")["seconds"].sum()
    return counted.assign(**{"time (s)": seconds.round(1)}).rename_axis(columns=None).reset_index()


def problems(table: pd.DataFrame) -> pd.DataFrame:
    """Why cases failed: one row a reason, the worst outcomes first, with some of the cases it befell.

    A model that cannot be captured fails in every case for one reason; its first case is the simplest one.
    """
    failed = _ordered(table[table["outcome"].isin(FAILING)])
    grouped = failed.groupby(["outcome", "reason"], sort=False)
    rows = grouped.agg(case=("id", _some), stage=("stage", _distinct), cases=("id", "size")).reset_index()
    rank = rows["outcome"].map({str(outcome): rank for rank, outcome in enumerate(WORST_FIRST)})
    rows = rows.iloc[rank.argsort(kind="stable")].reset_index(drop=True)
    return rows[["outcome", "case", "stage", "reason", "cases"]]


def excuses(table: pd.DataFrame) -> pd.DataFrame:
    """Why cases failed as expected: one row a reason, with how many cases and one of them."""
    excused = table[table["outcome"] == Outcome.EXPECTED]
    grouped = excused.groupby("reason")["id"].agg(["count", "first"]).reset_index()
    grouped = grouped.sort_values("count", ascending=False, ignore_index=True)
    return grouped.rename(columns={"count": "cases", "first": "for example"})


def verdicts(table: pd.DataFrame) -> pd.DataFrame:
    """One row a model, device and pipeline: the verdict over all checks, every measurement and fact.

    Where several checks measure the same thing, errors are the largest and all else is the first.
    """
    measured = measurements_of(table)
    facts = [str(name) for name in table.columns if name not in COLUMNS and name not in measured]
    how = {name: "max" if metric_of(name).kind == "error" else "first" for name in [*measured, *facts]}
    key = ["model", "device", "pipeline"]
    ranked = table.assign(rank=table["outcome"].map({str(o): rank for rank, o in enumerate(WORST_FIRST)}))
    merged = ranked.groupby(key, sort=False).agg({"rank": "min", **how})
    merged.insert(0, "verdict", _outcomes(merged.pop("rank")))
    said = table[table["reason"] != ""].groupby(key)["reason"].agg(_distinct)
    merged.insert(1, "reason", said.reindex(merged.index).fillna(""))
    by_check = ranked.groupby([*key, "check"])["rank"].min().unstack("check").rename_axis(columns=None)
    return _ordered(merged.join(by_check.apply(_outcomes)).reset_index())


def _outcomes(ranks: pd.Series) -> pd.Series:
    """Ranks in the order of badness as words; what is missing stays so."""
    return ranks.map(dict(enumerate(map(str, WORST_FIRST))))


def matrix(verdict: pd.DataFrame) -> pd.DataFrame:
    """Pipeline × model: the verdicts as words; when there are several devices, each has its columns."""
    return _crossed(verdict, "verdict")


def compatibility(table: pd.DataFrame, model: str) -> pd.DataFrame:
    """Pass × device for one model: verdict, sites, refusals with their reasons, errors, and speed."""
    rows = verdicts(table[table["model"] == model])
    view = pd.DataFrame({"passes": rows["pipeline"].map(pipeline_label)})
    view[["device", "verdict"]] = rows[["device", "verdict"]]
    measured = [name for name in measurements_of(table) if rows[name].notna().any()]
    for name in ["sites", "refused"]:
        if name in measured:
            view[heading(name)] = [shown(name, value) for value in rows[name]]
    for name in errors_of(rows):
        view[f"{heading(name)} (limit)"] = [with_limit(row, name) for _, row in rows.iterrows()]
    for name in [name for name in measured if metric_of(name).kind == "accuracy"]:
        view[heading(name)] = [shown(name, value) for value in rows[name]]
    if "latency_ratio" in measured:
        view[f"{heading('latency_ratio')} (95 % interval)"] = [ratio(row) for _, row in rows.iterrows()]
    view["reason"] = rows["reason"].replace("", ABSENT)
    return view


def of_pass(table: pd.DataFrame, name: str) -> pd.DataFrame:
    """Model × one pass: verdict, sites, refusals, errors with their limits, and the gain."""
    rows = verdicts(table[table["pipeline"] == name])
    view = rows[["model", "device", "verdict"]].copy()
    for column in [column for column in ("sites", "refused") if column in rows]:
        view[heading(column)] = [shown(column, value) for value in rows[column]]
    for column in errors_of(rows):
        view[f"{heading(column)} (limit)"] = [with_limit(row, column) for _, row in rows.iterrows()]
    if "latency_ratio" in rows:
        view[f"{heading('latency_ratio')} (95 % interval)"] = [ratio(row) for _, row in rows.iterrows()]
    view["reason"] = rows["reason"].replace("", ABSENT)
    return view


def places(table: pd.DataFrame, name: str) -> pd.DataFrame:
    """Where a pass rewrote: one row a model and site, with its module and line."""
    rows = table[(table["pipeline"] == name) & (table["check"] == Check.EFFECT)]
    told = rows[PLACES].fillna("") if PLACES in rows else pd.Series("", rows.index)
    listed = [
        (model, place)
        for model, places in zip(rows["model"], told, strict=True)
        for place in json.loads(places or "[]")
    ]
    return pd.DataFrame(listed, columns=["model", "site"]).drop_duplicates(ignore_index=True)


def checks(table: pd.DataFrame, model: str) -> pd.DataFrame:
    """Pass × check for one model: how each check ended."""
    rows = verdicts(table[table["model"] == model])
    view = rows[["device", *(str(check) for check in Check if str(check) in rows)]].fillna(ABSENT)
    view.insert(0, "passes", rows["pipeline"].map(pipeline_label))
    return view


def measurements(rows: pd.DataFrame) -> pd.DataFrame:
    """Everything that was measured in some cases, one row a case; what no case has is left out."""
    names = [name for name in measurements_of(rows) if rows[name].notna().any()]
    rows = _ordered(rows[rows[names].notna().any(axis=1)])
    view = pd.DataFrame({"passes": rows["pipeline"].map(pipeline_label)})
    view[["model", "device", "check", "dtype"]] = rows[["model", "device", "check", "dtype"]]
    for name in names:
        view[heading(name)] = [shown(name, value) for value in rows[name]]
    return view


def accuracy(table: pd.DataFrame) -> pd.DataFrame:
    """The measurements of passes that do not preserve the computation, in all models; not of compositions."""
    composed = table["pipeline"].str.contains("+", regex=False)
    return measurements(table[(table["check"] == Check.ACCURACY) & ~composed]).drop(columns="check")


def speed(table: pd.DataFrame) -> pd.DataFrame:
    """Pipeline × model: latency ratios with their intervals; no rows when nothing was timed."""
    if "latency_ratio" not in table:
        return pd.DataFrame()
    timed = table[table["latency_ratio"].notna()]
    words = timed.assign(text=[ratio(row) for _, row in timed.iterrows()])
    return _crossed(words, "text")


def refusals(table: pd.DataFrame) -> pd.DataFrame:
    """Why passes refused sites: one row a pass and reason, with the sites, the models, and one node."""
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


def _crossed(rows: pd.DataFrame, values: str) -> pd.DataFrame:
    rows = _ordered(rows)
    several = rows["device"].nunique() > 1
    column = rows["model"] + (" · " + rows["device"] if several else "")
    words = rows.assign(column=column).pivot(index="pipeline", columns="column", values=values)
    words = words.reindex(rows["pipeline"].unique()).fillna(ABSENT)
    words.index = words.index.map(pipeline_label)
    return words.rename_axis(index="passes", columns=None).reset_index()


def _some(ids: pd.Series[str], most: int = 3) -> str:
    cases = ids.tolist()
    more = f" and {len(cases) - most} more" if len(cases) > most else ""
    return ", ".join(cases[:most]) + more


def _all(values: pd.Series[str]) -> str:
    return ", ".join(str(value) for value in values.unique() if str(value))


def _distinct(texts: pd.Series[str]) -> str:
    return "; ".join(dict.fromkeys(text for text in texts if text))


def _ordered(rows: pd.DataFrame) -> pd.DataFrame:
    """No pass first, then single passes, then compositions, each by name."""
    length = [len(pipeline.split("+")) if pipeline else 0 for pipeline in rows["pipeline"]]
    by = ["length", "pipeline", "model", "device"]
    return rows.assign(length=length).sort_values(by, kind="stable", ignore_index=True).drop(columns="length")
