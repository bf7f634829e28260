"""A run in a sentence or two: failures, cases that were not run and why, and changes since earlier runs."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from ..records import FAILING, LACKING, WORST_FIRST, Outcome, counted
from ..regressions import trend
from ..regressions.causes import Cause, Identity, causes
from ..regressions.compare import CHANGE, LEFT_OUT, MACHINE, compare
from ..regressions.metric import BUSY, MOST_BUSY
from ..store import ReportError, left_out, missing, read_run, unlike
from ..zoo.sources import SOURCE


def verdict(table: pd.DataFrame) -> str:
    """The number of cases that ran, and of those that failed; skipped cases did not run.

    Example:
        >>> verdict(pd.DataFrame({"outcome": ["pass", "no-op", "skip"]}))
        'No case of 2 failed'
    """
    count, failed = len(ran(table)), int(table["outcome"].isin(FAILING).sum())
    return f"{failed:,} of {count:,} cases failed" if failed else f"No case of {count:,} failed"


def not_run(table: pd.DataFrame) -> list[str]:
    """Sentences on cases that were skipped or are not judged, and on planned cases that are missing."""
    told = []
    if len(skipped := table[table["outcome"] == Outcome.SKIP]):
        cases, models = counted(len(skipped), "case"), counted(skipped["model"].nunique(), "model")
        reasons = skipped["reason"].value_counts().index
        told.append(
            f"{cases} of {models} not run{'; the commonest reason' if len(reasons) > 1 else ''}: {reasons[0]}"
        )
    if BUSY in table and (busy := table.loc[table[BUSY] > MOST_BUSY, "model"].nunique()):
        told.append(
            f"The machine was busy in the time measurements of {counted(busy, 'model')}: these latencies and times are not judged"
        )
    if models := left_out(table):
        told.append(LACKING + models)
    if lacking := missing(table):
        told.append(f"Partial: {counted(lacking, 'planned case')} not run")
    return told


def ends(table: pd.DataFrame) -> dict[str, int]:
    """The number of cases with each outcome, without skipped cases."""
    counted = table["outcome"].value_counts()
    return {o: int(counted[o]) for o in WORST_FIRST if o in counted and o != Outcome.SKIP}


def ran(table: pd.DataFrame) -> pd.DataFrame:
    """The cases that were run; all views except the headline leave out the others."""
    return table[table["outcome"] != Outcome.SKIP].reset_index(drop=True)


def is_sweep(table: pd.DataFrame) -> bool:
    """Tell whether the run was a sweep."""
    return SOURCE in table and bool(table[SOURCE].fillna("").ne("").any())


MOST_RUNS = 12
"""The number of runs of the history that a report shows."""


@dataclasses.dataclass(frozen=True)
class Since:
    """The changes since the last good run.

    Attributes:
        run: the id of the last good run; empty if there is none, and then `causes` are those of all failures.
        commit: the commit of that run.
        changes: a table of `compare.compare`, with the latencies that changed for good.
        causes: the causes of the regressions among the changes: failures first, then by number of cases.
        later: the number of runs of the history that are dated after this run, and not compared.
    """

    run: str
    commit: str
    changes: pd.DataFrame
    causes: list[Cause]
    later: int = 0


def earlier(table: pd.DataFrame, history: Path) -> tuple[list[pd.DataFrame], int]:
    """The runs of the same kind (sweep or not) before the run of a table, oldest first, and the number of later runs."""
    own, swept = {*table["run"]}, is_sweep(table)
    found: list[pd.DataFrame] = []
    files = sorted(history.glob("[!.]*.parquet"), reverse=True)
    for file in files:
        if file.stem < max(own) and file.stem not in own and len(found) < MOST_RUNS:
            with contextlib.suppress(ReportError):  # `fxopt history` warns of files that cannot be read
                run = read_run(file)
                found += [run] if is_sweep(run) == swept else []
    return found[::-1], sum(file.stem > max(own) for file in files)


def since(table: pd.DataFrame, runs: list[pd.DataFrame], later: int = 0) -> Since:
    """Compare a run with the last good earlier run, in which nothing was worse than in the good run before it.

    A regression is reported until it is fixed, with the commits between which it appeared.
    """
    if not runs:
        changes = compare(table[:0], table)
        changes = changes[changes["regression"]]
        return Since("", "", changes, causes(changes, table, table), later)
    tables = [*runs, table]
    found = trend.latencies(tables)
    slower = min(found.loc[found["change"] > 0, "since"], default="none")
    good, bad = runs[0], list[pd.DataFrame]()
    for run in runs[1:]:
        worse = run["run"].max() >= slower or compare(good, run)["regression"].any()
        good, bad = (good, [*bad, run]) if worse else (run, [])
    since = compared(good, table, _latency_changes(tables, found), bad)
    return dataclasses.replace(since, later=later)


def compared(
    good: pd.DataFrame,
    table: pd.DataFrame,
    latencies: pd.DataFrame | None = None,
    bad: Sequence[pd.DataFrame] = (),
    *,
    part: bool | None = None,
) -> Since:
    """Compare a run with a good one; `bad` are the runs between them, in which something was worse."""
    came, before = dict[Identity, str](), good
    for run in (*bad, table):
        found = compare(good, run, part=part)
        worse = found.loc[found["regression"], ["kind", "id", "metric"]]
        commits = between(before, run)
        came = {key: came.get(key, commits) for key in worse.itertuples(index=False, name=None)}
        before = run
    changes = pd.concat([found, latencies], ignore_index=True).sort_values(
        "regression", ascending=False, kind="stable", ignore_index=True
    )
    return Since(str(good["run"].iloc[0]), commit_of(good), changes, causes(changes, table, good, came))


def _latency_changes(tables: list[pd.DataFrame], found: pd.DataFrame) -> pd.DataFrame:
    """The lasting latency changes of `trend.latencies` as rows of changes, each explained by its commits."""
    rows = []
    for case, _, since, was, now, change in found.itertuples(index=False, name=None):
        at = [since in {*table["run"]} for table in tables].index(True)
        commits = between(tables[at - 1], tables[at])
        rows.append((change > 0, "latency", case, trend.LATENCY, f"{was:.3f}", f"{now:.3f}", commits))
    return pd.DataFrame(rows, columns=CHANGE).astype({"regression": bool})


def got_worse(since: Since) -> str:
    """The number of causes, and the run since which they appeared.

    Example:
        >>> got_worse(Since("20260102T030405.678Z-acf9a7c1", "acf9a7c1", pd.DataFrame(), []))
        'Nothing got worse since the run of 2026-01-02 (commit acf9a7c1)'
    """
    count = counted(len(since.causes), "cause") if since.causes else ""
    if not since.run:
        return f"{count} of failures" if count else NO_RUN
    end = f"since the run of {pd.Timestamp(since.run[:8]):%Y-%m-%d} (commit {since.commit})"
    return f"{count} of regressions {end}" if count else f"Nothing got worse {end}"


NO_RUN = "There is no earlier run to compare with"


BISECTED = "sh -c 'COMMAND; s=$?; [ $s -gt 1 ] && exit 125; exit $s'"
"""The command for `git bisect run` with the command of a cause: a commit that cannot run the case is skipped."""


def to_do(since: Since) -> str:
    """Changed conditions since the last good run, and the next steps, a sentence each; empty if there are none."""
    changed = since.changes.loc[since.changes["kind"] == "environment", ["id", "before", "after"]]
    texts = {f"Since the last good run: {name} {old} → {new}.": name for name, old, new in changed.to_numpy()}
    machine = "The last good run was on another machine: times, memory and kernels are not compared."
    steps = [*dict.fromkeys(machine if name in MACHINE else text for text, name in texts.items())]
    if since.later:
        steps.append(f"Dated after this run, and not compared: {counted(since.later, 'run')} of the history.")
    numbers: dict[str, list[str]] = {}
    for number, cause in enumerate(since.causes, 1):
        if cause.bisects and re.fullmatch(r"[0-9a-f]+\.\.[0-9a-f]+", cause.since):
            numbers.setdefault(cause.since, []).append(str(number))
    for commits, own in numbers.items():
        good, _, bad = commits.partition("..")
        of = f" of {', '.join(own)}" if len(own) < len(since.causes) else ""
        steps.append(f"The commit{of}: `git bisect start {bad} {good}`, then `git bisect run {BISECTED}`.")
    worse = since.changes[since.changes["regression"]]
    if since.causes and since.run and not worse["explanation"].str.startswith(LEFT_OUT).all():
        steps.append("A change that is right: `fxopt accept CASE_OR_MODEL --reason ...`.")
    return " ".join(steps)


def told(cause: Cause) -> str:
    """The number of cases and models of a cause, and the commits between which it appeared."""
    since = "" if cause.since.startswith("both") else "since "
    came = f", {since}{cause.since}" if cause.since else ""
    return f"{counted(cause.cases, 'case')} of {counted(len(cause.models), 'model')}{came}"


def between(good: pd.DataFrame, bad: pd.DataFrame) -> str:
    """The commits of a good run and of the first bad one; the cause is the bad commit, or one between them.

    For two runs of one commit: the other differences.
    """
    was, now = commit_of(good), commit_of(bad)
    if was == now == "unknown":
        return ""
    if was != now:
        return f"{was}..{now}"
    return f"both runs are of commit {now}: {unlike(good, bad) or 'no version'} changed"


def commit_of(table: pd.DataFrame) -> str:
    """The commit of a run."""
    return str(table["commit"].iloc[0] or "unknown")


def marked(changes: pd.DataFrame) -> pd.DataFrame:
    """The changes with `regression` as a word, not a bool."""
    return changes.assign(regression=changes["regression"].map({True: "worse", False: ""}))


def changed(changes: pd.DataFrame) -> str:
    """The number of regressions and of other changes, of a table of `compare.compare`."""
    worse = int(changes["regression"].sum())
    return f"{counted(worse, 'regression')}, {counted(len(changes) - worse, 'other change')}"
