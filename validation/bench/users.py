"""`python -m validation.bench users`: what users do with an optimized model, and whether its results are eager's.

Each model is in a process of its own, so that one that hangs or dies is a row.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib.util
import pickle
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer

import fxopt
from fxopt.optimizing.report import GraphReport
from fxopt.testing import compare

from .. import store
from ..judging.repro import portable
from ..report.markdown import pipes
from ..timing import cores
from . import rows, user_models
from .engines import quiet, reason
from .machine import write
from .models import named
from .user_models import Call, Subject

TOLERANCE = 1e-4
"""How far a result may be from eager's, relative to the largest value of the tensor; tokens are equal."""

LIMIT = 300
"""Seconds after which the process of a model ends."""


def users(
    models: Annotated[
        str, typer.Option(help="Models by name or its beginning, separated by commas; empty for all.")
    ] = "",
    tune: Annotated[
        bool, typer.Option(help="With --no-tune, also graphs that are slower here are used, and so tried.")
    ] = True,
    out: Annotated[Path, typer.Option(help="Where users.md and users.parquet are written.")] = Path(
        "reports/baseline"
    ),
) -> None:
    """Do what users do with an optimized model, and compare with the model; exit status 1 if something is wrong.

    As many models as there are cores run at a time, each with one thread.
    """
    names = named(models, tuple(user_models.NAMES))
    libraries = {name.partition(".")[0] for name in names}
    absent = sorted(library for library in libraries if importlib.util.find_spec(library) is None)
    found = []
    with ThreadPoolExecutor(cores()) as pool:
        present = [name for name in names if name.partition(".")[0] not in absent]
        for row in pool.map(functools.partial(_alone, tune=tune), present):
            typer.echo(row, err=True)
            found.append(row)
    table = pd.DataFrame(
        found, columns=["library", "model", "graphs", "fallbacks", "wrong", *CELLS, "seconds"]
    )
    wrong, served = int(table["wrong"].sum()), int((table["graphs"] > 0).sum())
    write(
        "users",
        out,
        "What users do with an optimized model",
        f"**Something is wrong with {wrong} of {len(found)} models.** {served} get a graph"
        f"{'' if tune else ', and `tune=False`'}.",
        *(f"Left out: {library} is not installed." for library in absent),
        pipes(table.drop(columns="wrong")),
        f"A result is `ok` where it is within {TOLERANCE} of that of a copy made before `optimize`, relative to the largest value "
        "of the tensor, or where both raise the same error. *Fallbacks* are the reasons of reports.",
    )
    store.replace(out / "users.parquet", table.to_parquet(None, index=False))
    raise typer.Exit(int(wrong > 0))


def _alone(name: str, tune: bool) -> dict[str, Any]:
    """The row of a model, from a process of its own."""
    try:
        return rows.alone(LIMIT, _on_one_thread, name, tune)
    except Exception as error:  # it cannot be built, its process ended, or its time is up
        return _row(name, {}, {"report": reason(error)}, float("nan"))


def _on_one_thread(name: str, tune: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    with quiet():
        return journeys(name, tune)


@torch.no_grad()
def journeys(name: str, tune: bool = True) -> dict[str, Any]:
    """Take all journeys with a model: its row of the table."""
    start, cells, graphs = time.perf_counter(), dict[str, str](), dict[int, GraphReport]()
    subject = user_models.subject(name)

    def pair() -> Pair:
        eager, model = copy.deepcopy(subject.model), copy.deepcopy(subject.model)
        return Pair(subject, eager, fxopt.optimize(model, tune=tune), tune)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        now = pair()
        for journey in JOURNEYS:
            try:
                cells[journey.__name__] = journey(now) or OK
            except Exception as error:  # whatever goes wrong is what the row says
                cells[journey.__name__] = reason(error)
            graphs |= {id(each): each for each in now.fast.report}  # some go when the model changes
            if not cells[journey.__name__].startswith(FINE):  # the two may have other weights now
                now = pair()
    return _row(name, graphs, cells, round(time.perf_counter() - start, 1))


def _row(
    name: str, graphs: Mapping[int, GraphReport], cells: Mapping[str, str], seconds: float
) -> dict[str, Any]:
    library, _, kind = name.partition(".")
    reasons = dict.fromkeys(portable(each.reason) for each in graphs.values() if each.reason)
    count = sum(each.reason is None for each in graphs.values())
    report = OK if count or reasons else "no graph and no reason"
    report = next((text for text in reasons if "Please report this" in text), report)
    cells = {"report": report, **cells}
    wrong = any(not cell.startswith(FINE) for cell in cells.values())
    return {
        "library": library,
        "model": kind,
        "graphs": count,
        "fallbacks": "; ".join(reasons) or NONE,
        "wrong": wrong,
        **dict.fromkeys(CELLS, NONE),
        **cells,
        "seconds": seconds,
    }


FINE = OK, SKIPPED, NONE = "ok", "skipped", "-"
"""How the result of a journey begins that is right, that eager cannot take either, or that there is not."""


@dataclasses.dataclass(frozen=True)
class Pair:
    """A model in two: a copy as it was, and optimized."""

    subject: Subject
    eager: Any
    fast: Any
    tune: bool

    def check(self, *calls: Call, fast: Any = None) -> None:
        """Make calls of both."""
        for call in calls:
            _same(_outcome(call, self.eager), _outcome(call, self.fast if fast is None else fast))


def _outcome(call: Call, model: Any) -> Any:
    """The result of a call, or its error."""
    try:
        return call(model)
    except Exception as error:  # whatever a model raises for inputs that it does not take
        return error


def _same(expected: Any, found: Any) -> None:
    """Raise where a result is not eager's."""
    if isinstance(found, Exception) and type(found) is not type(expected):
        raise found
    if isinstance(expected, Exception):
        assert isinstance(found, Exception), (
            f"eager raises {reason(expected)}, and the optimized model does not"
        )
        return
    difference = compare(expected, found)
    assert difference.max_rel <= TOLERANCE, (
        f"{difference.where} differs from eager's by {difference.max_rel:.1e} of its largest value"
    )


def shapes(pair: Pair) -> None:
    """Other sizes, and all of them once more."""
    pair.check(*pair.subject.calls, *pair.subject.calls)


def methods(pair: Pair) -> str | None:
    """Other methods than forward."""
    pair.check(*pair.subject.methods)
    return None if pair.subject.methods else NONE


def generate(pair: Pair) -> str | None:
    """Greedy, with padding on the left, and with beams."""
    pair.check(*pair.subject.generations)
    return None if pair.subject.generations else NONE


def threads(pair: Pair) -> None:
    """Four threads begin at once, when there is no graph."""
    fast, barrier = fxopt.optimize(copy.deepcopy(pair.eager), tune=pair.tune), threading.Barrier(4)
    calls = pair.subject.calls
    expected = [_outcome(call, pair.eager) for call in calls]

    @torch.no_grad()
    def work(first: int) -> None:
        barrier.wait()
        for index in [*range(first, len(calls)), *range(first)]:
            _same(expected[index], _outcome(calls[index], fast))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, [turn % len(calls) for turn in range(4)]))


def inference_mode(pair: Pair) -> None:
    """Under `torch.inference_mode()`, and without it after that."""
    with torch.inference_mode():
        pair.check(*pair.subject.calls[:2])
    pair.check(pair.subject.calls[0])


def to(pair: Pair) -> None:
    """To float64, and back."""
    for dtype in (torch.float64, torch.float32):
        pair.eager.to(dtype)
        pair.fast.to(dtype)
        pair.check(*pair.subject.calls[:2])


def load_state_dict(pair: Pair) -> None:
    """Other weights, and the first ones again."""
    first, call = copy.deepcopy(pair.eager.state_dict()), pair.subject.calls[0]
    before = call(pair.eager)
    pair.eager.load_state_dict(_other(first))
    assert compare(before, call(pair.eager)).max_rel > 10 * TOLERANCE, (
        "other weights make no difference to eager"
    )
    for state in (_other(first), first):
        pair.eager.load_state_dict(state)
        pair.fast.load_state_dict(state)
        pair.check(*pair.subject.calls[:2])


def deepcopy(pair: Pair) -> None:
    """A copy that gets other weights, after which the module has its own."""
    copied, call = copy.deepcopy(pair.fast), pair.subject.calls[0]
    pair.check(call, fast=copied)
    copied.load_state_dict(_other(pair.eager.state_dict()))
    other = copy.deepcopy(pair.eager)
    other.load_state_dict(_other(pair.eager.state_dict()))
    _same(_outcome(call, other), _outcome(call, copied))
    pair.check(call)


def pickled(pair: Pair) -> str | None:
    """Through pickle and back."""
    error = _outcome(pickle.dumps, pair.eager)
    if isinstance(error, Exception):
        return f"{SKIPPED}: the model itself cannot be pickled ({reason(error)})"
    pair.check(pair.subject.calls[0], fast=pickle.loads(pickle.dumps(pair.fast)))
    return None


JOURNEYS: tuple[Callable[[Pair], str | None], ...] = (
    *(shapes, methods, generate, threads, inference_mode, to, load_state_dict, deepcopy, pickled),
)
CELLS = ["report", *(journey.__name__ for journey in JOURNEYS)]
"""The columns that say whether something is wrong."""


def _other(state: Mapping[str, Any]) -> dict[str, Any]:
    """Other weights for a model."""
    return {key: value * 0.9 if value.is_floating_point() else value for key, value in state.items()}
