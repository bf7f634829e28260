"""The Markdown views: `summary.md`, and one page a model and a pass."""

from __future__ import annotations

import re

import pandas as pd

from ..records import AGAIN, FAILING, Outcome, one_line
from . import headline as headlines
from . import tables

MARKS = {
    Outcome.PASS: "✅",
    Outcome.NO_OP: "▫️",
    Outcome.SKIP: "⏭️",
    Outcome.EXPECTED: "⚠️",
    Outcome.UNJUDGED: "❔",
}
FAILED = "❌"


def summary(table: pd.DataFrame, since: headlines.Since | None = None) -> str:
    """The whole run on one page: what got worse, what failed, the verdicts, and refused sites."""
    ran = headlines.ran(table)
    single = single_passes(ran)
    linked = {"compatibility": sorted(ran["model"].unique()), "passes": single}
    models, passes = (
        " · ".join(f"[{name}]({folder}/{name}.md)" for name in names) for folder, names in linked.items()
    )
    return page(
        "# Validation",
        *_worse(since),
        headline(table),
        f"Models: {models}",
        f"Passes: {passes}" if passes else "",
        pipes(pd.DataFrame(tables.conditions(table).items(), columns=["made with", ""])),
        "## Failures",
        pipes(tables.problems(table)) or "None.",
        REPEATED.format(options=table["options"].iloc[0]) if table["outcome"].isin(FAILING).any() else "",
        "## Verdicts",
        LEGEND,
        pipes(tables.matrix(ran[ran["pipeline"].isin(["", *single])])) or "None.",
        "## Failed as expected",
        pipes(tables.problems(table, [Outcome.EXPECTED])) or "None.",
        *_refused(table),
    )


def single_passes(table: pd.DataFrame) -> list[str]:
    """The pipelines with their own page: single passes and named pipelines."""
    return sorted(name for name in table["pipeline"].unique() if name and "+" not in name)


def compatibility(table: pd.DataFrame, name: str, column: str) -> str:
    """The page of one model or pipeline, selected by `column`: outcomes, rewritten places, and refused sites."""
    own = table[table[column] == name]
    places = pipes(tables.places(own)) if column == "pipeline" else ""
    return page(
        f"# {escape(name)}",
        headline(own.assign(plan="", left_out="")),
        LEGEND,
        "## Verdicts",
        pipes(tables.compatibility(own)),
        "## Failures",
        pipes(tables.problems(own)) or "None.",
        *(["## Where it rewrites", places] if places else []),
        *_refused(own),
    )


def _refused(table: pd.DataFrame) -> tuple[str, str]:
    return "## Why sites were refused", pipes(tables.refusals(table)) or "No site was refused."


REPEATED = (
    f"`{AGAIN.format(model='MODEL', case='CASE')}{{options}}` runs one of them again, and `python repro/CASE.py`, beside this file, "
    "shows it without the harness. Both end with 0 when it is right."
)


def _worse(since: headlines.Since | None) -> list[str]:
    """The causes of regressions, one line each, with the command that runs one of its cases."""
    if since is None:
        return []
    lines = [
        f"{number}. **{escape(cause.text)}** {headlines.told(cause)}. `{cause.command}`"
        for number, cause in enumerate(since.causes, 1)
    ]
    return [
        f"**{headlines.got_worse(since)}.**",
        "\n".join(lines),
        headlines.to_do(since),
    ]


LEGEND = (
    "A verdict is the worst outcome of the checks of a pass: `pass` was compared and found right, `no-op` "
    "found nothing to rewrite, `expected` failed as the zoo file says it does, `unjudged` moved the outputs without a stated limit. "
    "An `optimize` passes with an error of 0 and a latency ratio of 1 where the model itself runs: the reason says why. "
    "A dash: not planned, not tried, or nothing to measure."
)


def headline(table: pd.DataFrame) -> str:
    """The number of failed cases, of each outcome, and of cases that were not run."""
    ends = ", ".join(f"{count:,} {outcome}" for outcome, count in headlines.ends(table).items())
    first = f"**{headlines.verdict(table)}**{': ' if ends else ''}{ends}."
    return "\n\n".join([first, *(f"{escape(sentence)}." for sentence in headlines.not_run(table))])


def escape(text: object) -> str:
    """Escape a text for a Markdown table: nothing in it is markup, and it stays on one line.

    Example:
        >>> print(escape("<b> | __add__"))
        &lt;b> \\| \\_\\_add\\_\\_
    """
    line = one_line(text)
    line = re.sub(r"([\\`*|\[\]])", r"\\\1", line.replace("&", "&amp;").replace("<", "&lt;"))
    return re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", line)


def pipes(table: pd.DataFrame) -> str:
    """A Markdown table; empty if the table has no rows. Outcomes get their mark, numbers align right."""
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
