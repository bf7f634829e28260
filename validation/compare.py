"""What changed between two runs, and which of it is worse: for tracking from night to night."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Iterator
from typing import Any

import pandas as pd

from validation.records import FAILING, Check, Outcome
from validation.store import measurements_of
from validation.sweep import DEFAULT, FREE, STAGES

CHANGE = ["regression", "kind", "id", "before", "after", "explanation"]

# Below this an error is rounding in float64, whatever factor it grew by.
ROUNDING = 1e-12

# Shares of right or equal answers: lower is worse.
SHARES = ("agreement", "accuracy", "cosine")


def compare(
    baseline: pd.DataFrame,
    current: pd.DataFrame,
    *,
    error_factor: float = 10.0,
    latency_change: float = 0.25,
    share_drop: float = 0.02,
    part: bool = False,
) -> pd.DataFrame:
    """The changes from one run (a table of `store.read_run`) to a later one, regressions first.

    A regression is: a case that passed and does not now, or that did not fail and fails now; a model, device
    or case that has vanished, unless `part` says that the later run was of a part; an architecture that fails
    in an earlier stage, or whose capture asks for more or leaves less free; fewer sites rewritten; an error of
    another case that grew by more than `error_factor`; a share (agreement, cosine, accuracy) that fell by more
    than `share_drop`; a latency ratio that rose by more than the fraction `latency_change` *and* whose confidence interval lies above the earlier one. Latencies from
    different hardware, or under different thread counts, are not compared. The interval knows only the noise
    within a run; between runs of the same code on a busy machine, ratios were seen to differ by 11 %, ten
    times their intervals, hence `latency_change` (`trend.drift` finds smaller changes, from many runs). The
    opposite changes are rows too, with `regression` False.

    Returns one row a change, with the columns `regression`, `kind`, `id`, `before`, `after`, `explanation`;
    no rows when nothing changed.
    """
    before, after = baseline.set_index("id", drop=False), current.set_index("id", drop=False)
    if part:
        before = before.loc[before.index.intersection(after.index)]
    changes = [*_population(before, after), *_environment(before, after)]
    common = before.index.intersection(after.index)
    names = [name for name in measurements_of(baseline) if name in measurements_of(current)]
    for case in common:
        old, new = before.loc[case].to_dict(), after.loc[case].to_dict()
        changes += _outcome(old, new)
        changes += _capture(old, new)
        changes += _sites(old, new)
        changes += _error(old, new, names, error_factor)
        for name in filter(functools.partial(_both_finite, old, new), names):
            changes += _share(old, new, name, share_drop)
        changes += _latency(old, new, latency_change)
    table = pd.DataFrame(changes, columns=CHANGE)
    return table.sort_values(["regression", "kind", "id"], ascending=[False, True, True], ignore_index=True)


def _population(before: pd.DataFrame, after: pd.DataFrame) -> Iterator[tuple[Any, ...]]:
    """Cases that only one of the runs has; a whole model or device is one change, not one a case."""
    for gone, one, other in ((True, before, after), (False, after, before)):
        word = "vanished" if gone else "added"
        left = one.loc[one.index.difference(other.index)]
        for column in ("model", "device"):
            whole = sorted(set(left[column]) - set(other[column]))
            for name in whole:
                count = int((left[column] == name).sum())
                present, absent = f"{count} cases", "none"
                values = (present, absent) if gone else (absent, present)
                yield gone, f"{column} {word}", name, *values, f"the {column} {name} is in one run only"
            left = left[~left[column].isin(whole)]
        for case, outcome in left["outcome"].items():
            values = (outcome, "none") if gone else ("none", outcome)
            yield gone, f"case {word}", case, *values, "the case is in one run only"


def _environment(before: pd.DataFrame, after: pd.DataFrame) -> Iterator[tuple[Any, ...]]:
    for name in ("python", "torch", "transformers", "device_name", "threads"):
        old, new = (", ".join(map(str, sorted(set(run[name])))) for run in (before, after))
        if old != new:
            yield False, "environment", name, old, new, "the runs were made under different conditions"


def _outcome(old: dict[Hashable, Any], new: dict[Hashable, Any]) -> Iterator[tuple[Any, ...]]:
    was, now = old["outcome"], new["outcome"]
    if was != now:
        worse = was == Outcome.PASS or (now in FAILING and was not in FAILING)
        where = " in stage " + new["stage"] if new["stage"] else ""
        explanation = f"{new['reason']}{where}" if new["reason"] else f"{was} became {now}"
        yield worse, "outcome", new["id"], was, now, explanation


def _capture(old: dict[Hashable, Any], new: dict[Hashable, Any]) -> Iterator[tuple[Any, ...]]:
    """What only an architecture has: how far it came, how it was captured, and which sizes are free."""
    if new["check"] != Check.ARCHITECTURE:
        return
    was, now = old["stage"], new["stage"]
    if was in STAGES and now in STAGES and was != now:
        worse = STAGES.index(now) < STAGES.index(was)
        yield worse, "stage", new["id"], was, now, new["reason"]
    for name, best in (("captured", DEFAULT), ("batch", FREE), ("sequence", FREE)):
        was, now = old.get(name), new.get(name)
        if isinstance(was, str) and isinstance(now, str) and was != now:
            yield was == best, name, new["id"], was, now, f"{was} became {now}"


def _sites(old: dict[Hashable, Any], new: dict[Hashable, Any]) -> Iterator[tuple[Any, ...]]:
    for name in filter(functools.partial(_both_finite, old, new), old):
        kind, _, pass_ = str(name).partition("_")
        if kind in ("sites", "refused") and old[name] != new[name]:
            was, now = old[name], new[name]
            what = f"sites {'rewritten' if kind == 'sites' else 'refused'}{f' by {pass_}' if pass_ else ''}"
            worse = kind == "sites" and now < was
            yield worse, kind, new["id"], f"{was:g}", f"{now:g}", f"the number of {what} changed"


def _error(
    old: dict[Hashable, Any], new: dict[Hashable, Any], names: list[str], factor: float
) -> Iterator[tuple[Any, ...]]:
    """The error of a case that changed most: several measures of one output grow together.

    An architecture is right or not: which units of float32 it is off by, if any, depends on the machine.
    """
    if new["check"] == Check.ARCHITECTURE:
        return
    errors = [name for name in names if "error" in name and "original" not in name]
    changed = {
        name: math.log(max(new[name], ROUNDING) / max(old[name], ROUNDING))
        for name in errors
        if _both_finite(old, new, name)
    }
    name = max(changed, key=lambda name: abs(changed[name]), default="")
    if name and abs(changed[name]) > math.log(factor):
        grown = changed[name] > 0
        explanation = f"{name} {'grew' if grown else 'shrank'} by more than a factor of {factor:g}"
        yield grown, "error", new["id"], f"{old[name]:.2e}", f"{new[name]:.2e}", explanation


def _share(
    old: dict[Hashable, Any], new: dict[Hashable, Any], name: str, drop: float
) -> Iterator[tuple[Any, ...]]:
    was, now = old[name], new[name]
    if any(share in name for share in SHARES) and abs(now - was) > drop:
        explanation = f"{name} {'fell' if now < was else 'rose'} by {abs(now - was):.3f}"
        yield now < was, "accuracy", new["id"], f"{was:.4f}", f"{now:.4f}", explanation


def _latency(old: dict[Hashable, Any], new: dict[Hashable, Any], change: float) -> Iterator[tuple[Any, ...]]:
    columns = ("latency_ratio", "latency_ratio_low", "latency_ratio_high")
    if not all(_both_finite(old, new, name) for name in columns):
        return
    if any(old[name] != new[name] for name in ("device_name", "threads")):
        return
    (was, was_low, was_high), (now, now_low, now_high) = (
        [row[name] for name in columns] for row in (old, new)
    )
    slower = now_low > was_high and now > was * (1 + change)
    faster = now_high < was_low and now < was / (1 + change)
    if slower or faster:
        explanation = (
            f"transformed / original latency {'rose' if slower else 'fell'} by {abs(now / was - 1):.0%}"
        )
        intervals = (
            f"{was:.3f} [{was_low:.3f}, {was_high:.3f}]",
            f"{now:.3f} [{now_low:.3f}, {now_high:.3f}]",
        )
        yield slower, "latency", new["id"], *intervals, explanation


def _both_finite(old: dict[Hashable, Any], new: dict[Hashable, Any], name: Hashable) -> bool:
    values = [row.get(name, math.nan) for row in (old, new)]
    return all(isinstance(value, int | float) and math.isfinite(value) for value in values)
