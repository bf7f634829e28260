"""The changes between two runs, and those among them that are worse: for tracking from night to night."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from fxopt.testing import Grade

from ..records import FAILING, STAGES, Outcome, counted
from ..store import measurements_of, missing
from ..zoo.build import DEFAULT
from ..zoo.sources import FREE, SOURCE
from .metric import BUSY, KERNELS, UNKNOWN, metric_of, unit_of

CHANGE = ["regression", "kind", "id", "metric", "before", "after", "explanation"]


def compare(baseline: pd.DataFrame, current: pd.DataFrame, *, part: bool = False) -> pd.DataFrame:
    """The changes from one run (a table of `store.read_run`) to a later one, regressions first.

    A regression is: a case that passed and does not now, or that fails and did not before, be it for being new; a
    model, device or case that has vanished, unless the later run was of a part; one that fails in an
    earlier stage, or a capture that asks for more or leaves less free; a grade that fell; a metric that got worse by more
    than its noise (`validation.regressions.metric`), each judged by itself, or that a case with the same outcome has no more. The opposite
    changes are rows too, with `regression` False. What depends on the machine is compared on the same one alone, so are
    the sites of passes that pick kernels, and no metric is compared between cases of another definition. Latencies are
    judged over many runs (`trend.latencies`); times count for models that were not timed on a busy machine.

    Returns one row a change, with the columns of `CHANGE`; no rows when nothing changed.
    """
    before, after = (
        table.drop_duplicates("id", keep="last").set_index("id", drop=False) for table in (baseline, current)
    )
    if part or missing(current):
        before = before.loc[before.index.intersection(after.index)]
    changes = [*_population(before, after), *_environment(before, after)]
    common = before.index.intersection(after.index)
    old, new = before.loc[common], after.loc[common]
    changes += [*_outcomes(old, new), *_captures(old, new)]
    same = _text(old, "content").isin([""]) | _text(new, "content").isin([""])
    same |= _text(old, "content") == _text(new, "content")
    for model, count in new.loc[~same, "model"].value_counts().items():
        text = f"{counted(count, 'case')} defined in another way: their measurements are not compared"
        changes.append((False, "definition", model, "", "", "", text))
    changes += _measurements(old[same], new[same], measurements_of(baseline), measurements_of(current))
    changes += _grades(old[same], new[same])
    table = pd.DataFrame(changes, columns=CHANGE).astype({"regression": bool})
    return table.sort_values(
        ["regression", "kind", "id", "metric"], ascending=[False, True, True, True], ignore_index=True
    )


def _population(before: pd.DataFrame, after: pd.DataFrame) -> Iterator[tuple[Any, ...]]:
    """Cases that only one of the runs has; a whole model or device is one change, not one a case."""
    for gone, one, other in ((True, before, after), (False, after, before)):
        word = "vanished" if gone else "added"
        left = one.loc[one.index.difference(other.index)]
        if not gone:
            failing = left[left["outcome"].isin(FAILING)]
            for case, outcome, reason in failing[["outcome", "reason"]].itertuples(name=None):
                yield True, "new failure", case, "", "none", outcome, reason
            left = left.drop(failing.index)
        found = []
        for column in ("model", "device"):
            whole = left[~left[column].isin(set(other[column]))]
            counts = whole[column].value_counts().sort_index()
            found += [(f"{column} {word}", name, counted(count, "case")) for name, count in counts.items()]
            left = left.drop(whole.index)
        found += [(f"case {word}", case, outcome) for case, outcome in left["outcome"].items()]
        for kind, name, had in found:
            values = (had, "none") if gone else ("none", had)
            yield gone, kind, name, "", *values, "it is in one run only"


def _environment(before: pd.DataFrame, after: pd.DataFrame) -> Iterator[tuple[Any, ...]]:
    for name in ("python", "torch", "transformers", "fxopt", "device_name", "threads"):
        old, new = (", ".join(map(str, sorted(set(run[name])))) for run in (before, after))
        if old != new and not (name == "fxopt" and not old):  # runs of before 2026-12 do not say it
            yield False, "environment", name, "", old, new, "the runs were made under different conditions"


def _outcomes(old: pd.DataFrame, new: pd.DataFrame) -> Iterator[tuple[Any, ...]]:
    other = old["outcome"] != new["outcome"]
    rows = new.loc[other, ["outcome", "stage", "reason"]].assign(was=old.loc[other, "outcome"])
    for case, now, stage, reason, was in rows.itertuples(name=None):
        worse = was == Outcome.PASS or (now in FAILING and was not in FAILING)
        where = f" in stage {stage}" if stage not in ("", "compare") else ""
        yield worse, "outcome", case, "", was, now, f"{reason}{where}" if reason else f"{was} became {now}"


def _captures(old: pd.DataFrame, new: pd.DataFrame) -> Iterator[tuple[Any, ...]]:
    """How far a case came, and, of a sweep, how a model was captured, and which sizes are free."""
    stages = new[["stage", "reason"]].assign(was=old["stage"])
    for case, now, reason, was in stages.itertuples(name=None):
        if was in STAGES and now in STAGES and was != now:
            yield STAGES.index(now) < STAGES.index(was), "stage", case, "", was, now, reason
    for name, best in (("captured", DEFAULT), ("batch", FREE), ("sequence", FREE)):
        for case, was, now in zip(new.index, _text(old, name), _text(new, name), strict=True):
            if was and now and was != now:
                yield was == best, name, case, "", was, now, f"{was} became {now}"


def _measurements(
    old: pd.DataFrame, new: pd.DataFrame, had: list[str], has: list[str]
) -> Iterator[tuple[Any, ...]]:
    """Each metric by itself. A model of a sweep is right or not: its error in units of float32 is the machine's."""
    ended_alike = (old["outcome"] == new["outcome"]).to_numpy()
    swept = (_text(new, SOURCE) != "").to_numpy()
    cases = new.index.tolist()
    same_machine = _same_machine(old, new)
    without_kernels = ((_text(old, KERNELS) == "") & (_text(new, KERNELS) == "")).to_numpy()
    busy = {
        model for run in (old, new) if BUSY.name in run for model in run["model"][run[BUSY.name] > BUSY.most]
    }
    idle = ~new["model"].isin(busy).to_numpy()
    for name in had:
        metric = metric_of(name)
        was = old[name].to_numpy(float)
        now = new[name].to_numpy(float) if name in has else np.full(len(new), np.nan)
        if np.isnan(now).all() and (name not in has or not metric.better):
            if ended_alike[~np.isnan(was)].any():
                text = "the later run measures it nowhere: nothing is known of its changes"
                yield False, "metric vanished", name, name, "", "", text
            continue
        comparable = same_machine if metric.machine else np.full(len(old), True)
        if metric.kind == "error":
            comparable = comparable & ~swept
        if metric.kind == "sites":
            comparable = comparable & (same_machine | without_kernels)
        if metric.kind == "time":
            comparable = comparable & idle
        with np.errstate(invalid="ignore"):
            differ = comparable & (was != now) & ~(np.isnan(was) & np.isnan(now))
        for row in np.flatnonzero(differ).tolist():
            case, before, after = cases[row], float(was[row]), float(now[row])
            if np.isnan(after) and ended_alike[row] and metric.better:
                text = f"{name} is not a number, or not measured any more"
                yield True, metric.kind, case, name, _shown(name, before), "nan", text
            elif change := metric.changed(before, after):
                values = _shown(name, before), _shown(name, after)
                yield change > 0, metric.kind, case, name, *values, _change(name, before, after)


def _grades(old: pd.DataFrame, new: pd.DataFrame) -> Iterator[tuple[Any, ...]]:
    """The grades of verdicts, in each dtype. Another processor has other kernels: there a worse one is no regression."""
    order, same_machine = [str(grade) for grade in Grade], _same_machine(old, new)
    for name in sorted(str(name) for name in new if str(name).startswith("grade") and name in old):
        for case, was, now, same in zip(
            new.index, _text(old, name), _text(new, name), same_machine, strict=True
        ):
            if was != now and {was, now} <= {*order}:
                worse = same and order.index(now) > order.index(was)
                yield worse, "grade", case, name, was, now, f"{name}: {was} became {now}"


def _same_machine(old: pd.DataFrame, new: pd.DataFrame) -> np.ndarray:
    """For each case, whether both runs had the same hardware and the same number of threads."""
    return (old[["device_name", "threads"]] == new[["device_name", "threads"]]).all(axis=1).to_numpy()


def _change(name: str, was: float, now: float) -> str:
    metric, word = metric_of(name), "rose" if now > was else "fell"
    if metric is UNKNOWN:
        return f"{name} {word}: declare in validation/regressions/metric.py whether that is good"
    if metric.factor == 1 and not metric.difference:
        return f"{name} {word}"
    absolute = metric.difference is not None
    by = f"by {abs(now - was):.4g}" if absolute or not was else f"to {now / was:.3g} times"
    noise = metric.difference if absolute else f"a factor of {metric.factor:g}"
    return f"{name} {word} {by}; {noise} is noise"


def _shown(name: str, value: float) -> str:
    return f"{value:.4g} {unit_of(name)}".rstrip()


def _text(table: pd.DataFrame, name: str) -> pd.Series[str]:
    """A column of words, empty where the table has none."""
    return table[name].fillna("") if name in table else pd.Series("", table.index)
