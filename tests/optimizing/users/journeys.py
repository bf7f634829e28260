"""Uses of an optimized model, as users have them: each a function of a pair that raises where a result is not eager's."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import threading
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

import fxopt
from fxopt.testing import compare

from .models import Call, Subject

TOLERANCE = 1e-4
"""How far a result may be from eager's, relative to the largest value of the tensor; tokens are equal."""


@dataclasses.dataclass(frozen=True)
class Pair:
    """A model in two: a copy as it was, and optimized; without measuring, so that slower graphs are tried, too."""

    subject: Subject
    eager: Any
    fast: Any

    @classmethod
    def of(cls, subject: Subject) -> Pair:
        """Two copies of a model."""
        eager, model = copy.deepcopy(subject.model), copy.deepcopy(subject.model)
        return cls(subject, eager, fxopt.optimize(model, tune=False))

    def check(self, *calls: Call, fast: Any = None) -> None:
        """Make calls of both."""
        for call in calls:
            _check(_outcome(call, self.eager), _outcome(call, self.fast if fast is None else fast))


@torch.no_grad()
def wrong(subject: Subject) -> dict[str, str]:
    """Take all journeys with a model: what is wrong, by the name of the journey; `report` where there never was a graph."""
    found: dict[str, str] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pair, reasons = Pair.of(subject), []
        for journey in JOURNEYS:
            try:
                journey(pair)
            except Exception as error:  # whatever goes wrong is what this tells
                found[journey.__name__] = f"{type(error).__name__}: {error}"
            reasons += [report.reason for report in pair.fast.report]
            if journey.__name__ in found:  # the two may have other weights now
                pair = Pair.of(subject)
    if None not in reasons:
        found["report"] = f"no graph: {reasons}"
    unknown = [reason for reason in reasons if "Please report this" in (reason or "")]
    return found | ({"report": unknown[0]} if unknown else {})


def _outcome(call: Call, model: Any) -> Any:
    """The result of a call, or its error."""
    try:
        return call(model)
    except Exception as error:  # whatever a model raises for inputs that it does not take
        return error


def _check(expected: Any, found: Any) -> None:
    """Raise where a result is not eager's."""
    if isinstance(found, Exception) and type(found) is not type(expected):
        raise found
    if isinstance(expected, Exception):
        assert isinstance(found, Exception), f"eager raises {expected!r}, and the optimized model does not"
        return
    difference = compare(expected, found)
    assert difference.max_rel <= TOLERANCE, (
        f"{difference.where} differs from eager's by {difference.max_rel:.1e} of its largest value"
    )


def shapes(pair: Pair) -> None:
    """Other sizes, and all of them once more."""
    pair.check(*pair.subject.calls, *pair.subject.calls)


def methods(pair: Pair) -> None:
    """Other methods than forward."""
    pair.check(*pair.subject.methods)


def generate(pair: Pair) -> None:
    """Greedy, with padding on the left, and with beams."""
    pair.check(*pair.subject.generations)


def threads(pair: Pair) -> None:
    """Four threads begin at once, when there is no graph."""
    fast, barrier = fxopt.optimize(copy.deepcopy(pair.eager), tune=False), threading.Barrier(4)
    calls = pair.subject.calls
    expected = [_outcome(call, pair.eager) for call in calls]

    @torch.no_grad()
    def work(first: int) -> None:
        barrier.wait()
        for index in [*range(first, len(calls)), *range(first)]:
            _check(expected[index], _outcome(calls[index], fast))

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
    after = call(pair.eager)
    assert compare(before, after).max_rel > 10 * TOLERANCE, "other weights make no difference to eager"
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
    _check(_outcome(call, other), _outcome(call, copied))
    pair.check(call)


def pickled(pair: Pair) -> None:
    """Through pickle and back, where the model itself can be pickled."""
    if isinstance(_outcome(pickle.dumps, pair.eager), bytes):
        pair.check(pair.subject.calls[0], fast=pickle.loads(pickle.dumps(pair.fast)))


JOURNEYS: tuple[Callable[[Pair], None], ...] = (
    *(shapes, methods, generate, threads, inference_mode, to, load_state_dict, deepcopy, pickled),
)


def _other(state: Mapping[str, Any]) -> dict[str, Any]:
    """Other weights for a model."""
    return {key: value * 0.9 if value.is_floating_point() else value for key, value in state.items()}
