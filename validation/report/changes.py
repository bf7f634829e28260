"""The page of a comparison: what got worse between two runs, and how much else changed."""

from __future__ import annotations

import pandas as pd

from .markdown import page, pipes


def headline(changes: pd.DataFrame) -> str:
    """The number of regressions and of other changes, of a table of `compare.compare`."""
    worse = int(changes["regression"].sum())
    return f"{worse} regressions, {len(changes) - worse} other changes"


def document(changes: pd.DataFrame, most: int = 100) -> str:
    """The changes as Markdown, as the summary of a job on GitHub takes it: regressions, then other changes by kind."""
    worse = changes[changes["regression"]].drop(columns="regression")
    others = changes[~changes["regression"]]["kind"].value_counts().rename_axis("other changes")
    more = f"... and {len(worse) - most:,} more regressions" if len(worse) > most else ""
    return page(
        f"# {headline(changes)}", pipes(worse.head(most)), more, pipes(others.reset_index(name="rows"))
    )
