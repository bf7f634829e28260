"""The causes of regressions: what goes back to one pass, or to one stage of a model, is one line."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence

import pandas as pd

from ..records import AGAIN, FAILING, TIMED, Outcome, counted
from ..zoo.plan import ALL, EXACT

CAPTURE = {"load": "is not built", "run the model": "does not run", "capture": "is not captured"}
"""The stages before any pass, and what a model that ends there lacks."""

_SEVERITY = (
    "outcome",
    "new failure",
    "stage",
    "capture",
    "error",
    "limit",
    "accuracy",
    "compared",
    "sites",
)
"""The kinds of changes, the worst first; others come after these."""

PASSES = (ALL, EXACT)
"""The pipelines of many passes, of which one may be the cause."""

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
    """The regressions that go back to one reason.

    Attributes:
        text: what and where, in a sentence.
        models: that it befell.
        cases: how many.
        since: the commits of the last run without it and of the first one with it, or empty.
        command: runs one of the cases.
    """

    text: str
    models: tuple[str, ...]
    cases: int
    since: str
    command: str


def causes(
    changes: pd.DataFrame, table: pd.DataFrame, before: pd.DataFrame | None = None, since: str = ""
) -> list[Cause]:
    """Group the regressions among the changes to a run: one cause a pass, a stage before any pass, or a kind of cost.

    Args:
        changes: a table of `compare.compare`.
        table: the run.
        before: the run that it was compared with, which has the cases that vanished.
        since: the commits between which it got worse.
    """
    rows = {
        str(row["id"]): row for run in (before, table) if run is not None for row in run.to_dict("records")
    }
    worse = [
        _Change(
            **{name: str(row[name]) for name in ("kind", "id", "metric", "before", "after", "explanation")},
            row=row_of,
        )
        for row in changes[changes["regression"]].to_dict("records")
        if (row_of := rows.get(str(row["id"]), {})) is not None
    ]
    alone = Counter(each.pipeline for each in worse if each.pipeline and "+" not in each.pipeline)
    alone -= Counter(dict.fromkeys(PASSES, len(worse)))
    of_model = {
        model: [each.pipeline for each in worse if each.model == model]
        for model in {each.model for each in worse}
    }
    groups: dict[tuple[str, ...], list[_Change]] = {}
    for each in worse:
        names = of_model[each.model] if each.pipeline in PASSES else each.pipeline.split("+")
        guilty = [name for name, _ in alone.most_common() if name in names]
        groups.setdefault(_key(each, guilty), []).append(each)
    found = [_cause(group, since) for group in groups.values()]
    return sorted(found, key=lambda cause: -cause.cases)


def failures(table: pd.DataFrame) -> pd.DataFrame:
    """The failures of a run as regressions, for one that there is no other to compare with."""
    failing = table[table["outcome"].isin(FAILING)]
    stages = failing["stage"].map(lambda stage: f" in stage {stage}" if stage not in ("", "compare") else "")
    return pd.DataFrame(
        {
            "regression": True,
            "kind": "new failure",
            "id": failing["id"],
            "metric": "",
            "before": "",
            "after": failing["outcome"],
            "explanation": failing["reason"] + stages,
        }
    )


@dataclasses.dataclass(frozen=True)
class _Change:
    """A regression of one case, and the row of the case."""

    kind: str
    id: str
    metric: str
    before: str
    after: str
    explanation: str
    row: Mapping[Hashable, object]

    @property
    def pipeline(self) -> str:
        return str(self.row.get("pipeline") or "")

    @property
    def model(self) -> str:
        return str(self.row.get("model") or self.id)

    @property
    def stage(self) -> str:
        return str(self.row.get("stage") or "") if self.kind in _VERDICTS else ""

    @property
    def rank(self) -> tuple[int, float, bool, str]:
        """The worst kind first, then the fewest passes, timed cases last: the first of a group shows its cause best."""
        passes = math.inf if self.pipeline in PASSES else len(self.pipeline.split("+")) * bool(self.pipeline)
        severity = _SEVERITY.index(self.kind) if self.kind in _SEVERITY else len(_SEVERITY)
        return severity, passes, self.row.get("check") in TIMED, self.id


def _key(change: _Change, guilty: Sequence[str]) -> tuple[str, ...]:
    """The origin of a regression: a stage and its message, one of the `guilty` passes, or a kind of cost."""
    if change.kind.endswith("vanished") or not change.row:
        return (change.kind,)
    if change.stage in CAPTURE:
        return change.stage, re.sub(r"'[^']*'|\S*[/\d]\S*", "…", change.explanation)
    if change.pipeline:
        return "pass", (*guilty, change.pipeline)[0]
    return "graph", change.kind


def _cause(group: Sequence[_Change], since: str) -> Cause:
    first, *others = sorted(group, key=lambda change: change.rank)
    models = tuple(sorted({each.model for each in group}))
    row = first.row
    command = AGAIN.format(model=first.model, case=first.id) + str(row.get("options") or "") if row else ""
    cases = len({each.id for each in group})
    return Cause(" ".join(_text(first, others, models)), models, cases, since, command)


def _text(first: _Change, others: Sequence[_Change], models: tuple[str, ...]) -> Iterator[str]:
    """The sentence: who, what, where, by how much; then the other kinds of changes with the same cause."""
    where, what = _named(models), first.pipeline.replace("+", " → ") or "The graph"
    if first.kind.endswith("vanished"):
        yield f"{_named(tuple(sorted({each.id for each in (first, *others)})))}: {first.kind}"
    elif first.stage in CAPTURE:
        yield f"{where} {CAPTURE[first.stage]}: {first.explanation.removesuffix(f' in stage {first.stage}')}"
    elif first.kind in _VERDICTS:
        yield f"{what} {_VERBS.get(first.after, 'got worse')} in {where}: {first.explanation}"
    else:
        change = " → ".join(filter(None, (first.before, first.after)))
        yield f"{what}, {_noun(first)}: {change} in {first.model}"
        if len(models) > 1:
            yield f"(also worse in {_named(tuple(name for name in models if name != first.model))})"
    kinds = Counter(_noun(each) for each in others if each.kind not in (first.kind, *_VERDICTS))
    if kinds and not first.stage:
        yield f"Changed with it: {', '.join(kinds)}."


def _noun(change: _Change) -> str:
    return change.metric.replace("_", " ") or change.kind


def _named(names: tuple[str, ...], most: int = 4) -> str:
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {counted(more, 'other')}" if more > 0 else "")
