"""The rows of a run as data for the HTML report: columns of numbers, and words once each, packed."""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Iterable
from typing import Any

import pandas as pd

from ..metric import UNKNOWN, metric_of
from ..records import AGAIN, FAILING, WORST_FIRST, Outcome
from ..store import COLUMNS, measurements_of
from . import headline, tables, wording
from .fastest import fastest
from .since import Since
from .since import headline as changes_headline

MOST_CHANGES = 500
WORDS = ("model", "pipeline", "device", "check", "dtype", "outcome", "stage", "reason")
FOLLOWED = "latency_ratio"
"""The measurement whose history the page draws."""


def packed(table: pd.DataFrame, runs: list[pd.DataFrame], since: Since | None) -> str:
    """All that the page shows, as base64 of compressed JSON, which holds no markup whatever records say."""
    text = json.dumps(data(table, runs, since), separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def data(table: pd.DataFrame, runs: list[pd.DataFrame], since: Since | None) -> dict[str, Any]:
    """Collect all that the page shows of a run, the runs before it, and the changes since the last of them."""
    ran = headline.ran(table)
    words = _Words()
    return {
        "verdict": headline.verdict(table),
        "failed": bool(table["outcome"].isin(FAILING).any()),
        "ends": headline.ends(table),
        "notRun": headline.not_run(table),
        "conditions": tables.conditions(table),
        "since": _changes(since),
        "fastest": _rows(fastest(tables.verdicts(ran))) if len(ran) else _rows(pd.DataFrame()),
        "problems": _rows(tables.problems(table)),
        "refusals": _rows(tables.refusals(table)),
        "cases": {name: words.numbers(ran[name]) for name in WORDS} | {"seconds": _short(ran["seconds"])},
        "numbers": _numbers(ran),
        "facts": _facts(ran, words),
        "history": _history(ran, runs),
        "words": words.all,
        "worst": [str(outcome) for outcome in WORST_FIRST],
        "failing": [str(outcome) for outcome in WORST_FIRST if outcome in FAILING],
        "command": AGAIN,
    }


class _Words:
    """Each word once; elsewhere stands its number."""

    def __init__(self) -> None:
        self._number: dict[str, int] = {}

    @property
    def all(self) -> list[str]:
        return list(self._number)

    def numbers(self, column: Iterable[Any]) -> list[int]:
        texts = (text if isinstance(text, str) else "" for text in column)
        return [self._number.setdefault(text, len(self._number)) for text in texts]


def _numbers(ran: pd.DataFrame) -> dict[str, Any]:
    """Of each measurement its heading, and the cases that have it with their values; not what merely explains others."""
    found = {}
    for name in measurements_of(ran):
        metric, has = metric_of(name), ran[name].notna()
        if has.any() and (metric.kind != "context" or metric is UNKNOWN or name.startswith("latency_")):
            at, values = ran.index[has].tolist(), _short(ran.loc[has, name])
            found[name] = {"heading": wording.heading(name), "at": _steps(at), "values": values}
    return found


def _facts(ran: pd.DataFrame, words: _Words) -> dict[str, Any]:
    others = set(COLUMNS) | set(measurements_of(ran))
    found = {}
    for name in ran.columns:
        if name not in others and (has := ran[name].notna() & (ran[name] != "")).any():
            found[str(name)] = {
                "at": _steps(ran.index[has].tolist()),
                "words": words.numbers(ran.loc[has, name]),
            }
    return found


def _history(ran: pd.DataFrame, runs: list[pd.DataFrame]) -> dict[str, Any]:
    """How each case ended in the runs before, a character a run, and what it measured of `FOLLOWED`."""
    outcomes = [str(outcome) for outcome in Outcome]
    letter = {outcome: chr(ord("a") + number) for number, outcome in enumerate(outcomes)}
    ends, measured = [], []
    for run in runs:
        rows = run.drop_duplicates("id").set_index("id").reindex(ran["id"])
        ends.append("".join(rows["outcome"].map(letter).fillna("-")))
        values = rows[FOLLOWED] if FOLLOWED in rows else pd.Series(math.nan, rows.index)
        has = values.notna().to_numpy()
        measured.append({"at": _steps(ran.index[has].tolist()), "values": _short(values[has])})
    names = [str(run["run"].iloc[0]) for run in runs]
    return {"runs": names, "outcomes": outcomes, "ends": ends, "measured": measured}


def _changes(since: Since | None) -> dict[str, Any] | None:
    if since is None:
        return None
    shown = since.changes.head(MOST_CHANGES).assign(
        regression=since.changes["regression"].map({True: "worse", False: ""})
    )
    more = max(0, len(since.changes) - MOST_CHANGES)
    worse = bool(since.changes["regression"].any())
    return {
        "run": since.run,
        "headline": changes_headline(since.changes),
        "worse": worse,
        "more": more,
        **_rows(shown),
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
