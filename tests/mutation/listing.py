"""The list of a run as a page: each fault, whether it was caught, and by which test."""

from __future__ import annotations

import dataclasses
import datetime
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.mutation.fault import ROOT, Fault

CAUGHT, SURVIVED, BROKEN = "caught", "SURVIVED", "BROKEN"

FOLDER = ROOT / "reports" / "mutation"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of one planted fault.

    Attributes:
        fault: the fault.
        outcome: `CAUGHT`, `SURVIVED` or `BROKEN`.
        seen_by: the test that failed first, or what the validation of sites said.
    """

    fault: Fault
    outcome: str
    seen_by: str = ""


def page(title: str, outcomes: Sequence[Outcome], date: str = "") -> str:
    """The list in Markdown: the share of each file, and all faults, those that survived first.

    Args:
        title: what was run.
        outcomes: of each fault.
        date: of the run; today where it is empty.
    """
    score = sum(each.outcome == CAUGHT for each in outcomes)
    lines = [f"# {title}", "", f"{date or datetime.date.today()}: {score} of {len(outcomes)} caught.", ""]
    of, caught = (
        Counter(each.fault.path for each in chosen)
        for chosen in (outcomes, [each for each in outcomes if each.outcome == CAUGHT])
    )
    lines += ["| file | caught |", "|---|---|"]
    lines += [f"| {file} | {caught[file]} of {of[file]} |" for file in sorted(of)]
    lines += ["", "| fault | file | outcome | seen by |", "|---|---|---|---|"]
    for each in sorted(outcomes, key=lambda each: (each.outcome == CAUGHT, each.fault.path)):
        cells = (each.fault.name, each.fault.path, each.outcome, each.seen_by)
        lines.append(f"| {' | '.join(_cell(cell) for cell in cells)} |")
    return "\n".join(lines) + "\n"


def write(name: str, title: str, outcomes: Sequence[Outcome], folder: Path = FOLDER) -> Path:
    """Write the list as it is so far, so that a run that is cut leaves one."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.md"
    file.write_text(page(title, outcomes), encoding="utf-8")
    return file


def _cell(text: str) -> str:
    shortened = re.sub(r"/\S*fxopt-mutation-\w+/", "", " ".join(text.split()))[:120]
    return shortened.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
