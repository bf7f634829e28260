"""The page of a run: the score of each folder and operator, and what survived."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pandas as pd

from tests.mutation.operators import Mutant

CAUGHT = "caught"
SURVIVED = "SURVIVED"
"""No test failed that was run."""
UNTESTED = "UNTESTED"
"""No test executes the line."""
BROKEN = "BROKEN"
"""The fault could not be planted."""


def append(file: Path, mutant: Mutant, outcome: str, by: str, tests: int) -> None:
    """Write a verdict: what became of a mutant, which test failed first, and how many were to run."""
    row = {
        "key": mutant.key,
        "folder": "/".join(mutant.file.split("/")[:-1][:2]),
        "line": f"{mutant.file}:{mutant.line}",
        "operator": mutant.operator,
        "change": " ".join(f"{mutant.before} -> {mutant.after}".split())[:150],
        "outcome": outcome,
        "by": by,
        "tests": tests,
    }
    with file.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(row) + "\n")


def read(file: Path) -> pd.DataFrame:
    """The verdicts that are written, the last on each mutant."""
    rows = pd.read_json(file, lines=True) if file.exists() else pd.DataFrame(columns=["key"])
    return rows.drop_duplicates("key", keep="last")


def page(rows: pd.DataFrame, title: str) -> tuple[str, float]:
    """The page, and the score."""
    rows = rows.assign(caught=rows["outcome"] == CAUGHT)
    lines = [
        "# Planted faults",
        "",
        f"{datetime.date.today()}: {rows['caught'].sum()} of {len(rows)} caught; {title}.",
        "",
    ]
    for name in ("folder", "operator"):
        scores = rows.groupby(name)["caught"].agg(["sum", "count"])
        lines += [f"| {name} | caught | of |", "|---|---|---|"]
        lines += [f"| {each} | {caught} | {of} |" for each, caught, of in scores.itertuples()]
        lines.append("")
    missed = rows[~rows["caught"]].sort_values("line")
    lines += ["| not caught | outcome | tests | operator | change |", "|---|---|---|---|---|"]
    for row in missed.itertuples():
        change = row.change.replace("|", "\\|")
        lines.append(f"| {row.line} | {row.outcome} | {row.tests} | {row.operator} | `{change}` |")
    return "\n".join(lines) + "\n", float(rows["caught"].mean())
