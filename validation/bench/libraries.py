"""How much of other libraries fxopt captures, with torch.export beside it: the models of `validation.libraries`."""

from __future__ import annotations

import dataclasses
import fnmatch
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

import fxopt
from fxopt.testing import compare

from .. import libraries as source
from ..build import run_seeded

TOLERANCE = 1e-6
"""How far a right graph may be off, relative to the largest value of an output: some models compute in float32 on the way."""

BATCHES = (source.BATCH, source.OTHER_BATCH)

Capture = Callable[..., Callable[..., Any]]


@dataclasses.dataclass
class Verdict:
    """The result of one tool for one model.

    `outcome` is `right`, `wrong`, `refused` or `crashed`; `free` is whether a graph with a free batch is right at another
    one; `reason` is what was raised first.
    """

    outcome: str
    free: bool
    reason: str
    seconds: float
    specialized: bool = False


def libraries(
    output: Annotated[Path, typer.Option(help="The table, as Markdown.")] = Path(
        "reports/latest/libraries.md"
    ),
    only: Annotated[str, typer.Option(help="Models whose name matches this pattern.")] = "*",
    peer: Annotated[bool, typer.Option(help="Run torch.export beside.")] = True,
) -> None:
    """Count the models of other libraries that are captured right: by default, with specialize=True, with a free batch."""
    rows: dict[str, tuple[bool, Verdict, Verdict | None]] = {}
    for name in fnmatch.filter(source.model_types(), only):
        try:
            row = rows[name] = _row(name, peer)
        except Exception as error:  # whatever a library raises where its model cannot be built or run
            print(name, "is left out, it does not run:", error, flush=True)
            continue
        print(
            name,
            *(f"{v.outcome} free={v.free} {v.seconds:.1f}s {v.reason[:300]}" for v in row[1:] if v),
            flush=True,
        )
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("\n".join(_report(rows)) + "\n", encoding="utf-8")
    print(f"written to {output}")


def _row(name: str, peer: bool) -> tuple[bool, Verdict, Verdict | None]:
    """Judge one model: does it take another batch, and the verdicts on fxopt and on torch.export."""
    torch.manual_seed(0)
    model = source.build(name)
    try:
        wide = model.double()
        run_seeded(wide, source.example_inputs(wide))
    except RuntimeError:  # it mixes dtypes
        model = source.build(name)
    expected: dict[int, Any] = {}
    for batch in BATCHES:
        try:
            expected[batch] = run_seeded(model, source.example_inputs(model, batch))
        except Exception:  # whatever it raises, the model does not take this batch
            if batch == source.BATCH:
                raise
    free = len(expected) > 1 and any(source.free_dimensions(model).values())
    own = _verdict(model, expected, free, _fxopt)
    if own.outcome == "refused":
        decided = _verdict(model, expected, free, _specialized)
        own.specialized = decided.outcome == "right"
        if decided.outcome != "refused" and decided.outcome != "right":
            own.outcome = decided.outcome
    return free, own, _verdict(model, expected, free, _exported) if peer else None


def _verdict(model: nn.Module, expected: Mapping[int, Any], free: bool, capture: Capture) -> Verdict:
    """Captured with a free batch, else with a fixed one."""
    reason, started = "", time.process_time()
    outcome = "refused"
    for shapes in (source.free_dimensions(model), None) if free else (None,):
        seconds = time.process_time()
        try:
            graph = capture(model, source.example_inputs(model), shapes)
        except Exception as error:  # a capture may raise anything; other than TraceError it is a crash
            reason = reason or f"{type(error).__name__}: {' '.join(str(error).split())}"
            refused = isinstance(error, fxopt.TraceError) and "fxopt itself fails" not in str(error)
            outcome = outcome if refused or capture is _exported else "crashed"
            continue
        seconds = time.process_time() - seconds
        takes, wrong = [], ""
        for batch, value in expected.items():
            if batch != source.BATCH and shapes is None:
                continue
            try:
                found = run_seeded(graph, source.example_inputs(model, batch))  # type: ignore[arg-type]
            except Exception as error:  # a graph that refuses a size says so
                reason = reason or f"at batch {batch}: {type(error).__name__}: {' '.join(str(error).split())}"
                continue
            takes.append(batch)
            wrong = wrong or _difference(value, found, f"at batch {batch}: ")
        if wrong:
            return Verdict("wrong", False, wrong, seconds)
        if source.BATCH in takes:
            return Verdict("right", len(takes) > 1, reason, seconds)
    return Verdict(outcome, False, reason, time.process_time() - started)


def _difference(expected: Any, found: Any, where: str) -> str:
    """How two outputs differ; empty where they agree."""
    try:
        error = compare(expected, found).max_rel
    except AssertionError as difference:
        return where + " ".join(str(difference).split())
    return "" if error <= TOLERANCE else f"{where}{error:.2g} of the largest value off"


def _fxopt(model: nn.Module, inputs: dict[str, Tensor], shapes: Any) -> Any:
    with torch.no_grad():
        return fxopt.trace(model, kwargs=inputs, dynamic_shapes=shapes)


def _specialized(model: nn.Module, inputs: dict[str, Tensor], shapes: Any) -> Any:
    with torch.no_grad():
        return fxopt.trace(model, kwargs=inputs, dynamic_shapes=shapes, specialize=True)


def _exported(model: nn.Module, inputs: dict[str, Tensor], shapes: Any) -> Any:
    with torch.no_grad():
        return torch.export.export(model, (), inputs, dynamic_shapes=shapes, strict=False).module()


def _report(rows: Mapping[str, tuple[bool, Verdict, Verdict | None]]) -> list[str]:
    """The totals, one line a library, and one line a model that is not captured in the best way."""
    counts: dict[str, Counter[str]] = {}
    for name, (free, own, other) in rows.items():
        for group in ("all", name.partition(".")[0]):
            counts.setdefault(group, Counter()).update(_counted(free, own, other))
    columns = [
        *("models", "right by default", "with specialize=True", "takes another batch", "free batch", "wrong"),
        *("crashed", "torch.export right", "its free batch", "its wrong"),
    ]
    lines = [
        "# Models of other libraries",
        "",
        f"torch {torch.__version__}, float64, right to {TOLERANCE:g} of the largest value of each output, `python -m validation.bench libraries`.",
        "",
    ]
    lines += [f"| library | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    lines += [
        f"| {group} | {' | '.join(str(count[c]) for c in columns)} |" for group, count in counts.items()
    ]
    lines += ["", "| model | fxopt | torch.export | reason |", "|---|---|---|---|"]
    for name, (free, own, other) in rows.items():
        if own.outcome != "right" or own.free != free:
            peer = "" if other is None else _text(free, other)
            reason = own.reason.replace("|", "\\|")[:300]
            lines.append(f"| {name} | {_text(free, own)} | {peer} | {reason} |")
    return lines


def _counted(free: bool, own: Verdict, other: Verdict | None) -> dict[str, int]:
    right = own.outcome == "right"
    counted = {
        "models": 1,
        "right by default": right,
        "with specialize=True": right or own.specialized,
        "takes another batch": free,
        "free batch": own.free,
        "wrong": own.outcome == "wrong",
        "crashed": own.outcome == "crashed",
    }
    if other is not None:
        counted |= {
            "torch.export right": other.outcome == "right",
            "its free batch": other.free,
            "its wrong": other.outcome == "wrong",
        }
    return {name: int(value) for name, value in counted.items()}


def _text(free: bool, verdict: Verdict) -> str:
    if verdict.outcome == "right":
        return "right" if verdict.free or not free else "right, batch fixed"
    return f"{verdict.outcome}, right with specialize=True" if verdict.specialized else verdict.outcome
