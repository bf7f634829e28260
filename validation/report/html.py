"""The HTML report: one file that contains its data, style and script, and needs no network."""

from __future__ import annotations

import base64
import gzip
import json
import math
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd

from ..records import AGAIN, FAILING, WORST_FIRST
from ..regressions.metric import metric_of
from ..store import COLUMNS, measurements_of
from . import headline, tables
from .wording import heading

TEMPLATES = Path(__file__).parent / "templates"
MOST_CHANGES = 500
WORDS = ("model", "pipeline", "device", "check", "dtype", "outcome", "stage", "reason")


def document(table: pd.DataFrame, since: headline.Since | None = None) -> str:
    """The report of a run as one HTML document."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = json.dumps(data(table, since), separators=(",", ":"), allow_nan=False)
    return environment.get_template("report.html").render(
        run=tables.conditions(table)["run"],
        # Compressed and encoded, so that texts of records cannot act as markup.
        data=base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode(),
        style=(TEMPLATES / "report.css").read_text(encoding="utf-8"),
        script="\n".join((TEMPLATES / name).read_text(encoding="utf-8") for name in ("rows.js", "report.js")),
    )


def data(table: pd.DataFrame, since: headline.Since | None) -> dict[str, Any]:
    """Collect the data that the page shows of a run, and the changes since the last good run."""
    ran = headline.ran(table)
    measured = [name for name in measurements_of(ran) if ran[name].notna().any()]
    shown = [name for name in measured if metric_of(name).kind != "context" or name.startswith("latency_")]
    facts = [str(name) for name in ran if name not in {*COLUMNS, *measurements_of(ran)}]
    return {
        "verdict": headline.verdict(table),
        "failed": bool(table["outcome"].isin(FAILING).any()),
        "ends": headline.ends(table),
        "notRun": headline.not_run(table),
        "conditions": tables.conditions(table),
        "since": _changes(since),
        "problems": _rows(tables.problems(table)),
        "refusals": _rows(tables.refusals(table)),
        "cases": {name: ran[name].fillna("").tolist() for name in WORDS}
        | {"seconds": _short(ran["seconds"])},
        "numbers": {name: {"heading": heading(name), "values": _short(ran[name])} for name in shown},
        "facts": {name: ran[name].fillna("").tolist() for name in facts},
        "worst": WORST_FIRST,
        "failing": sorted(FAILING),
        "command": AGAIN + next(iter(table["options"]), ""),
    }


def _changes(since: headline.Since | None) -> dict[str, Any] | None:
    if since is None:
        return None
    shown = since.changes.head(MOST_CHANGES)
    return {
        "run": since.run,
        "worse": headline.got_worse(since),
        "causes": [
            {"text": each.text, "told": headline.told(each), "command": each.command} for each in since.causes
        ],
        "toDo": headline.to_do(since),
        "headline": headline.changed(since.changes),
        "more": len(since.changes) - len(shown),
        **_rows(headline.marked(shown)),
    }


def _rows(table: pd.DataFrame) -> dict[str, Any]:
    """All rows of a small table as text."""
    return {"columns": [*map(str, table.columns)], "rows": table.astype(str).values.tolist()}


def _short(values: pd.Series) -> list[float | str | None]:
    """Round numbers to four digits, and keep integers in full; infinite values become text, as JSON has none."""
    return [
        None if math.isnan(v) else str(v) if math.isinf(v) else int(v) if v == int(v) else float(f"{v:.4g}")
        for v in values
    ]
