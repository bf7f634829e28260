"""How a model is captured: as its entry says; one of a sweep in the first of several ways that succeeds."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule

import fxopt
from fxopt.errors import TraceError

from .zoo import Entry

DEFAULT, SPECIALIZE = "default arguments", "specialize=True"

Shapes = Mapping[str, Mapping[int, Any]]


@dataclasses.dataclass(frozen=True)
class Way:
    """Arguments of `fxopt.trace`, a name for them, and the sizes that they leave free."""

    name: str = DEFAULT
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    shapes: Shapes | None = None


@dataclasses.dataclass(frozen=True)
class Captured:
    """A graph, the way in which it was captured, what the ways before it said, and its seconds of the processor."""

    graph: GraphModule
    way: Way
    refusals: tuple[str, ...] = ()
    seconds: float = 0.0


def capture(entry: Entry, model: nn.Module, inputs: Mapping[str, Tensor]) -> Captured:
    """Capture a model of a zoo file as its entry says."""
    started = time.process_time()
    if entry.sizes == "dynamic":
        graph = fxopt.symbolic_trace(model, list(entry.inputs))
    else:
        graph = fxopt.trace(model, kwargs=dict(inputs))
    return Captured(graph, Way(), seconds=time.process_time() - started)


def ways(shapes: Shapes | None) -> list[Way]:
    """With free sizes, else with fixed ones; with default arguments, else with values of the example built in."""
    attempts: dict[str, dict[str, Any]] = {DEFAULT: {}, SPECIALIZE: {"specialize": True}}
    return [
        Way(name, options, free)
        for name, options in attempts.items()
        for free in ((shapes, None) if shapes else (None,))
    ]


def capture_first(model: nn.Module, inputs: Callable[[], dict[str, Tensor]], ways: Sequence[Way]) -> Captured:
    """Capture a model in the first way that does not raise `TraceError`; raises that of the first way if all do."""
    errors: list[TraceError] = []
    for way in ways:
        given, started = inputs(), time.process_time()
        try:
            # Not verified here: the check of parity does that.
            graph = fxopt.trace(model, kwargs=given, dynamic_shapes=way.shapes, verify=False, **way.options)
        except TraceError as error:
            errors.append(error)
            continue
        refusals = tuple(" ".join(str(error).split()) for error in errors)
        return Captured(graph, way, refusals, time.process_time() - started)
    raise errors[0]
