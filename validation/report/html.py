"""The HTML report: one file with its plots and scripts inside, which asks nothing of the network."""

from __future__ import annotations

import functools
from typing import Any

import altair as alt
import jinja2
import pandas as pd
import vl_convert

from ..records import FAILING, Outcome
from . import plots, tables

EXPORT = "window.vegaEmbed = vegaEmbed;"


def document(table: pd.DataFrame) -> str:
    """The report of a run as one HTML document."""
    verdict = tables.verdicts(table)
    composed = verdict["pipeline"].str.contains("+", regex=False)
    models = sorted(table["model"].unique())
    counted = table["outcome"].value_counts()
    return _template().render(
        conditions=tables.conditions(table),
        total=len(table),
        failed=int(table["outcome"].isin(FAILING).sum()),
        counted=[(outcome, int(counted[outcome])) for outcome in Outcome if outcome in counted],
        problems=tables.problems(table),
        matrix=tables.matrix(verdict[~composed]),
        compositions=tables.matrix(verdict[composed]) if composed.any() else None,
        counts=tables.counts(table),
        excuses=tables.excuses(table),
        accuracy=tables.accuracy(table),
        refusals=tables.refusals(table),
        models=[
            {
                "name": model,
                "compatibility": tables.compatibility(table, model),
                "checks": tables.checks(table, model),
                "measurements": tables.measurements(table[table["model"] == model]),
                "latency": plots.latency(table, model),
                "errors": plots.errors(table, model),
            }
            for model in models
        ],
        outcomes={str(outcome) for outcome in Outcome},
        failing={str(outcome) for outcome in FAILING},
        vega=_vega(),
    )


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.tests["number"] = _is_number
    return environment.get_template("report.html")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


@functools.cache
def _vega() -> str:
    """The Vega libraries as one script, in the version that altair writes for."""
    version = alt.SCHEMA_VERSION.lstrip("v").rsplit(".", 1)[0]
    return vl_convert.javascript_bundle(snippet=EXPORT, vl_version=version)
