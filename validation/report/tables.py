"""The tables that every view shows, computed from the table of a run alone."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pandas as pd

from ..metric import UNITS, metric_of, unit_of
from ..records import FAILING, WORST_FIRST, Check, Outcome
from ..store import measurements_of, missing

ABSENT = "-"
NO_PASS = "(no pass)"
RATIO = ("latency_ratio", "latency_ratio_low", "latency_ratio_high")

# How measurements are called in headings; other names are spelled out, with their unit.
HEADINGS = {
    "latency_ratio": "latency, transformed / original",
    "sites": "sites rewritten",
    "refused": "sites refused",
}


def heading(name: str) -> str:
    """The heading of a measurement, with its unit.

    Example:
        >>> heading("latency_baseline_ms")
        'latency baseline (ms)'
    """
    if name in HEADINGS:
        return HEADINGS[name]
    first, *words = name.split("_")
    unit = unit_of(name)
    text = " ".join([first, *(word for word in words if UNITS.get(word) != unit)])
    return f"{text} ({unit})" if unit else text


def shown(name: str, value: float) -> str:
    """A measurement as text: counts in full, errors with their magnitude, the rest to a few digits.

    Example:
        >>> shown("parameters_after", 109482240.0), shown("relative_error", 3.16e-7), shown("latency_ms", 98.765)
        ('109,482,240', '3.2e-07', '98.77')
    """
    if math.isnan(value):
        return ABSENT
    if value == 0 or (float(value).is_integer() and not is_error(name)):
        return f"{value:,.0f}"
    if is_error(name) or is_limit(name):
        return f"{value:.1e}"
    return f"{value:.6g}" if is_share(name) else f"{value:.4g}"


def is_error(name: str) -> bool:
    """Tell whether a measurement is an error: smaller is better, and magnitudes matter."""
    return metric_of(name).kind == "error"


def is_share(name: str) -> bool:
    """Tell whether a measurement is a share of right or equal answers, or a cosine: larger is better."""
    return metric_of(name).kind == "accuracy"


def is_limit(name: str) -> bool:
    """Tell whether a measurement is what an error is held against."""
    return metric_of(name).kind == "limit"


def limit_of(name: str) -> str:
    """The name of what an error is held against, or empty.

    Example:
        >>> limit_of("relative_error_float64"), limit_of("max_abs_error")
        ('tolerance_float64', '')
    """
    return name.replace("relative_error", "tolerance") if "relative_error" in name else ""


def errors_of(table: pd.DataFrame) -> list[str]:
    """The errors to look at first: those that are held against a limit; all of them when none is."""
    names = [name for name in measurements_of(table) if is_error(name) and table[name].notna().any()]
    return [name for name in names if limit_of(name) in table.columns] or names


def worst(outcomes: Iterable[str]) -> str:
    """What several outcomes come to together; empty for none.

    Example:
        >>> worst(["pass", "skip", "fail"]), worst(["pass", "no-op"])
        ('fail', 'no-op')
    """
    present = set(outcomes)
    return next((str(outcome) for outcome in WORST_FIRST if outcome in present), "")


def conditions(table: pd.DataFrame) -> dict[str, str]:
    """What the run was made with; of several runs whose cases stand together, all of it."""
    devices = table.groupby("device")["device_name"].first()
    started, lacking = table["started"].min(), missing(table)
    return {
        "run": _all(table["run"]),
        "started": f"{started:%Y-%m-%d %H:%M} UTC",
        "commit": _all(table["commit"]) or "unknown",
        "python": _all(table["python"]),
        "torch": _all(table["torch"]),
        "transformers": _all(table["transformers"]),
        "devices": "; ".join(f"{device}: {name or 'unknown'}" for device, name in devices.items()),
        "threads when timed": _all(table["threads"]),
        "cases": f"{len(table):,}, {table['seconds'].sum():,.0f} s of work",
        **(
            {"partial": f"{lacking:,} of {lacking + len(table):,} planned cases were not run"}
            if lacking > 0
            else {}
        ),
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
    merged = groups.agg({"outcome": worst, "reason": _distinct, **how}).rename(columns={"outcome": "verdict"})
    by_check = table.pivot_table(
        index=["model", "device", "pipeline"], columns="check", values="outcome", aggfunc=worst
    )
    return _ordered(merged.join(by_check.rename_axis(columns=None)).reset_index())


def matrix(verdict: pd.DataFrame) -> pd.DataFrame:
    """Pipeline × model: the verdicts as words; when there are several devices, each has its columns."""
    return _crossed(verdict, "verdict")


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
    measured = [name for name in measurements_of(table) if rows[name].notna().any()]
    for name in ["sites", "refused"]:
        if name in measured:
            view[heading(name)] = [shown(name, value) for value in rows[name]]
    for name in errors_of(rows):
        view[f"{heading(name)} (limit)"] = [_with_limit(row, name) for _, row in rows.iterrows()]
    for name in filter(is_share, measured):
        view[heading(name)] = [shown(name, value) for value in rows[name]]
    if "latency_ratio" in measured:
        view[f"{heading('latency_ratio')} (95 % interval)"] = [ratio(row) for _, row in rows.iterrows()]
    view["reason"] = rows["reason"].replace("", ABSENT)
    return view


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
    """What was measured of passes that do not preserve the computation, in all models; not of compositions."""
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


def ratio(row: pd.Series) -> str:
    """A latency ratio with its interval: `0.912 [0.903, 0.921]`."""
    value, low, high = (float(row.get(name, math.nan)) for name in RATIO)
    if math.isnan(value):
        return ABSENT
    return f"{value:.3f}" if math.isnan(low) else f"{value:.3f} [{low:.3f}, {high:.3f}]"


def pipeline_label(pipeline: str) -> str:
    """A pipeline as text.

    Example:
        >>> pipeline_label("MergeLinears+FuseBiasInLinear"), pipeline_label("")
        ('MergeLinears → FuseBiasInLinear', '(no pass)')
    """
    return pipeline.replace("+", " → ") or NO_PASS


def _crossed(rows: pd.DataFrame, values: str) -> pd.DataFrame:
    rows = _ordered(rows)
    several = rows["device"].nunique() > 1
    column = rows["model"] + (" · " + rows["device"] if several else "")
    words = rows.assign(column=column).pivot(index="pipeline", columns="column", values=values)
    words = words.reindex(rows["pipeline"].unique()).fillna(ABSENT)
    words.index = words.index.map(pipeline_label)
    return words.rename_axis(index="passes", columns=None).reset_index()


def _with_limit(row: pd.Series, name: str) -> str:
    limit = float(row.get(limit_of(name), math.nan))
    text = shown(name, row[name])
    return text if math.isnan(limit) else f"{text} ({shown(limit_of(name), limit)})"


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
