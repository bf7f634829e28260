"""The text forms of numbers, measurements and pipelines in all views."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Any

import pandas as pd

from ..regressions.metric import metric_of

ABSENT = "-"
NO_PASS = "(no pass)"
RATIO = ("latency_ratio", "latency_ratio_low", "latency_ratio_high")

FORMATS = {"error": ".1e", "limit": ".1e", "accuracy": ".6g"}
"""Errors need only their magnitude; accuracies and cosines need digits, to show the distance from 1."""

HEADINGS = {
    "latency_ratio": "latency, transformed / original",
    "sites": "sites rewritten",
    "refused": "sites refused",
}


def heading(name: str) -> str:
    """The heading of a measurement.

    Example:
        >>> heading("latency_baseline_ms")
        'latency baseline ms'
    """
    return HEADINGS.get(name, name.replace("_", " "))


def shown(name: str, value: float) -> str:
    """A measurement as text: counts in full, errors with their magnitude, the rest to a few digits.

    Example:
        >>> shown("parameters_after", 109482240.0), shown("relative_error", 3.16e-7), shown("latency_ms", 98.765)
        ('109,482,240', '3.2e-07', '98.77')
    """
    if math.isnan(value):
        return ABSENT
    kind = metric_of(name).kind
    if value == 0 or (float(value).is_integer() and kind != "error"):
        return f"{value:,.0f}"
    return f"{value:{FORMATS.get(kind, '.4g')}}"


def limit_of(name: str) -> str:
    """The name of the limit of an error; empty if it has none.

    Example:
        >>> limit_of("relative_error_float64"), limit_of("max_abs_error")
        ('tolerance_float64', '')
    """
    return name.replace("relative_error", "tolerance") if "relative_error" in name else ""


def ratio(row: pd.Series | Mapping[Hashable, Any]) -> str:
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


def with_limit(row: pd.Series, name: str) -> str:
    limit = float(row.get(limit_of(name), math.nan))
    text = shown(name, row[name])
    return text if math.isnan(limit) else f"{text} ({shown(limit_of(name), limit)})"
