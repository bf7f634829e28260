"""Verdicts on mutants, and the page of a run: the score of each folder and operator, and what survived."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import json
from collections.abc import Sequence
from pathlib import Path

from tests.mutation.operators import Mutant

CAUGHT, SURVIVED, UNTESTED, BROKEN = "caught", "SURVIVED", "UNTESTED", "BROKEN"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of a mutant.

    Attributes:
        mutant: its key.
        outcome: `CAUGHT`; `SURVIVED` where no test failed that was run; `UNTESTED` where none executes its line;
            `BROKEN` where the fault could not be planted.
        by: the first test that failed, if one did.
        tests: how many were to run.
    """

    mutant: str
    outcome: str
    by: str
    tests: int

    def append(self, folder: Path) -> None:
        """Write it into the folder's file."""
        with (folder / "verdicts.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(dataclasses.asdict(self)) + "\n")


def read(folder: Path, sample: Sequence[Mutant]) -> dict[str, Verdict]:
    """The verdicts on these mutants that are in the folder's file, by their keys."""
    file = folder / "verdicts.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    verdicts = {verdict.mutant: verdict for verdict in (Verdict(**json.loads(line)) for line in lines)}
    return {mutant.key: verdicts[mutant.key] for mutant in sample if mutant.key in verdicts}


def page(seed: int, sample: Sequence[Mutant], verdicts: dict[str, Verdict], marked: int) -> tuple[str, float]:
    """The page of a run in Markdown, and the score."""
    judged = [mutant for mutant in sample if mutant.key in verdicts]
    missed = [mutant for mutant in judged if verdicts[mutant.key].outcome != CAUGHT]
    caught = len(judged) - len(missed)
    lines = [
        "# Planted faults",
        "",
        f"{datetime.date.today()}: {caught} of {len(judged)} mutants caught, the first in the order of seed {seed}; "
        f"{marked} others are marked as equivalent.",
    ]
    for title, name in (("folder", _folder), ("operator", lambda mutant: mutant.operator)):
        of, not_caught = (collections.Counter(map(name, some)) for some in (judged, missed))
        lines += ["", f"| {title} | caught | of |", "|---|---|---|"]
        lines += [f"| {each} | {of[each] - not_caught[each]} | {of[each]} |" for each in sorted(of)]
    lines += ["", "| line | outcome | tests | operator | before | after |", "|---|---|---|---|---|---|"]
    for mutant in sorted(missed, key=lambda mutant: (mutant.file, mutant.line)):
        verdict = verdicts[mutant.key]
        cells = (f"{mutant.file}:{mutant.line}", verdict.outcome, verdict.tests, mutant.operator)
        lines.append(f"| {' | '.join(map(str, cells))} | {_code(mutant.before)} | {_code(mutant.after)} |")
    return "\n".join(lines) + "\n", caught / len(judged) if judged else 0.0


def _folder(mutant: Mutant) -> str:
    return "/".join(mutant.file.split("/")[:-1][:2])


def _code(text: str) -> str:
    return f"`{' '.join(text.split())[:80]}`".replace("|", "\\|")
