"""The page of a sweep: how many architectures are captured and right, and a line for each."""

from __future__ import annotations

import pandas as pd

from ..records import FAILING, WORST_FIRST, Check, Outcome
from ..zoo.build import DEFAULT, SPECIALIZE
from ..zoo.sources import FIXED, FIXED_BY_MODEL, FREE, NONE, SOURCE
from . import tables, wording
from .markdown import page, pipes

SWEPT = {
    "architectures": (
        "Architectures of transformers",
        "Every model type that `AutoModel` of transformers knows, built small from its own config class",
    ),
    "libraries": ("Models of other libraries", "Small models of `validation/zoo/libraries`"),
}
"""The title of a page, and what was swept, by the source of the models."""

INTRODUCTION = """\
{swept} with random weights, and taken through the checks of every model: its graph, each \
pass alone, its undo, and what people do with a graph. It is held against the model itself in float64: to 1e-9 of the largest value of each output, and to 1e-6 where the model converts \
to float32 on the way (rotary embeddings, norms); where it mixes the two and does not run, to 1e-5 in float32.

"Captured and right" is what passes *parity*: the graph gives what the model gives, at the sizes of the \
capture and at others, or refuses these with a reason. `torch.export(strict=False)` had the same models and inputs, \
also with free sizes first and with fixed ones where that failed; it is "right" if it gives what the model gives at \
the sizes of the capture, and at another batch where it takes one. Times are of the processor."""

LINE = """\
Under the name of a pass are the sites that it rewrote; each was compared, and undone where it can be. `stage` is \
where the architecture failed; a dash says that it did not."""


def document(table: pd.DataFrame) -> str:
    """The page: the numbers, then what is not captured and why, then what is limited, then all lines."""
    rows = by_architecture(table)
    missed = rows[rows["runs"] & ~rows["right"]]
    later = rows[rows["right"] & (rows["outcome"] != Outcome.PASS)]
    decided = rows[rows["right"] & (rows["captured"] == SPECIALIZE)]
    limited = rows[rows["right"] & ~(rows["batch"].isin([FREE, NONE]) & rows["sequence"].isin([FREE, NONE]))]
    ahead = rows[rows["right"] & rows["peer"].isin(["wrong", "failed"])]
    silent = rows[~rows["runs"]]
    verdict = ["architecture", "outcome", "stage", "reason"]
    source = next(name for name in table[SOURCE] if isinstance(name, str) and name)
    title, swept = SWEPT.get(source, (f"Models of {source}", f"The models of {source}"))
    return page(
        f"# {title}",
        INTRODUCTION.format(swept=swept),
        pipes(summary(table)),
        pipes(by_library(rows)) if source == "libraries" else "",
        pipes(pd.DataFrame(tables.conditions(table).items(), columns=["made with", ""])),
        *_section("Not captured, or not right", missed[[*verdict, "peer"]]),
        *_section("Captured and right, but a pass or a use of the graph fails", later[verdict]),
        *_section("Captured with `specialize=True` alone", decided[["architecture", "refusal"]]),
        *_section("With sizes that are not free", limited[["architecture", "batch", "sequence"]]),
        *_section("Where torch.export fails", ahead[["architecture", "peer", "peer_reason"]]),
        *_section("Captured and right", _details(rows[rows["right"]]), LINE),
        *_section("Not run: the model itself does not", silent[["architecture", "stage", "reason"]]),
    )


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """The numbers of a sweep: how many architectures run, are captured, and what torch.export makes of them."""
    rows = by_architecture(table)
    ran = rows[rows["runs"]]
    right = ran[ran["right"]]
    numbers = {
        "architectures": f"{len(rows):,}",
        "run eagerly": f"{len(ran):,}",
        "captured and right with default arguments": _of(right["captured"] == DEFAULT, ran),
        "captured and right, with `specialize=True` where that is needed": _of(ran["right"], ran),
        "captured and right, to 1e-9": _of(ran["right"] & (ran["relative_error"] <= 1e-9), ran),
        "past every stage": _of(ran["outcome"] == Outcome.PASS, ran),
        "wrong without an error": f"{(ran['outcome'] == Outcome.FAIL).sum():,}",
    }
    if (times := right["forward_runs"].dropna()).any():
        numbers["runs of the forward in a capture"] = (
            f"{times.mean():.1f} on average, {times.max():.0f} at most"
        )
    for name in ("batch", "sequence"):
        having = right[right[name] != NONE]
        numbers[f"{name} size free, of those that have one"] = _of(having[name] == FREE, having)
    if (ran["peer"] != "").any():
        both = right[(right["peer"] == "right") & (right["batch"] != FIXED) & (right["peer_sizes"] == FREE)]
        ratio = (both["trace_seconds"] / both["peer_seconds"]).median()
        numbers |= {
            "torch.export: captured and right": _of(ran["peer"] == "right", ran),
            "torch.export: wrong without an error": f"{(ran['peer'] == 'wrong').sum():,}",
            "time to capture, fxopt / torch.export": f"{ratio:.2f}, median of {len(both):,} with free sizes in both",
            "work in all cases": f"{rows['seconds'].sum():,.0f} s, {ran['peer_work_seconds'].sum():,.0f} s of it torch.export's",
        }
    return pd.DataFrame(numbers.items(), columns=["of this sweep", ""])


def by_library(rows: pd.DataFrame) -> pd.DataFrame:
    """Count the models of each library that are captured, and those that torch.export captures."""
    ran = rows[rows["runs"]]
    counted = pd.DataFrame(
        {
            "library": ran["architecture"].str.partition(".")[0],
            "models": True,
            "right by default": ran["right"] & (ran["captured"] == DEFAULT),
            "with `specialize=True`": ran["right"],
            "takes another batch": ~ran["batch"].isin([NONE, FIXED_BY_MODEL]),
            "free batch": ran["right"] & (ran["batch"] == FREE),
            "wrong": ran["outcome"] == Outcome.FAIL,
            "crashed": ran["outcome"].isin(FAILING - {Outcome.FAIL}),
            "torch.export right": ran["peer"] == "right",
            "its free batch": (ran["peer"] == "right") & (ran["peer_sizes"] == FREE),
            "its wrong": ran["peer"] == "wrong",
        }
    )
    counts = counted.groupby("library").sum().astype(int)
    return pd.concat([counts, counts.sum().to_frame("all").T]).rename_axis("library").reset_index()


NUMBERS = (
    *("nodes", "modules", "relative_error"),
    *("forward_runs", "trace_seconds", "peer_seconds", "peer_work_seconds"),
)
FACTS = ("captured", "refusal", "batch", "sequence", "peer", "peer_reason", "peer_sizes")


def by_architecture(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of a sweep, one for each case, as one for each architecture, sorted by name.

    `outcome`, `stage` and `reason` are those of its worst case, `runs` says whether the model itself does, and `right`
    whether its graph gives what it gives. `sites_<pass>` is how many sites the pass rewrote. `relative_error` is the
    largest of any case, where it is judged.
    """
    rank = {outcome: place for place, outcome in enumerate(WORST_FIRST)}
    # What found nothing to rewrite is right; what could not be run, because of a case that says why, is no news.
    outcomes = table["outcome"].replace(Outcome.NO_OP, Outcome.PASS)
    table = table.assign(outcome=outcomes, rank=outcomes.map(rank), parity=table["check"] == Check.PARITY)
    worst = table.sort_values(["rank", "parity"], ascending=[True, False], kind="stable").groupby("model")
    parity = table[table["parity"]].drop_duplicates("model").set_index("model")
    rows = worst.first()[["outcome", "stage", "reason"]].copy()
    silent = parity.index[parity["outcome"] == Outcome.SKIP]
    rows.loc[silent, ["outcome", "stage", "reason"]] = parity.loc[silent, ["outcome", "stage", "reason"]]
    rows["runs"] = rows["outcome"] != Outcome.SKIP
    rows["right"] = (parity["outcome"] == Outcome.PASS).reindex(rows.index, fill_value=False)
    rows["seconds"] = table.groupby("model")["seconds"].sum()
    facts = table.reindex(columns=FACTS).astype(object).where(lambda each: each != "")
    rows = rows.join(facts.groupby(table["model"]).first().fillna(""))
    judged = table.drop(columns="relative_error", errors="ignore")
    numbers = judged.rename(columns={"relative_error_float64": "relative_error"}).reindex(columns=NUMBERS)
    rows = rows.join(numbers.groupby(table["model"]).max())
    effects = table[(table["check"] == Check.EFFECT) & table["pipeline"].ne("")]
    if "sites" in effects:
        sites = effects.pivot_table("sites", "model", "pipeline", aggfunc="first")
        rows = rows.join(sites.add_prefix("sites_"))
    return rows.rename_axis("architecture").reset_index()


def _details(rows: pd.DataFrame) -> pd.DataFrame:
    sites = [str(name) for name in rows.columns if str(name).startswith("sites_")]
    view = rows[["architecture", "stage"]].replace("", wording.ABSENT)
    for name in (*NUMBERS[:3], *sites, *NUMBERS[3:6]):
        view[wording.heading(name).removeprefix("sites ")] = [
            wording.shown(name, value) for value in rows[name]
        ]
    return view.assign(peer=rows["peer"].replace("", wording.ABSENT))


def _section(title: str, rows: pd.DataFrame, text: str = "") -> list[str]:
    headings = {
        "refusal": "reason",
        "peer": "torch.export",
        "peer_reason": "reason",
        "peer (s)": "torch.export (s)",
    }
    return [f"## {title}: {len(rows):,}", text, pipes(rows.rename(columns=headings)) or "None."]


def _of(chosen: pd.Series[bool], rows: pd.DataFrame) -> str:
    """`98.0 % (351 of 358)`."""
    count = int(chosen.sum())
    return f"{count / len(rows):.1%} ({count:,} of {len(rows):,})".replace("%", " %") if len(rows) else "none"
