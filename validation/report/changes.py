"""The page of a comparison: what got worse between two runs, and how much else changed."""

from __future__ import annotations

import pandas as pd

from .markdown import page, pipes
from .since import headline

__all__ = ["document", "headline"]


def document(changes: pd.DataFrame, most: int = 100) -> str:
    """The changes as Markdown, as the summary of a job on GitHub takes it: regressions, and behind a click the others."""
    worse, others = (
        changes[changes["regression"] == kind].drop(columns="regression") for kind in (True, False)
    )
    return page(f"# {headline(changes)}", *_lines(worse, most), *_folded(others, most))


def _lines(changes: pd.DataFrame, most: int) -> list[str]:
    more = f"... and {len(changes) - most:,} more" if len(changes) > most else ""
    return [pipes(changes.head(most)), more]


def _folded(others: pd.DataFrame, most: int) -> list[str]:
    """By kind, and one by one in a part of the page that opens when it is clicked."""
    if others.empty:
        return []
    counts = others["kind"].value_counts().rename_axis("other changes").reset_index(name="rows")
    return [pipes(counts), "<details><summary>one by one</summary>", *_lines(others, most), "</details>"]
