"""The graphs of one optimized model: which one serves a call, and when another one is made."""

from __future__ import annotations

import dataclasses
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fxopt.capture import TracedModule
from fxopt.errors import GuardError
from fxopt.optimizing.prepare import UNCAPTURED, Inputs, Options, prepare
from fxopt.optimizing.report import GraphReport, Report
from fxopt.optimizing.structures import (
    Shapes,
    differing,
    dynamic_shapes,
    requires_grad,
    shapes_of,
    structure_of,
    text_of,
)

MOST_GRAPHS = 8
"""How many graphs a model may have; what fits none of them, the model itself computes."""

_MOST_FAILURES = 2  # how often to try for one structure


@dataclasses.dataclass
class _Calls:
    """The calls of one structure for which a graph was asked.

    Attributes:
        shapes: of the inputs of each.
        free: the dimensions that were not the same in all of them.
        failures: how often there was none.
    """

    shapes: set[Shapes] = dataclasses.field(default_factory=set)
    free: set[tuple[int, int]] = dataclasses.field(default_factory=set)
    failures: int = 0


class Graphs:
    """Computes a model's forward by graphs, and makes one where none fits.

    The first graph for a structure of inputs (their names, containers and constants) has the sizes of the first call.
    Where a later call has other sizes, those that differ are free in the next graph.

    Args:
        twin: makes a copy of the model as it is now, which shares its weights.
        options: what `optimize` was asked for.
        dynamic: the sizes that are free in every graph, as `fxopt.trace` takes them; None to go by the calls.
    """

    def __init__(self, twin: Callable[[], nn.Module], options: Options, dynamic: Any = None) -> None:
        self._twin, self._options, self._dynamic = twin, options, dynamic
        self._parameters = list(twin().parameters())
        self._lock = threading.RLock()
        self.forget()

    def forget(self) -> None:
        """Drop all graphs: the weights are others."""
        with self._lock:
            self._graphs: dict[Any, tuple[TracedModule, ...]] = {}
            self._calls: dict[Any, _Calls] = {}
            self._warned: set[str] = set()
            self._reports: list[GraphReport] = []
            self._version = self._weights_version()

    @property
    def report(self) -> Report:
        """What was made so far."""
        return Report(self._reports)

    def run(self, eager: Callable[..., Any], inputs: Inputs, training: bool) -> Any:
        """Compute the forward: by a graph where there is one for these inputs, else by `eager`."""
        reason = self._reason_for_eager(inputs, training)
        if reason is not None:
            self._warn(reason)
            return eager(*inputs.args, **inputs.kwargs)
        if self._version != self._weights_version():
            self.forget()
        key = (len(inputs.args), *sorted(inputs.kwargs))
        for attempt in ("one that is there", "a new one"):
            if attempt == "a new one" and not self.make(inputs):
                break
            for traced in self._graphs.get(key, ()):
                try:
                    value = traced(*inputs.args, **inputs.kwargs)
                except GuardError:
                    continue
                self._put_first(key, traced)
                return value
        return eager(*inputs.args, **inputs.kwargs)

    def make(self, inputs: Inputs) -> bool:
        """Make a graph for some inputs, which no graph fits; returns False where the model itself is to run."""
        named = {str(number): value for number, value in enumerate(inputs.args)} | dict(inputs.kwargs)
        structure, shapes = structure_of(named), shapes_of(named)
        with self._lock:
            calls = self._calls.setdefault(structure, _Calls())
            if shapes in calls.shapes:
                return calls.failures == 0  # another thread has made it, or it was in vain
            if calls.failures >= _MOST_FAILURES:
                return False
            if sum(map(len, self._graphs.values())) >= MOST_GRAPHS:
                self._warn(f"its inputs fit none of {MOST_GRAPHS} graphs, and there are no more than that")
                return False
            for others in calls.shapes:
                calls.free |= differing(shapes, others)
            calls.shapes.add(shapes)
            traced = self._prepared(inputs, named, calls.free)
            if traced is None:
                calls.failures += 1
                self._warn(str(self._reports[-1].reason))
                return False
            key = (len(inputs.args), *sorted(inputs.kwargs))
            self._graphs[key] = (traced, *self._graphs.get(key, ()))
            return True

    def _prepared(
        self, inputs: Inputs, named: dict[str, Any], free: set[tuple[int, int]]
    ) -> TracedModule | None:
        """A graph with these sizes free, or, where that cannot be captured, with none."""
        choices: list[Any] = [self._dynamic]
        if free and self._dynamic is None:
            specs = dynamic_shapes(named, free)
            positional = {str(number) for number in range(len(inputs.args))}
            choices = [[*specs.values()] if positional else specs, None]
        for dynamic in choices:
            title = text_of(named, free if dynamic is not None else set())
            try:
                with torch.no_grad(), torch.random.fork_rng(devices=[]):
                    traced, report = prepare(self._twin(), inputs, dynamic, self._options, title)
            except Exception as error:  # the model can still run, and whoever reads the report can tell us
                reason = f"{type(error).__name__} while its graph was made, please report this: {error}"
                traced, report = None, GraphReport(title, reason=reason)
            self._reports.append(report)
            if traced is not None or not str(report.reason).startswith(UNCAPTURED):
                return traced
        return None

    def _put_first(self, key: Any, traced: TracedModule) -> None:
        known = self._graphs.get(key, ())
        if known and known[0] is not traced:
            with self._lock:
                others = [each for each in self._graphs.get(key, ()) if each is not traced]
                self._graphs[key] = (traced, *others)

    def _reason_for_eager(self, inputs: Inputs, training: bool) -> str | None:
        """Why the model itself is to run, whatever graphs there are; empty where that is as it should be."""
        if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
            return ""
        if training:
            return "it is in training mode; call .eval()"
        if torch.is_grad_enabled() and (
            any(p.requires_grad for p in self._parameters)
            or requires_grad((inputs.args, dict(inputs.kwargs)))
        ):
            return "gradients are recorded; call it under torch.no_grad() or torch.inference_mode()"
        device = self._parameters[0].device.type if self._parameters else "cpu"
        if torch.is_autocast_enabled(device):
            return "autocast is on; choose the precision when you optimize"
        return None

    def _weights_version(self) -> Any:
        """Something that changes when weights are written into, moved or cast."""
        first = self._parameters[0] if self._parameters else None
        where = None if first is None else (first.dtype, first.device)
        return where, sum(0 if p.is_inference() else p._version for p in self._parameters)

    def _warn(self, reason: str) -> None:
        if reason and reason not in self._warned:
            self._warned.add(reason)
            warnings.warn(f"the model itself runs: {reason}", stacklevel=5)
