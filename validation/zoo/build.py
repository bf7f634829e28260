"""Builds the model of a zoo entry, its inputs (the same on every machine), and its graph."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.fx import GraphModule

import fxopt
from fxopt.errors import TraceError
from fxopt.testing import randomise

from ..records import one_line
from .entry import Entry, Input, factory
from .sources import Architecture


def build_model(entry: Entry) -> nn.Module:
    """The model of an entry in float32 on the CPU, in evaluation mode.

    Unless weights are pretrained, every bias, scale and running statistic gets a random value. The initial values 0 and 1
    would make wrong folds look right.
    """
    if isinstance(entry, Architecture):
        swept: nn.Module = entry.make().build(entry.model)
        return swept
    function: Any = factory(entry)
    if entry.weights.pretrained:
        where, revision = entry.weights.pretrained, entry.weights.revision
        model = function.from_pretrained(where, revision=revision, dtype=torch.float32, **entry.config)
        return model.eval()  # type: ignore[no-any-return]
    with torch.random.fork_rng():
        torch.manual_seed(entry.weights.seed)
        config_class: Any = getattr(function, "config_class", None)
        model = function(config_class(**entry.config)) if config_class else function(**entry.config)
    if not isinstance(model, nn.Module):
        raise TypeError(f"{entry.name}: {entry.model} returned {type(model).__name__}, not an nn.Module")
    return randomise(model, entry.weights.seed).float().eval()


def make_inputs(entry: Entry, model: nn.Module | None = None, **sizes: int) -> dict[str, Tensor]:
    """The inputs of an entry: integers as int64, noise as float32; inputs of a sweep fit `model` and have these `sizes`."""
    if isinstance(entry, Architecture):
        assert model is not None
        inputs: dict[str, Tensor] = entry.make().example_inputs(model, **sizes)
        return inputs
    generator = torch.Generator().manual_seed(0)
    return {name: _tensor(spec, generator) for name, spec in entry.inputs.items()}


def free_sizes(entry: Entry, model: nn.Module) -> dict[str, dict[int, Any]] | None:
    """The dimensions of a sweep's inputs that change with batch or sequence; None if there are none.

    They have the form of `dynamic_shapes` in `fxopt.trace` and `torch.export`.
    """
    inputs, *others = (make_inputs(entry, model, **sizes) for sizes in ({}, {"batch": 3}, {"sequence": 11}))
    free = {
        name: {
            d: Dim.AUTO for d in range(value.ndim) if any(o[name].shape[d] != value.shape[d] for o in others)
        }
        for name, value in inputs.items()
    }
    return free if any(free.values()) else None


def _tensor(spec: Input, generator: torch.Generator) -> Tensor:
    if spec.integers:
        return torch.randint(*spec.integers, spec.shape, generator=generator)
    if spec.padding:
        batch, length = spec.shape
        lengths = length - max(length // 4, 1) * torch.arange(batch).clamp(max=3)
        return (torch.arange(length) < lengths[:, None].clamp(min=1)).long()
    return torch.randn(spec.shape, generator=generator)


DEFAULT, SPECIALIZE = "default arguments", "specialize=True"

Shapes = Mapping[str, Mapping[int, Any]]


@dataclasses.dataclass(frozen=True)
class Way:
    """Arguments of `fxopt.trace`, and a name for them."""

    name: str = DEFAULT
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Captured:
    """A graph, how it was captured, why the first way was refused, and its seconds (in a sweep, of processor time)."""

    graph: GraphModule
    way: Way
    refusal: str = ""
    seconds: float = 0.0


def capture(entry: Entry, model: nn.Module, inputs: Mapping[str, Tensor]) -> Captured:
    """Capture a model of a zoo file as its entry defines."""
    started = time.perf_counter()
    if entry.sizes_are_free and not entry.dynamic_shapes:
        graph = fxopt.symbolic_trace(model, list(entry.inputs))
    else:
        graph = fxopt.trace(model, kwargs=dict(inputs), dynamic_shapes=named_shapes(entry) or None)
    return Captured(graph, Way(), seconds=time.perf_counter() - started)


def named_shapes(entry: Entry) -> Shapes:
    """The `dynamic_shapes` of an entry, in the form that `fxopt.trace` and `torch.export` take."""
    dim = functools.cache(Dim)
    return {
        name: {d: dim(symbol) for d, symbol in free.items()} for name, free in entry.dynamic_shapes.items()
    }


def ways(shapes: Shapes | None) -> list[Way]:
    """The ways to try: default arguments, then `specialize=True`; each with dynamic sizes, then with static ones."""
    attempts: dict[str, dict[str, Any]] = {DEFAULT: {}, SPECIALIZE: {"specialize": True}}
    return [
        Way(name, {**options, "dynamic_shapes": free})
        for name, options in attempts.items()
        for free in ((shapes, None) if shapes else (None,))
    ]


def capture_first(model: nn.Module, inputs: Callable[[], dict[str, Tensor]], ways: Sequence[Way]) -> Captured:
    """Capture a model in the first way without a `TraceError`; if all ways raise one, raise that of the first."""
    errors: list[TraceError] = []
    for way in ways:
        given, started = inputs(), time.process_time()
        try:
            # Not verified here: the check of parity does that.
            graph = fxopt.trace(model, kwargs=given, verify=False, **way.options)
        except TraceError as error:
            errors.append(error)
            continue
        refusal = one_line(errors[0]) if errors else ""
        return Captured(graph, way, refusal, time.process_time() - started)
    raise errors[0]
