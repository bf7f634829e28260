"""The Markdown views: `summary.md`, and one compatibility page a model."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

import pandas as pd

from ..records import FAILING, Outcome
from ..store import missing
from . import tables
from .step_table import steps

MARKS = {Outcome.PASS: "✅", Outcome.NO_OP: "▫️", Outcome.SKIP: "⏭️", Outcome.EXPECTED: "⚠️"}
FAILED = "❌"


def summary(table: pd.DataFrame) -> str:
    """The whole run on one page: verdicts first, then failures, the matrix, and why sites were refused."""
    verdict = tables.verdicts(table)
    single = verdict[~verdict["pipeline"].str.contains("+", regex=False)]
    composed = verdict[verdict["pipeline"].str.contains("+", regex=False)]
    accuracy = tables.accuracy(table)
    stems = file_stems(table["model"].unique())
    pages = [f"- [{escape(model)}](compatibility/{stem}.md)" for model, stem in stems.items()]
    return page(
        "# Validation",
        headline(table),
        pipes(pd.DataFrame(tables.conditions(table).items(), columns=["made with", ""])),
        "## Failures",
        pipes(tables.problems(table)) or "None.",
        AGAIN if table["outcome"].isin(FAILING).any() else "",
        "## Verdicts",
        LEGEND,
        pipes(tables.matrix(single)),
        "## Compositions" if len(composed) else "",
        pipes(tables.matrix(composed)) if len(composed) else "",
        "## Latency, transformed / original, with 95 % intervals",
        pipes(tables.speed(table)) or "Nothing was timed.",
        "## Accuracy" if len(accuracy) else "",
        pipes(accuracy),
        "## Cases by outcome",
        pipes(tables.counts(table)),
        "## Skipped, or failed as expected",
        pipes(tables.excuses(table)) or "None.",
        "## Why sites were refused",
        pipes(tables.refusals(table)) or "No site was refused.",
        "## Models",
        "\n".join(pages),
    )


def compatibility(table: pd.DataFrame, model: str) -> str:
    """The page of one model: pass × device, each check, refusals, and every measurement."""
    own = table[table["model"] == model]
    return page(
        f"# {escape(model)}",
        headline(own.assign(plan="")),
        LEGEND,
        "## Passes and devices",
        pipes(tables.compatibility(table, model)),
        "## Checks",
        pipes(tables.checks(table, model)),
        "## What each pass of the full pipelines adds to the error",
        pipes(steps(own).drop(columns="model", errors="ignore")) or "Nothing was measured.",
        "## Failures",
        pipes(tables.problems(own)) or "None.",
        "## Why sites were refused",
        pipes(tables.refusals(own).drop(columns="models")) or "No site was refused.",
        "## Measurements",
        pipes(tables.measurements(own)) or "None.",
    )


AGAIN = (
    "`pytest 'validation/test_cases.py::test_case[CASE]'` runs one of them again, and `python repro/CASE.py`, beside this "
    "file, shows it without the harness. Both end with 0 when it is right."
)

LEGEND = (
    "A verdict is the worst outcome of the checks of a pass: `pass` was compared and found right, `no-op` "
    "found nothing to rewrite, `expected` failed as `model_zoo.yaml` says it does, `skip` was not run. "
    "A dash: not planned, or nothing to measure."
)


def headline(table: pd.DataFrame) -> str:
    """One sentence: how many cases there are, and how they ended."""
    counted = table["outcome"].value_counts()
    failed = int(table["outcome"].isin(FAILING).sum())
    ends = ", ".join(f"{count:,} {outcome}" for outcome, count in counted.items())
    part = f" Partial: {missing(table):,} planned cases were not run." if missing(table) else ""
    return (
        f"**{f'{failed:,} of {len(table):,} cases failed' if failed else 'No case failed'}**: {ends}.{part}"
    )


def escape(text: object) -> str:
    """Text as it is, in a Markdown table: nothing in it is markup, and it stays on one line.

    Example:
        >>> print(escape("<b> | __add__"))
        &lt;b> \\| \\_\\_add\\_\\_
    """
    line = " ".join(str(text).split())
    line = re.sub(r"([\\`*|\[\]])", r"\\\1", line.replace("&", "&amp;").replace("<", "&lt;"))
    return re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", line)


def file_stems(names: Iterable[str]) -> dict[str, str]:
    """A file name for each model: its own where every file system takes it, else a safe one with a digest.

    Example:
        >>> file_stems(["bert-base", "org/bert"])
        {'bert-base': 'bert-base', 'org/bert': 'org-bert-8fe84004'}
    """
    stems: dict[str, str] = {}
    taken: set[str] = set()
    for name in sorted(names):
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-")[:80]
        if not stem or stem != name or stem.lower() in taken:
            digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:8]
            stem = "-".join(filter(None, [stem, digest]))
        taken.add(stem.lower())
        stems[name] = stem
    return stems


def pipes(table: pd.DataFrame) -> str:
    """A table in pipes; empty for a table without rows. Outcomes get their mark, numbers align right."""
    if table.empty:
        return ""
    numeric = [pd.api.types.is_numeric_dtype(dtype) for dtype in table.dtypes]
    lines = [
        [escape(name) for name in table.columns],
        ["---:" if number else "---" for number in numeric],
        *([_cell(value) for value in row] for row in table.itertuples(index=False, name=None)),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: object) -> str:
    if isinstance(value, str) and value in set(Outcome):
        return f"{MARKS.get(Outcome(value), FAILED)} {value}"
    return f"{value:,}" if isinstance(value, int | float) else escape(value)


def page(*blocks: str) -> str:
    return "\n\n".join(filter(None, blocks)) + "\n"
