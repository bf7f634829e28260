"""Writes docs/files.md from the code: zoo keys, checks, outcomes, columns, metrics and exit statuses. `python -m validation.reference`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from pathlib import Path

import pydantic

from fxopt.command_line import STATUSES

from .checks import available
from .records import MEANING, STAGES
from .regressions.metric import METRICS, MOST_BUSY, Metric
from .regressions.trend import FEWEST_BEFORE, MARGINS
from .store.table import DESCRIBED
from .zoo.entry import Entry, Input, KnownFailure, Tolerance, ZooFile

PAGE = Path(__file__).parents[1] / "docs" / "files.md"

INTRODUCTION = """# Files, outcomes, metrics and exit statuses

For readers of a zoo file, a report or a log who look up a word. `fxopt validate` reads `model_zoo.yaml` and writes
`reports/`; [Nightly](nightly.md) tells how to act on a report. `python -m validation.reference` writes this page."""

FILES = """## Files

| path in `reports/` | content |
|---|---|
| `latest/records.parquet` | the last run, one row a case: all other files are views of this table |
| `latest/report.html`, `summary.md` | what got worse since the last good run, failures, every case |
| `latest/compatibility/<model>.md` | one model: pass × device with verdict, sites, error and speed |
| `latest/passes/<pass>.md` | one pass: models, where it rewrites, what it refuses, error and gain |
| `latest/repro/<case>.py` | a script that shows a failure without the harness |
| `part/` | parts of another commit, other versions or another zoo than `latest/`, until they are a whole run |
| `history/<run>.parquet` | every whole run |
| `baseline/records.parquet` | a run to give `fxopt compare` as the baseline |
| `architectures/` | the last sweep over every architecture of transformers |
| `running/<run>.jsonl` | the journal of a run that is not finished: one line a record |
"""

KEYS: dict[str, type[pydantic.BaseModel]] = {
    "": ZooFile,
    "models[]": Entry,
    "models[].inputs.*": Input,
    "models[].known_failures[]": KnownFailure,
    "models[].tolerances[]": Tolerance,
}


def page() -> str:
    """The page as Markdown."""
    texts = ((name, str(inspect.getdoc(inspect.getmodule(check)))) for name, check in available().items())
    checks = ((f"`{name}`", text.partition(": ")[2].rstrip(".")) for name, text in texts)
    blocks = [
        INTRODUCTION,
        FILES.strip(),
        "## Keys of a zoo file",
        *(_table(["key", "default", "meaning"], _keys(where, model)) for where, model in KEYS.items()),
        f"## Checks\n\n{_table(['check', 'meaning'], checks)}",
        "## Outcomes of a case",
        _table(["outcome", "meaning"], MEANING.items()),
        f"The stages of a case, in order: {', '.join(f'`{stage}`' for stage in STAGES)}. The first latency case of a model runs the "
        "pipelines of all: `transform X` and `time X` name the pipeline whose arm ended the process.",
        "## Columns of `records.parquet`",
        _table(["column", "meaning"], ((f"`{name}`", text) for name, (_, text) in DESCRIBED.items())),
        "All other columns are measurements (numbers) and facts (text).",
        "## Metrics, and what counts as a regression",
        _table(["measurement", "meaning", "worse when", "compared"], map(_metric, METRICS, METRICS.values())),
        _latency(),
        "## Exit statuses",
        _table(["status", "meaning"], STATUSES.items()),
    ]
    return "\n\n".join(blocks) + "\n"


def _keys(where: str, model: type[pydantic.BaseModel]) -> Iterator[tuple[str, str, str]]:
    for name, field in model.model_fields.items():
        if model is Entry and name in ("sites", "pipelines"):
            continue  # not written by hand
        default = "" if field.is_required() else field.get_default()
        said = f"`{default!r}`" if default and isinstance(default, float | str | tuple) else ""
        said = "required" if field.is_required() else said
        yield f"`{'.'.join(filter(None, (where, name)))}`", said, str(field.description)


def _metric(pattern: str, metric: Metric) -> tuple[str, str, str, str]:
    if not metric.better:
        return f"`{pattern}`", metric.text, "never", ""
    word = "higher" if metric.better == "lower" else "lower"
    by = f" by more than {metric.difference:g}" if metric.difference else ""
    by = f" by more than a factor of {metric.factor:g}" if metric.factor != 1 else by
    floor = f", and above {metric.floor:g}" if metric.floor else ""
    machine = "on the same machine" if metric.machine else "always"
    return f"`{pattern}`", metric.text, f"{word}{by}{floor}", machine


def _latency() -> str:
    margins = "; ".join(f"{margin:.0%} in the last {runs} runs" for runs, margin in MARGINS.items())
    return (
        f"A latency is the ratio to the graph as captured, in the same run; of `optimize`, to the model. A latency counts as "
        f"worse after several runs on the same machine: {margins}. At least {FEWEST_BEFORE} earlier runs must lie below the new "
        "intervals, and the change must exceed what runs of the same case differ by. Runs in which other processes used more than "
        f"{MOST_BUSY:g} % of a core do not count, nor do the seconds of models that were timed then."
    )


def _table(heads: list[str], rows: Iterable[tuple[object, ...]]) -> str:
    lines = [heads, ["---"] * len(heads), *([str(cell).replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
