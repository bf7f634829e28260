"""The short text that a run ends with in the terminal."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from . import architectures, headline, tables

MOST_REASONS = 20


def terminal_summary(table: pd.DataFrame, files: Sequence[Path] = ()) -> str:
    """Failures with their reasons, the counts of each model, the headline, and where the reports are, as plain text."""
    problems = tables.problems(table)
    lines = [_failure(row) for row in problems.head(MOST_REASONS).to_dict("records")]
    if len(problems) > MOST_REASONS:
        lines.append(f"... and {len(problems) - MOST_REASONS} more reasons, all in the report")
    counts = (
        architectures.summary(table) if architectures.is_sweep(table) else tables.counts(headline.ran(table))
    ).to_string(index=False)
    told = [headline.verdict(table), *headline.not_run(table)]
    return "\n\n".join(filter(None, ["\n".join(lines), counts, "\n".join(told), "\n".join(map(str, files))]))


def _failure(row: dict[Hashable, Any]) -> str:
    where = f" in {row['stage']}" if row["stage"] else ""
    return f"{row['outcome'].upper()} {row['case']}{where}: {' '.join(row['reason'].split())}"
