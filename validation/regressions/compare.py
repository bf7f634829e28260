"""The changes between two runs, and which of them are regressions: for tracking from night to night."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pandas as pd

from ..records import FAILING, STAGES, Outcome, counted
from ..store import left_out, measurements_of, missing
from ..zoo.build import DEFAULT
from ..zoo.sources import SOURCE
from .metric import BUSY, EAGER, KERNELS, MOST_BUSY, UNKNOWN, Metric, metric_of

CHANGE = ["regression", "kind", "id", "metric", "before", "after", "explanation"]
Change = tuple[bool, str, object, str, str, str, str]

VANISHED = "vanished"
"""The kind of change for a case that the later run does not have."""

LEFT_OUT = "left out: "
"""The start of the explanation for a case whose model lacks a package."""

MACHINE = ["device_name", "threads"]
"""The columns that identify a machine."""


def compare(baseline: pd.DataFrame, current: pd.DataFrame, *, part: bool | None = None) -> pd.DataFrame:
    """The changes from one run (a table of `store.read_run`) to a later one, regressions first.

    A regression is one of these changes:
    - A case passed before and no longer does, or it fails and did not fail before, or it fails and is new.
    - A case that was not a no-op vanished; this does not count if the later run is a `part` (default: if planned cases lack).
    - A case ends in an earlier stage, or its capture needs other options.
    - A metric got worse by more than its noise (`validation.regressions.metric`), or is missing despite the same outcome.

    Other changes are rows with `regression` False. Metrics that depend on the machine, and sites of passes that pick kernels,
    are only compared on the same machine. No metric is compared between different definitions of a case. Latencies are
    judged over many runs (`trend.latencies`); times of models that were timed on a busy machine do not count.

    Returns one row a change, with the columns of `CHANGE`; no rows if nothing changed.
    """
    before, after = (
        table.drop_duplicates("id", keep="last").set_index("id", drop=False) for table in (baseline, current)
    )
    if part or (part is None and missing(current)):
        before = before.loc[before.index.intersection(after.index)]
    changes = [*_population(before, after), *_environment(before, after)]
    common = before.index.intersection(after.index)
    old, new = before.loc[common], after.loc[common]
    changes += [*_outcomes(old, new), *_captures(old, new)]
    same = (old["content"] == new["content"]) | (old["content"] == "") | (new["content"] == "")
    for model, count in new.loc[~same, "model"].value_counts().items():
        text = f"{counted(count, 'case')} defined in another way: their measurements are not compared"
        changes.append((False, "definition", model, "", "", "", text))
    changes += _measurements(old[same], new[same])
    table = pd.DataFrame(changes, columns=CHANGE).astype({"regression": bool})
    return table.sort_values(
        ["regression", "kind", "id", "metric"], ascending=[False, True, True, True], ignore_index=True
    )


def _population(before: pd.DataFrame, after: pd.DataFrame) -> Iterator[Change]:
    """Cases that only one of the runs has; new cases that do not fail are one change for each model."""
    new = after.loc[after.index.difference(before.index)]
    failing = new["outcome"].isin(FAILING)
    for case, outcome, reason in new.loc[failing, ["outcome", "reason"]].itertuples(name=None):
        yield True, "new failure", case, "", "none", outcome, reason
    gone = before.loc[before.index.difference(after.index)]
    idle = gone["outcome"] == Outcome.NO_OP  # recorded sites leave out such cases
    lacking = dict(re.findall(r"(\S+) \((.*?)\)", left_out(after)))
    for case, outcome, model in gone.loc[~idle, ["outcome", "model"]].itertuples(name=None):
        why = (
            f"{LEFT_OUT}{lacking[model]} is not installed"
            if model in lacking
            else "only the earlier run has it"
        )
        yield True, VANISHED, case, "", outcome, "none", why
    for model, count in gone.loc[idle, "model"].value_counts().items():
        cases = counted(count, Outcome.NO_OP + " case")
        yield False, VANISHED, model, "", cases, "none", "no pass changed anything in them"
    for model, count in new.loc[~failing, "model"].value_counts().items():
        yield False, "added", model, "", "none", counted(count, "case"), "only the later run has them"


def _environment(before: pd.DataFrame, after: pd.DataFrame) -> Iterator[Change]:
    for name in ("python", "torch", "transformers", "fxopt", *MACHINE):
        old, new = (", ".join(map(str, sorted(set(run[name])))) for run in (before, after))
        if old != new:
            yield False, "environment", name, "", old, new, "the runs were made under different conditions"


def _outcomes(old: pd.DataFrame, new: pd.DataFrame) -> Iterator[Change]:
    """How a case ended, and in which stage."""
    rows = new[["outcome", "stage", "reason"]].assign(was=old["outcome"], before=old["stage"])
    for case, now, stage, reason, was, before in rows.itertuples(name=None):
        if was != now:
            worse = was == Outcome.PASS or (now in FAILING and was not in FAILING)
            where = f" in stage {stage}" if stage not in ("", "compare") else ""
            text = f"{reason}{where}" if reason else f"{was} became {now}"
            yield worse, "outcome", case, "", was, now, text
        if before in STAGES and stage in STAGES and before != stage:
            yield STAGES.index(stage) < STAGES.index(before), "stage", case, "", before, stage, reason


def _captures(old: pd.DataFrame, new: pd.DataFrame) -> Iterator[Change]:
    """Changes in how a model of a sweep was captured."""
    for case, was, now in zip(new.index, _text(old, "captured"), _text(new, "captured"), strict=True):
        if was and now and was != now:
            yield was == DEFAULT, "captured", case, "", was, now, f"{was} became {now}"


def _measurements(old: pd.DataFrame, new: pd.DataFrame) -> Iterator[Change]:
    """Changes of metrics, each judged separately."""
    ended_alike = (old["outcome"] == new["outcome"]).to_numpy()
    has = measurements_of(new)
    for name in measurements_of(old):
        metric = metric_of(name)
        was = old[name].to_numpy(float)
        if name not in has:
            text = "the later run measures it nowhere: nothing is known of its changes"
            yield False, "metric vanished", name, name, "", "", text
            continue
        now = new[name].to_numpy(float)
        with np.errstate(invalid="ignore"):
            differ = _comparable(metric, old, new) & (was != now) & ~(np.isnan(was) & np.isnan(now))
        for row in np.flatnonzero(differ).tolist():
            case, before, after = new.index[row], float(was[row]), float(now[row])
            if np.isnan(after) and ended_alike[row] and metric.better:
                text = f"{name} is not a number, or not measured any more"
                yield True, metric.kind, case, name, f"{before:.4g}", "nan", text
            elif change := metric.changed(before, after):
                values = f"{before:.4g}", f"{after:.4g}"
                yield change > 0, metric.kind, case, name, *values, _change(name, metric, before, after)


def _comparable(metric: Metric, old: pd.DataFrame, new: pd.DataFrame) -> np.ndarray:
    """The cases in which a metric may be compared."""
    found = pd.Series(True, new.index)
    same_machine = (old[MACHINE] == new[MACHINE]).all(axis=1)
    if metric.machine:
        found = same_machine
    if metric.kind == "sites":
        found = same_machine | ((_text(old, KERNELS) == "") & (_text(new, KERNELS) == ""))
    if metric.kind == "error":
        # A model of a sweep is right or wrong: its error in float32 units depends on the machine. The error of an
        # optimized model is zero if no graph was faster and the call falls back to eager.
        graph = (_text(old, EAGER) == "") & (_text(new, EAGER) == "")
        found = (_text(new, SOURCE) == "") & graph
    if metric.kind == "time":
        runs = [run for run in (old, new) if BUSY in run]
        busy = {model for run in runs for model in run.loc[run[BUSY] > MOST_BUSY, "model"]}
        found &= ~new["model"].isin(busy)
    return found.to_numpy()


def _change(name: str, metric: Metric, was: float, now: float) -> str:
    word = "rose" if now > was else "fell"
    if metric is UNKNOWN:
        return f"{name} {word}: declare in validation/regressions/metric.py whether that is good"
    if metric.factor == 1:
        return f"{name} {word} by {abs(now - was):.4g}"
    return (
        f"{name} {word} to {now / was if was else np.inf:.3g} times; a factor of {metric.factor:g} is noise"
    )


def _text(table: pd.DataFrame, name: str) -> pd.Series[str]:
    """A column of text, empty if the table does not have it."""
    return table[name].fillna("") if name in table else pd.Series("", table.index)
