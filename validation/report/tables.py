"""The tables that every view shows, computed from the table of a run alone."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

import pandas as pd

from validation.compare import FAILING, WORST_FIRST
from validation.records import Check, Outcome
from validation.store import measurements_of

ABSENT = "-"
NO_PASS = "(no pass)"
RATIO = ("latency_ratio", "latency_ratio_low", "latency_ratio_high")

# How measurements are called in headings; other names are spelled out, with the unit of their suffix.
HEADINGS = {
    "latency_ratio": "latency, transformed / original",
    "sites": "sites rewritten",
    "refused": "sites refused",
}
UNITS = {"ms": "ms", "s": "s", "seconds": "s", "mb": "MB", "bytes": "B", "percent": "%"}


def heading(name: str) -> str:
    """The heading of a measurement, with its unit: `latency_baseline_ms` is "latency baseline (ms)"."""
    if name in HEADINGS:
        return HEADINGS[name]
    words, _, suffix = name.rpartition("_")
    text = f"{words} ({UNITS[suffix]})" if words and suffix in UNITS else name
    return text.replace("_", " ")


def shown(name: str, value: float) -> str:
    """A measurement as text: counts in full, errors with their magnitude, the rest to four digits."""
    if math.isnan(value):
        return ABSENT
    if value == 0 or (float(value).is_integer() and not is_error(name)):
        return f"{value:,.0f}"
    return f"{value:.1e}" if is_error(name) or is_limit(name) else f"{value:.4g}"


def is_error(name: str) -> bool:
    """Whether a measurement is an error: smaller is better, and magnitudes matter."""
    return "error" in name and not is_limit(name)


def is_limit(name: str) -> bool:
    """Whether a measurement is what an error is held against."""
    return bool(re.search(r"tolerance|limit|bound|allowed", name))


def worst(outcomes: Iterable[str]) -> str:
    """What several outcomes come to together."""
    present = set(outcomes)
    return next((str(outcome) for outcome in WORST_FIRST if outcome in present), "")


def conditions(table: pd.DataFrame) -> dict[str, str]:
    """What the run was made with."""
    devices = table.groupby("device")["device_name"].first()
    started = table["started"].min()
    return {
        "run": str(table["run"].iloc[0]),
        "started": f"{started:%Y-%m-%d %H:%M} UTC",
        "commit": str(table["commit"].iloc[0]) or "unknown",
        "python": str(table["python"].iloc[0]),
        "torch": str(table["torch"].iloc[0]),
        "transformers": str(table["transformers"].iloc[0]),
        "devices": "; ".join(f"{device}: {name or 'unknown'}" for device, name in devices.items()),
        "threads when timed": str(table["threads"].iloc[0]),
        "cases": f"{len(table):,}, {table['seconds'].sum():,.0f} s of work",
    }


def counts(table: pd.DataFrame) -> pd.DataFrame:
    """Model × outcome: how many cases ended how, with only the outcomes that occur, best first."""
    counted = pd.crosstab(table["model"], table["outcome"])
    order = [str(o) for o in (Outcome.PASS, Outcome.NO_OP, Outcome.SKIP, Outcome.EXPECTED)]
    order += [str(o) for o in WORST_FIRST if o in FAILING]
    counted = counted[[outcome for outcome in order if outcome in counted]]
    seconds = table.groupby("model")["seconds"].sum()
    return counted.assign(**{"time (s)": seconds.round(1)}).rename_axis(columns=None).reset_index()


def problems(table: pd.DataFrame) -> pd.DataFrame:
    """The cases that failed, the worst outcomes first, each with where and why."""
    failed = table[table["outcome"].isin(FAILING)]
    rank = failed["outcome"].map({str(outcome): rank for rank, outcome in enumerate(WORST_FIRST)})
    failed = failed.assign(rank=rank).sort_values(["rank", "id"])
    return failed[["outcome", "id", "stage", "reason"]].rename(columns={"id": "case"}).reset_index(drop=True)


def excuses(table: pd.DataFrame) -> pd.DataFrame:
    """Why cases were skipped or failed as expected: one row a reason, with how many cases and one of them."""
    excused = table[table["outcome"].isin([Outcome.SKIP, Outcome.EXPECTED])]
    grouped = excused.groupby(["outcome", "reason"])["id"].agg(["count", "first"]).reset_index()
    grouped = grouped.sort_values("count", ascending=False, ignore_index=True)
    return grouped.rename(columns={"count": "cases", "first": "for example"})


def verdicts(table: pd.DataFrame) -> pd.DataFrame:
    """One row a model, device and pipeline: the verdict over all checks, and every measurement.

    Where several checks measure the same thing, errors are the largest and all else is the first.
    """
    measured = measurements_of(table)
    how = {name: "max" if is_error(name) else "first" for name in measured}
    groups = table.groupby(["model", "device", "pipeline"], sort=False)
    merged = groups.agg({"outcome": worst, "reason": _reasons, **how}).rename(columns={"outcome": "verdict"})
    by_check = table.pivot_table(
        index=["model", "device", "pipeline"], columns="check", values="outcome", aggfunc=worst
    )
    return _ordered(merged.join(by_check.rename_axis(columns=None)).reset_index())


def matrix(verdict: pd.DataFrame) -> pd.DataFrame:
    """Pipeline × model: the verdicts as words; a model on several devices has a column for each."""
    several = verdict["device"].nunique() > 1
    column = verdict["model"] + (" · " + verdict["device"] if several else "")
    words = verdict.assign(column=column).pivot(index="pipeline", columns="column", values="verdict")
    words = words.reindex(verdict["pipeline"].unique()).fillna(ABSENT)
    words.index = words.index.map(pipeline_label)
    return words.rename_axis(index="passes", columns=None).reset_index()


def compatibility(table: pd.DataFrame, model: str) -> pd.DataFrame:
    """Pass × device for one model: verdict, sites, refusals with their reasons, errors, and speed."""
    rows = verdicts(table[table["model"] == model])
    view = pd.DataFrame(
        {
            "passes": rows["pipeline"].map(pipeline_label),
            "device": rows["device"],
            "verdict": rows["verdict"],
        }
    )
    shown_names = [name for name in measurements_of(table) if rows[name].notna().any()]
    for name in ["sites", "refused", *filter(is_error, shown_names)]:
        if name in shown_names:
            view[heading(name)] = [shown(name, value) for value in rows[name]]
    if "latency_ratio" in shown_names:
        view[f"{heading('latency_ratio')} (95 % interval)"] = [ratio(row) for _, row in rows.iterrows()]
    view["reason"] = rows["reason"].replace("", ABSENT)
    return view


def checks(table: pd.DataFrame, model: str) -> pd.DataFrame:
    """Pass × check for one model: how each check ended."""
    rows = verdicts(table[table["model"] == model])
    view = rows[["device", *(str(check) for check in Check if str(check) in rows)]].fillna(ABSENT)
    view.insert(0, "passes", rows["pipeline"].map(pipeline_label))
    return view


def measurements(table: pd.DataFrame, model: str) -> pd.DataFrame:
    """Everything that was measured on one model, one row a case; what no case has is left out."""
    rows = _ordered(table[table["model"] == model])
    names = [name for name in measurements_of(table) if rows[name].notna().any()]
    rows = rows[rows[names].notna().any(axis=1)]
    view = pd.DataFrame({"passes": rows["pipeline"].map(pipeline_label)})
    view[["device", "check", "dtype"]] = rows[["device", "check", "dtype"]]
    for name in names:
        view[heading(name)] = [shown(name, value) for value in rows[name]]
    return view


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


def ratio(row: pd.Series) -> str:
    """A latency ratio with its interval: `0.912 [0.903, 0.921]`."""
    value, low, high = (float(row.get(name, math.nan)) for name in RATIO)
    if math.isnan(value):
        return ABSENT
    return f"{value:.3f}" if math.isnan(low) else f"{value:.3f} [{low:.3f}, {high:.3f}]"


def pipeline_label(pipeline: str) -> str:
    """A pipeline as text: `MergeLinears → FuseBiasInLinear`."""
    return pipeline.replace("+", " → ") or NO_PASS


def _reasons(reasons: pd.Series[str]) -> str:
    return "; ".join(dict.fromkeys(reason for reason in reasons if reason))


def _ordered(rows: pd.DataFrame) -> pd.DataFrame:
    """No pass first, then single passes, then compositions, each by name."""
    length = [len(pipeline.split("+")) if pipeline else 0 for pipeline in rows["pipeline"]]
    by = ["length", "pipeline", "model", "device"]
    return rows.assign(length=length).sort_values(by, kind="stable", ignore_index=True).drop(columns="length")
