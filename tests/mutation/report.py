"""Verdicts on mutants, and the page of a run: the score of each folder and operator, and what survived."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.mutation.operators import Mutant

CAUGHT, SURVIVED, UNTESTED = "caught", "SURVIVED", "UNTESTED"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of a mutant.

    Attributes:
        mutant: its key.
        outcome: `CAUGHT`; `SURVIVED` where no test failed that was run; `UNTESTED` where none executes its line.
        by: the first test that failed, or how the process ended.
        tests: how many it was shown.
    """

    mutant: str
    outcome: str
    by: str
    tests: int

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def read(file: Path, sample: Iterable[Mutant]) -> dict[str, Verdict]:
    """The verdicts on these mutants that are written in a file, by their keys."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    verdicts = {verdict.mutant: verdict for verdict in (Verdict(**json.loads(line)) for line in lines)}
    return {mutant.key: verdicts[mutant.key] for mutant in sample if mutant.key in verdicts}


def page(seed: int, sample: Sequence[Mutant], verdicts: dict[str, Verdict], marked: int) -> tuple[str, float]:
    """The page of a run in Markdown, and the score."""
    judged = [(mutant, verdicts[mutant.key]) for mutant in sample if mutant.key in verdicts]
    missed = [(mutant, verdict) for mutant, verdict in judged if verdict.outcome != CAUGHT]
    score = 1 - len(missed) / len(judged) if judged else 0.0
    lines = [
        "# Planted faults",
        "",
        f"{datetime.date.today()}, seed {seed}: {len(judged) - len(missed)} of {len(judged)} mutants caught ({score:.0%}). "
        f"{marked} more are marked as equivalent.",
    ]
    for name, of in (("folder", _folder), ("operator", lambda mutant: mutant.operator)):
        all_of, missed_of = (
            collections.Counter(of(mutant) for mutant, _ in some) for some in (judged, missed)
        )
        lines += ["", f"| {name} | caught | of | score |", "|---|---|---|---|"]
        for each, count in sorted(all_of.items()):
            caught = count - missed_of[each]
            lines.append(f"| {each} | {caught} | {count} | {caught / count:.0%} |")
    lines += ["", "| not caught | operator | before | after | tests |", "|---|---|---|---|---|"]
    for mutant, verdict in sorted(missed, key=lambda pair: (pair[0].file, pair[0].line)):
        cells = (f"{mutant.file}:{mutant.line}", mutant.operator, _cell(mutant.before), _cell(mutant.after))
        lines.append(f"| {' | '.join(cells)} | {verdict.tests or 'none'} |")
    return "\n".join(lines) + "\n", score


def _folder(mutant: Mutant) -> str:
    return "/".join(mutant.file.split("/")[:-1][:2])


def _cell(text: str) -> str:
    return "`" + " ".join(text.split())[:80].replace("|", "\\|").replace("`", "'") + "`"
