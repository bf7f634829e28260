"""The HTML report: one file with its data, style and script inside, which asks nothing of the network.

The data are columns of numbers, and words once each, packed.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd

from ..records import AGAIN, FAILING, WORST_FIRST, Outcome
from ..regressions.metric import UNKNOWN, metric_of
from ..store import COLUMNS, measurements_of
from . import headline, tables, wording
from .pipelines import fastest, optimized

TEMPLATES = Path(__file__).parent / "templates"
MOST_CHANGES = 500
WORDS = ("model", "pipeline", "device", "check", "dtype", "outcome", "stage", "reason")
FOLLOWED = "latency_ratio"
"""The measurement whose history the page draws."""


def document(
    table: pd.DataFrame, runs: list[pd.DataFrame] | None = None, since: headline.Since | None = None
) -> str:
    """The report of a run, with the runs before it, as one HTML document."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = json.dumps(data(table, runs or [], since), separators=(",", ":"), allow_nan=False)
    return environment.get_template("report.html").render(
        run=tables.conditions(table)["run"],
        # Compressed, and without markup whatever records say.
        data=base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode(),
        style=(TEMPLATES / "report.css").read_text(encoding="utf-8"),
        script="\n".join((TEMPLATES / name).read_text(encoding="utf-8") for name in ("rows.js", "report.js")),
    )


def data(table: pd.DataFrame, runs: list[pd.DataFrame], since: headline.Since | None) -> dict[str, Any]:
    """Collect all that the page shows of a run, the runs before it, and the changes since the last good one."""
    ran = headline.ran(table)
    words: dict[str, int] = {}
    return {
        "verdict": headline.verdict(table),
        "failed": bool(table["outcome"].isin(FAILING).any()),
        "ends": headline.ends(table),
        "notRun": headline.not_run(table),
        "conditions": tables.conditions(table),
        "since": _changes(since),
        "fastest": _rows(fastest(tables.verdicts(ran))) if len(ran) else _rows(pd.DataFrame()),
        "optimized": _rows(optimized(ran)),
        "problems": _rows(tables.problems(table)),
        "refusals": _rows(tables.refusals(table)),
        "cases": {name: _coded(ran[name], words) for name in WORDS} | {"seconds": _short(ran["seconds"])},
        "numbers": _numbers(ran),
        "facts": _facts(ran, words),
        "history": _history(ran, runs),
        "words": list(words),
        "worst": [str(outcome) for outcome in WORST_FIRST],
        "failing": [str(outcome) for outcome in WORST_FIRST if outcome in FAILING],
        "command": AGAIN + next(iter(table.get("options", pd.Series(dtype=str)).dropna()), ""),
    }


def _coded(texts: Iterable[Any], words: dict[str, int]) -> list[int]:
    """The numbers of texts among the words, to which new ones are added: each stands once in the page."""
    return [words.setdefault(text if isinstance(text, str) else "", len(words)) for text in texts]


def _numbers(ran: pd.DataFrame) -> dict[str, Any]:
    """Of each measurement its heading, and the cases that have it with their values; not what merely explains others."""
    found = {}
    for name in measurements_of(ran):
        metric, (at, values) = metric_of(name), _present(ran[name])
        if at and (metric.kind != "context" or metric is UNKNOWN or name.startswith("latency_")):
            found[name] = {"heading": wording.heading(name), "at": at, "values": _short(values)}
    return found


def _facts(ran: pd.DataFrame, words: dict[str, int]) -> dict[str, Any]:
    others = {*COLUMNS, *measurements_of(ran)}
    present = {str(name): _present(ran[name]) for name in ran if name not in others}
    return {name: {"at": at, "words": _coded(texts, words)} for name, (at, texts) in present.items() if at}


def _present(column: pd.Series) -> tuple[list[int], pd.Series]:
    """The cases that have a measurement or a fact, in steps, and its values."""
    has = column.notna() & (column != "")
    return _steps(column.index[has].tolist()), column[has]


def _history(ran: pd.DataFrame, runs: list[pd.DataFrame]) -> dict[str, Any]:
    """How each case ended in the runs before, a character a run, and what it measured of `FOLLOWED`."""
    outcomes = [str(outcome) for outcome in Outcome]
    letter = {outcome: chr(ord("a") + number) for number, outcome in enumerate(outcomes)}
    ends, measured = [], []
    for run in runs:
        rows = run.drop_duplicates("id").set_index("id").reindex(ran["id"])
        ends.append("".join(rows["outcome"].map(letter).fillna("-")))
        values = rows[FOLLOWED] if FOLLOWED in rows else pd.Series(math.nan, rows.index)
        at, values = _present(values.set_axis(ran.index))
        measured.append({"at": at, "values": _short(values)})
    names = [str(run["run"].iloc[0]) for run in runs]
    return {"runs": names, "outcomes": outcomes, "ends": ends, "measured": measured}


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
        "toDo": " ".join(filter(None, [headline.elsewhere(since), headline.to_do(since)])),
        "headline": headline.changed(since.changes),
        "more": len(since.changes) - len(shown),
        **_rows(headline.marked(shown)),
    }


def _rows(table: pd.DataFrame) -> dict[str, Any]:
    """A small table as it is."""
    return {
        "columns": [*map(str, table.columns)],
        "rows": [[*map(str, row)] for row in table.itertuples(index=False)],
    }


def _short(values: Iterable[float]) -> list[float | str | None]:
    """Numbers of four digits; JSON has no infinite ones."""
    return [
        (int(value) if value == int(value) and abs(value) < 1e15 else float(f"{value:.4g}"))
        if math.isfinite(value)
        else None
        if math.isnan(value)
        else str(value)
        for value in values
    ]


def _steps(places: list[int]) -> list[int]:
    """How far each place is from the one before, which compresses well."""
    return [place - before for before, place in zip([0, *places], places, strict=False)]
