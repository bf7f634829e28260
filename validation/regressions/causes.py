"""The causes of regressions: all regressions with the same pass, or the same stage of a model, are one line."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

import pandas as pd

from ..checks import latency
from ..records import AGAIN, FAILING, TIMED, UNTRIED, Check, Outcome, counted, one_line
from ..zoo.plan import OPTIMIZED
from .compare import LEFT_OUT, VANISHED

Identity = tuple[str, str, str]
"""A regression, identified by its kind, case and metric."""

CAPTURE = {"load": "is not built", "run the model": "does not run", "capture": "is not captured"}
"""The stages before any pass, with the text for a model that ends there."""

_SEVERITY = ("outcome", "new failure", "stage", "capture", "error", "limit", "accuracy", "compared", "sites")
"""The kinds of changes, worst first; unlisted kinds come last."""

_VERDICTS = ("outcome", "new failure", "stage")

_VERBS: dict[str, str] = {
    Outcome.FAIL: "fails",
    Outcome.ERROR: "raises an error",
    Outcome.TIMEOUT: "times out",
    Outcome.MEMORY: "runs out of memory",
    Outcome.CRASH: "crashes",
}


@dataclasses.dataclass(frozen=True)
class Cause:
    """The regressions with one common reason.

    Attributes:
        text: a sentence with the change and its place.
        models: the affected models.
        cases: the number of affected cases.
        since: the commits of the last run without the cause and of the first one with it, or empty.
        command: a command that runs one of the cases.
        bisects: whether its exit status tells a good commit from a bad one.
    """

    text: str
    models: tuple[str, ...]
    cases: int
    since: str
    command: str
    bisects: bool


def causes(
    changes: pd.DataFrame,
    table: pd.DataFrame,
    before: pd.DataFrame,
    since: Mapping[Identity, str] = {},
) -> list[Cause]:
    """Group regressions by cause: a pass, a stage before any pass, or a kind of cost. Failures come first.

    Args:
        changes: a table of `compare.compare`.
        table: the run.
        before: the run that `table` was compared with, which has the cases that vanished.
        since: the commits between which each regression appeared.
    """
    runs = [run[["id", *_OF_A_CASE]] for run in (before, table)]
    rows = pd.concat(runs).drop_duplicates("id", keep="last").set_index("id")
    joined = changes[changes["regression"]].drop(columns="regression").join(rows, on="id")
    worse = [_Change(*row) for row in joined.fillna("").astype(str).itertuples(index=False, name=None)]
    ran = [each for each in worse if not each.untried]
    singles = [each.blamed for each in ran if each.blamed and "+" not in each.blamed]
    alone = Counter(name for name in singles if not _is_named(name))
    of_model: dict[str, set[str]] = defaultdict(set)
    for each in ran:
        of_model[each.model].add(each.blamed)
    groups: dict[tuple[str, ...], list[_Change]] = {}
    # A pass is not the cause if the graph without any pass fails.
    verdicts = [each for each in ran if each.kind in _VERDICTS and each.check == Check.PARITY]
    broken = {(each.model, each.device): _key(each, []) for each in verdicts}
    keys: dict[str, tuple[str, ...]] = {}  # by case
    for each in ran:
        names = of_model[each.model] if _is_named(each.blamed) else each.blamed.split("+")
        guilty = [name for name, _ in alone.most_common() if name in names]
        key = broken.get((each.model, each.device)) if each.kind in _VERDICTS else None
        key = key or _key(each, guilty)
        groups.setdefault(key, []).append(each)
        if each.kind in _VERDICTS:
            keys.setdefault(each.id, key)
    for each in worse:
        if each.untried:
            known = (keys[case] for case in each.dead if case in keys)
            groups.setdefault(next(known, _key(each, [])), []).append(each)
    there = {*table["model"]}
    found = [_cause(group, since, there) for group in groups.values()]
    return sorted(found, key=lambda cause: (not cause.bisects, -cause.cases))


_OF_A_CASE = ["model", "device", "pipeline", "check", "stage", "options"]


@dataclasses.dataclass(frozen=True)
class _Change:
    """A regression of one case, with the columns of `compare.CHANGE`, and the values of `_OF_A_CASE` for the case."""

    kind: str
    id: str
    metric: str
    before: str
    after: str
    explanation: str
    model: str
    device: str
    pipeline: str
    check: str
    stage: str
    options: str

    @property
    def lost(self) -> bool:
        """True if the case ends before there is anything to check."""
        return self.kind in _VERDICTS and self.stage in CAPTURE

    @property
    def untried(self) -> bool:
        """True if the case did not run, because others had ended the process of its model."""
        return self.explanation.startswith(UNTRIED)

    @property
    def dead(self) -> list[str]:
        """The cases that ended the process, for a case that did not run."""
        return self.explanation.removeprefix(UNTRIED).strip().split(", ")

    @property
    def blamed(self) -> str:
        """The pipeline that ran when the case ended: the first latency case of a model runs the pipelines of all."""
        stage, _, arm = self.stage.partition(" ")
        if not arm or stage not in ("transform", "time"):
            return self.pipeline
        return "" if arm in (latency.CAPTURED, latency.AGAIN) else arm

    @property
    def rank(self) -> tuple[int, float, bool, str]:
        """Sort key: the worst kind, then the fewest passes, timed and counted cases last; the first case shows the cause best."""
        several = _is_named(self.pipeline)
        passes = math.inf if several else len(self.pipeline.split("+")) * bool(self.pipeline)
        severity = _SEVERITY.index(self.kind) if self.kind in _SEVERITY else len(_SEVERITY)
        severity += len(_SEVERITY) * self.untried
        # A wrong output is more informative than a changed number of sites.
        return severity, passes, self.check in (*TIMED, Check.EFFECT), self.id


def _is_named(pipeline: str) -> bool:
    """Tell whether a pipeline has a name, such as `all`, and many passes; the name of a pass is that of its class."""
    return pipeline[:1].islower()


def _key(change: _Change, guilty: Sequence[str]) -> tuple[str, ...]:
    """The origin of a regression: a stage and its message, one of the `guilty` passes, or a kind of cost."""
    if change.kind == VANISHED:
        return change.kind, change.explanation
    if change.lost:
        return change.stage, re.sub(r"'[^']*'|\S*[/\d]\S*", "…", change.explanation)
    if change.untried:
        return "untried", change.model, change.device
    if change.blamed in OPTIMIZED:
        return "optimize", change.kind
    if change.blamed:
        return "pass", (*guilty, change.blamed)[0]
    return "graph", change.kind


def _cause(group: Sequence[_Change], since: Mapping[Identity, str], there: Collection[str]) -> Cause:
    first, *others = sorted(group, key=lambda change: change.rank)
    models = tuple(sorted({each.model for each in group}))
    case = first.dead[0] if first.untried else first.id
    command = AGAIN.format(model=first.model, case=case) + first.options
    if first.kind == VANISHED:  # perhaps the case is no longer planned, or the model has left the zoo
        runs = command.partition(" -k ")[0] + first.options
        says = first.model in there or first.explanation.startswith(LEFT_OUT)  # the run shows it
        command = runs if says else f"fxopt accept {first.model} --reason ..."
    cases = len({each.id for each in group})
    came = since.get((first.kind, first.id, first.metric), "")
    came = first.explanation if first.kind == "latency" else came  # it is detected later
    text = one_line(" ".join(_text(first, others, models)))
    if since and first.kind == "new failure":
        text, came = f"New, and fails: {text}", ""
    return Cause(text, models, cases, came, command, first.after in FAILING)


def _text(first: _Change, others: Sequence[_Change], models: tuple[str, ...]) -> Iterator[str]:
    """The sentence: pass, change, models and amount; then the other kinds of changes with the same cause."""
    where, what = _named(models), first.blamed.replace("+", " → ") or "The graph"
    if first.pipeline in OPTIMIZED:
        what = _named(tuple(dict.fromkeys(each.pipeline for each in (first, *others))))
    if first.kind == VANISHED:
        yield f"{where}: {counted(len(others) + 1, 'case')} vanished ({first.explanation})"
    elif first.untried:
        yield f"{where}: {first.explanation}"
    elif first.lost:
        yield f"{where} {CAPTURE[first.stage]}: {first.explanation.removesuffix(f' in stage {first.stage}')}"
    elif first.kind in _VERDICTS:
        reason = first.explanation.partition("; ")[0]  # the table of failures has the full text
        yield f"{what} {_VERBS.get(first.after, 'got worse')} in {where}: {reason}"
    else:
        change = " → ".join(filter(None, (first.before, first.after)))
        if first.kind == "latency":
            change += f" ({float(first.after) / float(first.before) - 1:+.0%})"
        yield f"{what}, {_noun(first)}: {change} in {first.model}"
        if len(models) > 1:
            yield f"(also worse in {_named(tuple(name for name in models if name != first.model))})"
    kinds = Counter(_noun(each) for each in others if each.kind not in (first.kind, *_VERDICTS))
    if kinds and first.kind not in _VERDICTS:
        yield f"Changed with it: {', '.join(kinds)}."


def _noun(change: _Change) -> str:
    return change.metric.replace("_", " ") or change.kind


def _named(names: tuple[str, ...], most: int = 4) -> str:
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {counted(more, 'other')}" if more > 0 else "")
