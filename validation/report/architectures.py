"""The page of a sweep: how many architectures are captured and right, and a line for each other one."""

from __future__ import annotations

import pandas as pd

from ..records import WORST_FIRST, Check, Outcome
from ..zoo.build import DEFAULT, SPECIALIZE
from . import tables
from .markdown import page, pipes

INTRODUCTION = """\
Every model type that `AutoModel` of transformers knows, built small from its own config class with random weights, and taken \
through the checks of every model: its graph, each pass alone, its undo, and what people do with a graph. It is held against \
the model itself in float64: to 1e-9 of the largest value of each output, and to 1e-6 where the model converts to float32 on \
the way (rotary embeddings, norms); where it mixes the two and does not run, to 1e-5 in float32.

"Captured and right" is what passes *parity*: the graph gives what the model gives, at the sizes of the \
capture and at others, or refuses these with a reason. `torch.export(strict=False)` had the same models and inputs, \
also with free sizes first and with fixed ones where that failed; it is "right" if it gives what the model gives at \
the sizes of the capture. Times are of the processor."""

FACTS = ("captured", "refusal", "peer", "peer_reason")
NUMBERS = ("forward_runs", "trace_seconds", "peer_seconds")


def document(table: pd.DataFrame) -> str:
    """The page: the numbers, then the architectures that are not captured and why, and the failures of `torch.export`."""
    rows = by_architecture(table)
    verdict = ["architecture", "outcome", "stage", "reason"]
    sections = {
        "Not captured, or not right": rows.loc[rows["runs"] & ~rows["right"], verdict],
        "Captured and right, but a pass or a use of the graph fails": rows.loc[
            rows["right"] & (rows["outcome"] != Outcome.PASS), verdict
        ],
        "Captured with `specialize=True` alone": rows.loc[
            rows["right"] & (rows["captured"] == SPECIALIZE), ["architecture", "refusal"]
        ],
        "Where torch.export fails": rows.loc[
            rows["right"] & rows["peer"].isin(["wrong", "failed"]), ["architecture", "peer", "peer_reason"]
        ],
        "Not run: the model itself does not": rows.loc[~rows["runs"], ["architecture", "stage", "reason"]],
    }
    return page(
        "# Architectures of transformers",
        INTRODUCTION,
        pipes(summary(table)),
        pipes(pd.DataFrame(tables.conditions(table).items(), columns=["made with", ""])),
        *(
            block
            for title, chosen in sections.items()
            for block in (f"## {title}: {len(chosen):,}", pipes(chosen) or "None.")
        ),
    )


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """The numbers of a sweep: how many architectures run and are captured, and the outcome of torch.export."""
    rows = by_architecture(table)
    ran = rows[rows["runs"]]
    right = ran[ran["right"]]
    times = right["forward_runs"].dropna()
    runs = f"{times.mean():.1f} on average, {times.max():.0f} at most" if len(times) else "none"
    numbers = {
        "architectures": f"{len(rows):,}",
        "run eagerly": f"{len(ran):,}",
        "captured and right with default arguments": _of(right["captured"] == DEFAULT, ran),
        "captured and right, with `specialize=True` where that is needed": _of(ran["right"], ran),
        "past every stage": _of(ran["outcome"] == Outcome.PASS, ran),
        "wrong without an error": f"{(ran['outcome'] == Outcome.FAIL).sum():,}",
        "runs of the forward in a capture": runs,
    }
    if not (table["check"] == Check.PARITY).any():
        numbers = {name: numbers[name] for name in ("architectures", "run eagerly", "past every stage")}
    if (ran["peer"] != "").any():
        both = right[right["peer"] == "right"]
        ratio = (both["trace_seconds"] / both["peer_seconds"]).median()
        numbers |= {
            "torch.export: captured and right": _of(ran["peer"] == "right", ran),
            "torch.export: wrong without an error": f"{(ran['peer'] == 'wrong').sum():,}",
            "time to capture, fxopt / torch.export": f"{ratio:.2f}, median of {len(both):,} that are right in both",
        }
    return pd.DataFrame(numbers.items(), columns=["of this sweep", ""])


def by_architecture(table: pd.DataFrame) -> pd.DataFrame:
    """Group the rows of a sweep, one for each case, to one row for each architecture, sorted by name.

    `outcome`, `stage` and `reason` come from the worst case. `runs` is whether the eager model runs, and `right` whether
    its graph gives the same outputs.
    """
    rank = {outcome: place for place, outcome in enumerate(WORST_FIRST)}
    # No-op cases are right; if a model does not run, the parity case has the reason.
    outcomes = table["outcome"].replace(Outcome.NO_OP, Outcome.PASS)
    parity = table["check"] == Check.PARITY
    silent = parity & (outcomes == Outcome.SKIP)
    table = table.assign(outcome=outcomes, rank=outcomes.map(rank).mask(silent, -1), other=~parity)
    rows = (
        table.sort_values(["rank", "other"], kind="stable")
        .groupby("model")[["outcome", "stage", "reason"]]
        .first()
    )
    rows["runs"] = rows["outcome"] != Outcome.SKIP
    right = table[parity].drop_duplicates("model").set_index("model")["outcome"] == Outcome.PASS
    rows["right"] = right.reindex(rows.index, fill_value=not parity.any())  # a part may leave parity out
    facts = table.reindex(columns=FACTS).astype(object).where(lambda each: each != "")
    rows = rows.join(facts.groupby(table["model"]).first().fillna(""))
    rows = rows.join(table.reindex(columns=NUMBERS).groupby(table["model"]).max())
    return rows.rename_axis("architecture").reset_index()


def _of(chosen: pd.Series[bool], rows: pd.DataFrame) -> str:
    """`98.0 % (351 of 358)`."""
    count = int(chosen.sum())
    return f"{count / len(rows):.1%} ({count:,} of {len(rows):,})".replace("%", " %") if len(rows) else "none"
