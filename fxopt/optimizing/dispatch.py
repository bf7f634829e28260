"""The graphs of one optimized model: which one serves a call, and when another one is made."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import warnings
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from fxopt.errors import GuardError
from fxopt.optimizing.inputs import Inputs
from fxopt.optimizing.lowering import Lowered
from fxopt.optimizing.offloading import Offloaded, trim
from fxopt.optimizing.prepare import UNCAPTURED, Options, prepare
from fxopt.optimizing.report import GraphReport, Report
from fxopt.optimizing.structures import (
    Shapes,
    Signature,
    differing,
    dynamic_shapes,
    has_own_kernels,
    plain_signature,
    requires_grad,
    shapes_of,
    structure_of,
    tensors_of_inputs,
    text_of,
)
from fxopt.optimizing.watching import Watched, swapped
from fxopt.torch_internals import cannot_tell, has_any_global_hook, is_transforming

MOST_GRAPHS = 8
"""How many graphs a model may have; what fits none of them, the model itself computes."""

_MOST_FAILURES = 2  # how often to try for one structure
_MOST_STRUCTURES = 64  # how many to keep in mind
_MOST_FORGOTTEN = 8  # how often weights or modules may change
# In how many calls of a model without graphs to ask once if it has changed, and to try again then.
_EVERY = 16


@dataclasses.dataclass
class _Calls:
    """The calls of one structure for which a graph was asked.

    Attributes:
        graphs: the graph for the shapes of each, None where there is none.
        free: the dimensions that were not the same in all of them.
        failures: how often there was none.
    """

    graphs: dict[Shapes, Lowered | None] = dataclasses.field(default_factory=dict)
    free: set[tuple[int, int]] = dataclasses.field(default_factory=set)
    failures: int = 0


class Graphs:
    """Computes a model's forward by graphs, and makes one where none fits.

    The first graph for a structure of inputs (their names, containers and constants) has the sizes of the first call.
    Where a later call has other sizes, those that differ are free in the next graph.

    Args:
        model: the model.
        options: what `optimize` was asked for.
        dynamic: the sizes that are free in every graph, as `fxopt.trace` takes them; None to go by the calls.
        offloaded: the weights of the model, if they are in a file.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        dynamic: Any = None,
        offloaded: Offloaded | None = None,
    ) -> None:
        self._model, self.options, self.offloaded, self.dynamic = model, options, offloaded, dynamic
        self._evict = bool if offloaded is None else offloaded.evict
        self._lock = threading.RLock()
        self._warned: set[str] = set()
        self._forgotten = self._asked = 0
        self._start()

    def _start(self) -> None:
        self._graphs: dict[Any, tuple[Lowered, ...]] = {}
        self._calls: dict[Any, _Calls] = {}
        self._failures = 0
        self._vain = set[Signature]()  # for which there is no graph, and will be none
        self._reports: list[GraphReport] = []
        # Optimized parts of the module that are called by themselves, by the ids of what they stand for.
        self.parts: dict[int, Any] = {}
        self._parameters = list(self._model.parameters())
        self._watched: Watched | None = None  # made with the first graph
        self._trains = False  # whether gradients were recorded meanwhile

    def forget(self) -> None:
        """Drop all graphs: the weights or the modules are others."""
        with self._lock:
            self._forgotten += bool(self._graphs)
            self._start()

    def made(self) -> dict[tuple[int, tuple[str, ...]], tuple[GraphModule, ...]]:
        """The graphs, by how many arguments a call gives by position and the names of the others, in the order of trying."""
        if self._has_changed():
            self.forget()
        return {
            (key[0], tuple(key[1:])): tuple(each.with_weights() for each in lowered)
            for key, lowered in self._graphs.items()
        }

    @property
    def report(self) -> Report:
        """The graphs that were made so far."""
        return Report([*self._reports, *(each for part in self.parts.values() for each in part.report)])

    def run(self, inputs: Inputs) -> Any:
        """Compute the forward: by a graph where there is one for these inputs, else by the model's own."""
        eager = self._model.forward
        reason = self._reason_for_eager(inputs)
        if reason is not None:
            self._warn(reason)
            return eager(*inputs.args, **inputs.kwargs)
        key = (len(inputs.args), *sorted(inputs.kwargs))
        known = self._graphs.get(key, ())
        for lowered in known:
            with contextlib.suppress(GuardError):
                value = lowered(*inputs.args, **inputs.kwargs)
                if lowered is not known[0]:
                    with self._lock:
                        self._filed(key, lowered)
                return value
        plain, vain = plain_signature(inputs), self._vain
        if plain in vain:
            return eager(*inputs.args, **inputs.kwargs)
        made = self.make(inputs)
        if made is None and plain is not None and len(vain) < _MOST_STRUCTURES:
            vain.add(plain)
        if made is not None:
            with contextlib.suppress(GuardError):
                return made(*inputs.args, **inputs.kwargs)
        return eager(*inputs.args, **inputs.kwargs)

    def make(self, inputs: Inputs) -> Lowered | None:
        """Make a graph for some inputs, which no graph fits; None where the model itself is to run."""
        try:
            named = inputs.named(self._model)
            structure, shapes = structure_of(named), shapes_of(named)
        except Exception as error:  # whatever objects the inputs are, the model may know what to do with them
            self._warn(f"its inputs cannot be described ({type(error).__name__}: {error})")
            return None
        if any(map(has_own_kernels, tensors_of_inputs(named))):
            return None
        with self._lock:
            calls = self._calls.get(structure)
            if calls is None:
                if self._failures >= MOST_GRAPHS or len(self._calls) >= _MOST_STRUCTURES:
                    return None
                calls = self._calls[structure] = _Calls()
            key = (len(inputs.args), *sorted(inputs.kwargs))
            if shapes in calls.graphs:  # for keywords instead of positions, by another thread, or in vain
                return self._filed(key, calls.graphs[shapes])
            if calls.failures >= _MOST_FAILURES:
                return None
            if sum(map(len, self._graphs.values())) >= MOST_GRAPHS:
                self._warn(f"its inputs fit none of {MOST_GRAPHS} graphs, and there are no more than that")
                return None
            for others in calls.graphs:
                calls.free |= differing(shapes, others)
            lowered = calls.graphs[shapes] = self._prepared(inputs, named, calls.free)
            if lowered is None:
                calls.failures += 1
                self._failures += 1
                self._warn(str(self._reports[-1].reason))
                return None
            return self._filed(key, lowered)

    def _filed(self, key: Any, lowered: Lowered | None) -> Lowered | None:
        """Put a graph before the others that are tried for such calls."""
        if lowered is not None:
            others = (each for each in self._graphs.get(key, ()) if each is not lowered)
            self._graphs[key] = (lowered, *others)
        return lowered

    def _prepared(self, inputs: Inputs, named: dict[str, Any], free: set[tuple[int, int]]) -> Lowered | None:
        """A graph with these sizes free, or, where that cannot be captured, with none."""
        self._watched = self._watched or Watched(self._model)
        choices: list[Any] = [self.dynamic]
        if free and self.dynamic is None:
            specs = dynamic_shapes(named, free)
            choices = [specs, None]
        for dynamic in choices:
            title = text_of(named, free if dynamic is not None else set())
            try:
                with torch.no_grad(), torch.random.fork_rng(devices=[]):
                    lowered, report = prepare(
                        self._model, inputs, dynamic, self.options, title, self._evict, self._has_changed
                    )
            except Exception as error:  # the model can still run, and whoever reads the report can tell us
                reason = f"{type(error).__name__} while its graph was made, please report this: {error}"
                lowered, report = None, GraphReport(title, reason=reason)
            self._evict()
            trim()
            self._reports.append(report)
            if lowered is not None or not str(report.reason).startswith(UNCAPTURED):
                return lowered
        return None

    def _reason_for_eager(self, inputs: Inputs) -> str | None:
        """Why the model itself is to run, whatever graphs there are; empty where that is as it should be."""
        if (
            torch.compiler.is_compiling()
            or is_transforming()
            or has_any_global_hook()
            or any(map(has_own_kernels, (*inputs.args, *inputs.kwargs.values())))
        ):
            return cannot_tell()
        if self._model.training:
            self._trains = True
            return "it is in training mode; call .eval()"
        if self._watched is None:  # nobody has seen yet if there are others, such as those of an adapter
            self._parameters = list(self._model.parameters())
        if torch.is_grad_enabled() and (
            any(p.requires_grad for p in self._parameters)
            or requires_grad((inputs.args, dict(inputs.kwargs)))
        ):
            self._trains = True
            return "gradients are recorded; call it under torch.no_grad() or torch.inference_mode()"
        device = self._parameters[0].device.type if self._parameters else "cpu"
        if device not in ("cpu", "cuda"):
            return ""
        if torch.is_autocast_enabled(device):
            return "autocast is on; choose the precision when you optimize"
        if self._forgotten >= _MOST_FORGOTTEN:
            return (
                f"its weights, modules or options have changed {_MOST_FORGOTTEN} times since it was optimized"
            )
        self._asked += 1
        if self._vain and not self._graphs and self._asked % _EVERY and plain_signature(inputs) in self._vain:
            return ""  # other calls may get a graph, which has to be of the model as it is watched
        if self._has_changed():
            if swapped(self._model):
                return ""
            self.forget()
            return self._reason_for_eager(inputs)  # of the parameters that it has now
        self._trains = False
        return None

    def _has_changed(self) -> bool:
        watched = self._watched
        return watched is not None and (watched.changed() or (self._trains and watched.trained()))

    def _warn(self, reason: str) -> None:
        if reason and reason not in self._warned:
            self._warned.add(reason)
            warnings.warn(f"the model itself runs: {reason}", stacklevel=5)
