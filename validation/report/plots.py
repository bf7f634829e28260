"""The plots of the HTML report, as Vega-Lite specifications; each is made from the table of a run alone."""

from __future__ import annotations

from typing import Any

import altair as alt
import pandas as pd

from ..records import FAILING
from . import tables

ROW_HEIGHT = 18  # pixels for one pipeline on one device

# Exact agreement has no place on a log axis: it is drawn here, left of every error that float64 can have.
EXACT = 1e-18

# Colours that keep apart on light and dark ground, also for colour-blind readers (Okabe and Ito, 2008).
GREEN, ORANGE, BLUE, GREY, RED = "#009e73", "#e69f00", "#0072b2", "#8a8f98", "#d55e00"


def latency(table: pd.DataFrame, model: str) -> dict[str, Any] | None:
    """Latency ratios of one model with their intervals and a line at 1; None when nothing was timed."""
    if not set(tables.RATIO) <= set(table.columns):
        return None
    rows = table[(table["model"] == model) & table["latency_ratio"].notna()]
    if rows.empty:
        return None
    rows = rows.assign(
        passes=rows["pipeline"].map(tables.pipeline_label),
        effect=[
            _effect(low, high) for low, high in zip(rows[tables.RATIO[1]], rows[tables.RATIO[2]], strict=True)
        ],
    )
    columns = ["passes", "device", "effect", *tables.RATIO]
    effects = alt.Scale(domain=["faster", "no clear difference", "slower"], range=[GREEN, GREY, RED])
    base = alt.Chart(_data(rows, columns)).encode(
        **_place(rows),
        color=alt.Color("effect:N", scale=effects, title="transformed model is", legend=_legend()),
        tooltip=_tooltips(rows, columns),
    )
    axis = alt.Axis(
        title="latency, transformed / original (left of 1 is faster)", tickCount=8, labelOverlap=True
    )
    interval = base.mark_rule(strokeWidth=3, opacity=0.55).encode(
        x=alt.X("latency_ratio_low:Q", scale=alt.Scale(zero=False), axis=axis),
        x2="latency_ratio_high:Q",
    )
    point = base.mark_point(filled=True, size=70, opacity=1).encode(x="latency_ratio:Q", shape=_shape(rows))
    one = alt.Chart(alt.Data(values=[{"one": 1}])).mark_rule(strokeDash=[4, 4], color=GREY).encode(x="one:Q")
    return _specification(alt.layer(one, interval, point), rows)


def errors(table: pd.DataFrame, model: str) -> dict[str, Any] | None:
    """Errors of one model on a log axis, each with its tolerance; None when no error was measured."""
    rows = table[table["model"] == model]
    parts = [_one_error(rows, name) for name in tables.errors_of(rows)]
    long = pd.concat(parts) if parts else pd.DataFrame()
    if long.empty:
        return None
    columns = ["passes", "device", "check", "measured", "error", "drawn", "tolerance", "verdict"]
    kinds = alt.Scale(range=[BLUE, ORANGE, GREEN, "#cc79a7", "#56b4e9", GREY])
    base = alt.Chart(_data(long, columns)).encode(
        **_place(long),
        color=alt.Color(
            "measured:N", title="error (point) and its tolerance (bar)", scale=kinds, legend=_legend()
        ),
        tooltip=_tooltips(long, [name for name in columns if name != "drawn"]),
    )
    axis = alt.Axis(
        title="error (log scale; the leftmost place is exactly 0)",
        format=".0e",
        labelExpr=f"datum.value <= {EXACT} ? '0' : datum.label",
        tickCount=8,
    )
    scale = alt.Scale(type="log", domainMin=EXACT / 2)
    point = base.mark_point(filled=True, size=70, opacity=0.9).encode(
        x=alt.X("drawn:Q", scale=scale, axis=axis), shape=_shape(long)
    )
    tolerance = base.mark_tick(thickness=3, size=ROW_HEIGHT - 4).encode(x="tolerance:Q")
    tolerance = tolerance.transform_filter("isValid(datum.tolerance)")
    failed = base.mark_point(size=260, strokeWidth=2.5, color=RED).encode(x="drawn:Q", color=alt.value(RED))
    failed = failed.transform_filter("datum.verdict == 'failed'")
    return _specification(alt.layer(tolerance, point, failed), long)


def _one_error(rows: pd.DataFrame, name: str) -> pd.DataFrame:
    """One error of every case that has it, beside what it is held against."""
    rows = rows[rows[name].notna()]
    limit = tables.limit_of(name)
    return pd.DataFrame(
        {
            "pipeline": rows["pipeline"],
            "passes": rows["pipeline"].map(tables.pipeline_label),
            "device": rows["device"],
            "check": rows["check"],
            "measured": tables.heading(name),
            "error": rows[name],
            "drawn": rows[name].clip(lower=EXACT),
            "tolerance": rows[limit] if limit in rows else float("nan"),
            "verdict": ["failed" if outcome in FAILING else outcome for outcome in rows["outcome"]],
        }
    )


def _effect(low: float, high: float) -> str:
    if high < 1:
        return "faster"
    return "slower" if low > 1 else "no clear difference"


def _place(rows: pd.DataFrame) -> dict[str, Any]:
    """The axis of pipelines, in the order of the tables; devices lie beside each other within a pipeline."""
    length = rows["pipeline"].map(lambda pipeline: len(pipeline.split("+")) if pipeline else 0)
    order = rows.assign(length=length).sort_values(["length", "pipeline"])["passes"].unique().tolist()
    y = alt.Y("passes:N", sort=order, title=None, axis=alt.Axis(labelLimit=480, grid=True))
    if rows["device"].nunique() == 1:
        return {"y": y}
    return {"y": y, "yOffset": alt.YOffset("device:N")}


def _shape(rows: pd.DataFrame) -> alt.Shape:
    several = rows["device"].nunique() > 1
    return alt.Shape("device:N", legend=_legend() if several else None)


def _legend() -> alt.Legend:
    return alt.Legend(orient="top", labelLimit=300, titleLimit=300)


def _tooltips(rows: pd.DataFrame, columns: list[str]) -> list[alt.Tooltip]:
    return [
        alt.Tooltip(
            field=name,
            type="quantitative" if pd.api.types.is_numeric_dtype(rows[name]) else "nominal",
            title=tables.heading(name),
            format=".2e" if tables.is_error(name) or tables.is_limit(name) else alt.Undefined,
        )
        for name in columns
    ]


def _data(rows: pd.DataFrame, columns: list[str]) -> alt.Data:
    """Rows as plain values; a number that is missing or not finite becomes null, which JSON can hold."""
    finite = rows[columns].replace([float("inf"), float("-inf")], float("nan")).astype(object)
    return alt.Data(values=finite.where(finite.notna(), None).to_dict("records"))


def _specification(chart: alt.LayerChart, rows: pd.DataFrame) -> dict[str, Any]:
    height = ROW_HEIGHT * rows["passes"].nunique() * rows["device"].nunique()
    chart = chart.properties(width="container", height=height, background="transparent")
    specification: dict[str, Any] = chart.configure_view(stroke=None).to_dict()
    return specification
