"""How a model is captured: as its entry says; one of a sweep in the first of several ways that succeeds."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import fxopt
from fxopt.errors import TraceError

from .entry import Entry

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
    if entry.sizes_are_free and not entry.dynamic_shapes:
        graph = fxopt.symbolic_trace(model, list(entry.inputs))
    else:
        graph = fxopt.trace(model, kwargs=dict(inputs), dynamic_shapes=named_shapes(entry) or None)
    return Captured(graph, Way(), seconds=time.process_time() - started)


def named_shapes(entry: Entry) -> Shapes:
    """The `dynamic_shapes` of an entry, in the form that `fxopt.trace` and `torch.export` take."""
    symbols = {symbol for free in entry.dynamic_shapes.values() for symbol in free.values()}
    dims = {
        symbol: torch.export.Dim(symbol, **entry.dims[symbol].model_dump(exclude_none=True))
        if symbol in entry.dims
        else torch.export.Dim(symbol)
        for symbol in symbols
    }
    return {
        name: {d: dims[symbol] for d, symbol in free.items()} for name, free in entry.dynamic_shapes.items()
    }


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
