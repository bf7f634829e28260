"""The graphs of one optimized model: which one serves a call, and when another one is made."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.optim.optimizer import register_optimizer_step_post_hook

from fxopt.capture.patches.interception import lock
from fxopt.compare import epsilon, norm_error, unlike
from fxopt.engines import TORCH
from fxopt.errors import FallbackWarning, GuardError, error_text, warn
from fxopt.optimizing.inputs import (
    Inputs,
    Kind,
    Sizes,
    has_own_kernels,
    sizes_of,
    structure_of,
    written_back,
)
from fxopt.optimizing.lowering import Lowered
from fxopt.optimizing.prepare import LATER, Options, prepare
from fxopt.optimizing.progress import progress
from fxopt.optimizing.report import GraphReport, Report
from fxopt.optimizing.watching import LeftByCalls, State
from fxopt.torch_internals import cannot_tell, has_any_global_hook, is_transforming

_MOST_FAILURES = (
    2  # graphs of one structure that were refused, were dropped, or fix a size that was to be free
)
_MOST_REFUSALS = (
    16  # captures of one structure that gave no graph, those that the model itself refused included
)
_MOST_FIRST_CALLS = 3  # refused captures that a later call repeats, because a first call may set up the model
_MOST_STRUCTURES = 64  # structures of inputs that are remembered
_MOST_NUMBERS = 4  # values of one input that is a number; each needs a graph of its own
_MOST_CHANGES = 4  # changes of the model after which a new graph must pay (`_waits`)
_MOST_RESTARTS = 2  # times that all graphs are made anew because the forward assigns less than before
_DEVICES = ("cpu", "cuda")  # that graphs run on
_LAUNCHING = ("cuda",)  # devices that still compute when a call returns

_OWN_KERNELS = "an input is a tensor of another class or layout, such as a nested or sparse one, which graphs do not take"
_CHANGED = "the model was changed while its graph was made"
_NOT_ASSIGNED = "the forward no longer assigns an attribute that it assigned earlier, perhaps a cache"
_WAITING = "it gets a new graph once calls since the last change have taken as long as making one"
_ALL = weakref.WeakSet["Graphs"]()


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
    """A call that asks for a graph.

    Attributes:
        inputs: its arguments.
        named: the arguments by the names of the method's parameters.
        structure: what calls have in common that share a graph with free sizes.
        sizes: the sizes of the tensors.
    """

    inputs: Inputs
    named: dict[str, Any]
    structure: Any
    sizes: Sizes

    @property
    def signature(self) -> tuple[Any, Sizes]:
        """Describe the calls that one graph with fixed sizes serves."""
        return self.structure, self.sizes


@dataclasses.dataclass(eq=False)
class _Structure:
    """The calls of one structure for which a graph was asked.

    Attributes:
        sizes: the sizes of the tensors of all these calls.
        failures: a reason for each graph that was refused, was dropped, or fixes a size that was to be free.
        refusals: the number of captures that gave no graph, those that the model itself refused included.
    """

    sizes: Sizes = frozenset()
    failures: list[str] = dataclasses.field(default_factory=list)
    refusals: int = 0


@dataclasses.dataclass(eq=False)
class _Graph:
    """A graph in use.

    Attributes:
        sizes: the sizes of the inputs that the graph was made for.
        kinds: the kinds of calls that try the graph.
        used: the number of the last call; later calls have larger numbers.
        asked_late: the state to check after the call instead of before, so that a GPU computes meanwhile; None to check before.
        left: for which values, left by earlier calls in the attributes that the graph assigns, the graph is right.
    """

    lowered: Lowered
    report: GraphReport
    structure: _Structure
    sizes: Sizes
    kinds: dict[Kind, None]
    used: int
    asked_late: State | None
    left: LeftByCalls

    def computed(self, inputs: Inputs) -> Any:
        """Compute the outputs; the graph is right for the values that the run leaves in attributes."""
        value = self.lowered(*inputs.args, **inputs.kwargs)
        self.left.note(self.left.kinds(), True)
        return value

    @property
    def can_be_tried(self) -> bool:
        """Tell whether a run writes nothing but the attributes that it assigns."""
        return len({*(self.report.assigned or ())}) == len(self.left.places)

    def tried(self, inputs: Inputs, exact: bool) -> Callable[[Any], None]:
        """Compute the outputs for copies of the inputs.

        Returns:
            A function that takes the outputs of the model, and notes whether the graph is right for what earlier calls left.
        """
        kinds = self.left.kinds()
        found = inputs.call(self.lowered.function)

        def compared(value: Any) -> None:
            expected = value, self.left.values()
            limit = max(1e-4, 8 * epsilon(expected)) if exact else 0.02
            self.left.note(kinds, not unlike(expected, found) and norm_error(expected, found) < limit)

        return compared


@dataclasses.dataclass(eq=False)
class _Cache:
    """The graphs for one state of the model.

    Attributes:
        used: the number of the last call that found the model in this state; later calls have larger numbers.
        waited: the seconds of calls without a graph, since this cache or its last graph was made.
        graphs: the graphs, in the order in which calls try them.
        structures: the calls so far, by the structure of their inputs.
        without_graph: the signatures of calls that run the model for good.
        numbers: the values so far of each input that is a number.
        assigned: the attributes that every graph assigns; None before the first graph.
        refused: the reports of graphs that are not used.
        changes: whether the model's own forward changed the model in the last call.
    """

    state: State
    used: int
    waited: float = 0.0
    graphs: tuple[_Graph, ...] = ()
    structures: dict[Any, _Structure] = dataclasses.field(default_factory=dict)
    without_graph: set[Any] = dataclasses.field(default_factory=set)
    numbers: dict[Any, set[Any]] = dataclasses.field(default_factory=dict)
    assigned: set[tuple[str, str]] | None = None
    refused: list[GraphReport] = dataclasses.field(default_factory=list)
    changes: bool = False

    def note_run(self, model: nn.Module) -> None:
        """Take over the state that the model's own forward left; once the forward changes nothing, the model may get a graph."""
        if not self.state.holds():
            self.state, self.changes = State(model, self.state.places), True
        elif self.changes:
            self.without_graph, self.changes = set(), False

    def graphs_for(self, inputs: Inputs) -> list[_Graph]:
        """The graphs that calls of this kind try."""
        kind = inputs.kind
        return [graph for graph in self.graphs if kind in graph.kinds]


class Graphs:
    """Computes methods of a model by graphs, and makes a graph where none fits.

    The first graph for a structure of inputs (their names, containers and constants) has the sizes of the first call.
    If a later call has other sizes, the next graph leaves the sizes free that differ. If there are more than `max_graphs`
    graphs, the least recently used one is dropped.

    Args:
        model: the model.
        options: what `optimize` was asked for.
    """

    def __init__(self, model: nn.Module, options: Options) -> None:
        self._model, self.options = model, options
        self.called: dict[str, None] = {}  # methods other than forward that calls used without graphs
        self._warned: dict[str, None] = {}
        self._uses = itertools.count(1)
        self.refresh()
        _ALL.add(self)

    def refresh(self) -> None:
        """Drop all graphs."""
        with lock:
            self.caches: tuple[_Cache, ...] = ()  # one for each state
            self._changes = self._restarts = 0
            self._changed = self._restless = (
                ""  # the last change of the model; why its changes leave it without a graph
            )
            self._cost = 0.0  # the seconds that it took to make the last graph
            # Optimized submodules that are called by themselves, by the ids of the submodules.
            self.parts: dict[int, Any] = {}

    def made(self) -> list[tuple[tuple[int, tuple[str, ...], tuple[int, ...]], GraphModule]]:
        """The graphs of forward for the present state of the model, in the order of trying, each with a kind of call."""
        graphs = (graph for cache in self.caches if cache.state.holds() for graph in cache.graphs)
        return [
            (kind[1:], graph.lowered.with_weights())
            for graph in graphs
            for kind in graph.kinds
            if kind.method == "forward"
        ]

    @property
    def report(self) -> Report:
        """The report of each graph, and the reasons why calls run the model."""
        own = [[*(graph.report for graph in cache.graphs), *cache.refused] for cache in self.caches]
        report = Report(itertools.chain(*own, *(part.report for part in self.parts.values())))
        report.called, report.fallbacks = tuple(self.called), tuple(self._warned)
        return report

    def run(self, inputs: Inputs) -> Any:
        """Compute the method by a graph for these inputs, else by the model's own method."""
        given, mappings = inputs.with_dicts()
        obstacle = self._obstacle(given)
        self._warn(inputs, obstacle)
        try:
            after: list[Callable[[Any], object]] = []
            for graph in self._candidates(given, after) if obstacle is None else ():
                with contextlib.suppress(GuardError):
                    holds = graph.left.holds()
                    if holds is None and graph.can_be_tried:
                        after.append(graph.tried(given, self.options.precision == "float32"))
                        break
                    if not holds:
                        continue
                    value = graph.computed(given)
                    if graph.asked_late and not graph.asked_late.holds():
                        continue  # the outputs are those of earlier weights
                    graph.used = next(self._uses)
                    return written_back(value, mappings)
            called = self._latest() if obstacle is None else None
            # A forward that sets up the model at its first call gets a graph at its second call.
            settled = self._changes and called and not called.graphs and (after or called.state.holds())
            start = time.perf_counter() if called else 0.0  # torch.compile cannot trace `perf_counter`
            value = getattr(self._model, inputs.method)(*inputs.args, **inputs.kwargs)
            if called:
                called.waited += time.perf_counter() - start
                if settled:
                    called.note_run(self._model)
            for note in after:  # only here: if the model itself refuses the inputs, no graph has failed
                note(value)
            return value
        finally:
            for cache in self.caches:
                cache.state.note_left()

    def make(self, inputs: Inputs) -> Lowered | None:
        """Make a graph for some inputs ahead of a call."""
        with lock:
            after: list[Callable[[Any], object]] = []
            made = next((graph.lowered for graph in self._candidates(inputs, after)), None)
            for note in after:
                note(None)
            return made

    def _candidates(self, inputs: Inputs, after: list[Callable[[Any], object]]) -> Iterator[_Graph]:
        """Yield the graphs that may take these inputs, and then one that is made for them.

        Graphs whose state is checked after the call come first.

        Args:
            after: takes functions to call with the outputs of the model's own method, if that runs.
        """
        if any(map(has_own_kernels, inputs.tensors())):
            self._warn(inputs, _OWN_KERNELS)
            return
        last = self._latest()
        yield from (graph for graph in last.graphs_for(inputs) if graph.asked_late) if last else ()
        cache = self._valid_cache()
        known = cache.graphs_for(inputs) if cache else []
        yield from known
        plain, without = inputs.plain_signature(), cache.without_graph if cache else set()
        if plain in without:
            return
        if (device := self._device()) not in _DEVICES:
            if device != "meta":  # where only shapes are computed
                self._warn(inputs, f"there are graphs for the CPU and CUDA, and the model is on {device}")
            return
        if not all(isinstance(each, nn.Parameter) for each in self._model.parameters()):
            return  # a caller such as `torch.func.functional_call` replaces them for this call
        try:
            named = inputs.named(getattr(self._model, inputs.method))
            structure = inputs.method, inputs.kind.images, structure_of(named)
            call = _Call(inputs, named, structure, sizes_of(named))
        except Exception as error:  # the model may know what to do with these inputs
            reason = f"its inputs cannot be described ({error_text(error)})"
            after.append(lambda _: self._warn(inputs, reason))
            return
        if call.signature in without or not lock.acquire(blocking=self.options.wait):
            return
        try:  # another thread may have made a graph meanwhile
            cache = self._valid_cache() or self._new_cache()
            made = [graph for graph in cache.graphs_for(inputs) if graph not in known]
            if not made:
                waits = self._waits(cache)
                graph = self._make(cache, call, after)
                if graph is not None:
                    made = [graph]
                elif not waits and len(cache.without_graph) < _MOST_STRUCTURES:
                    cache.without_graph |= {call.signature, plain} - {None}
        finally:
            lock.release()
        yield from made

    def _make(
        self, cache: _Cache, call: _Call, after: list[Callable[[Any], object]], again: bool = True
    ) -> _Graph | None:
        """Make a graph for a call that no graph fits; None if the model itself is to run. The caller holds the lock."""
        full = len(cache.structures) >= _MOST_STRUCTURES and call.structure not in cache.structures
        if self._number_varies(cache, call) or full:
            return None
        structure = cache.structures.setdefault(call.structure, _Structure())
        for graph in cache.graphs:
            same = graph.structure is structure and graph.sizes == call.sizes
            if same and graph.left.holds() is not False:  # the call gives other inputs by keyword
                graph.kinds[call.inputs.kind] = None
                return graph
        if structure.refusals >= _MOST_REFUSALS:
            return None
        if len(structure.failures) >= _MOST_FAILURES:
            self._warn(call.inputs, structure.failures[-1])
            return None
        if again and self._waits(cache):
            self._restless = self._restless or f"the model changes often, last in {self._changed}: {_WAITING}"
            self._warn(call.inputs, self._restless)
            return None
        return self._prepare(cache, structure, call, after, again)

    def _prepare(
        self,
        cache: _Cache,
        structure: _Structure,
        call: _Call,
        after: list[Callable[[Any], object]],
        again: bool,
    ) -> _Graph | None:
        """Prepare a graph, and add it to the cache; None if it is refused. `after` takes what notes that the model runs instead."""
        free = {place for place, _ in structure.sizes - call.sizes}
        # The second state counts all attributes, for a forward that no longer assigns what it assigned before.
        states = [cache.state, *([State(self._model)] if cache.assigned else ())]
        with progress(f"optimize {type(self._model).__name__}", self.options.progress) as enter:
            lowered, report = prepare(self._model, call.inputs, call.named, free, self.options, states, enter)
        self._cost, cache.waited = report.seconds, 0.0
        disagreement = self._disagreement(cache, report)
        if disagreement == _NOT_ASSIGNED:
            cache = self._new_cache(states[-1])
            cache.structures[call.structure] = structure
            disagreement = self._disagreement(cache, report)
        # The first run may change the model: models of transformers add hooks then.
        if again and disagreement == _CHANGED:
            return self._make(self._new_cache(), call, after, again=False)
        reason = report.reason or disagreement
        cache.refused = [
            each for each in cache.refused if each.inputs != report.inputs or LATER not in str(each.reason)
        ]
        if lowered is None or reason:
            structure.refusals += 1
            report = dataclasses.replace(report, reason=reason)
            after.append(lambda _: self._refuse(cache, structure, call, report))
            return None
        structure.sizes |= call.sizes
        self._note_limits(call.inputs, structure, report)
        asked_late = cache.state if _is_launched(lowered, report, call.inputs) else None
        left, kinds = LeftByCalls(lowered.assigned), {call.inputs.kind: None}
        made = _Graph(lowered, report, structure, call.sizes, kinds, next(self._uses), asked_late, left)
        cache.graphs = (made, *cache.graphs)
        self._drop_unused()
        return made

    def _refuse(self, cache: _Cache, structure: _Structure, call: _Call, report: GraphReport) -> None:
        """Note that a graph is refused for a call that the model itself takes."""
        reason = str(report.reason)
        structure.sizes |= call.sizes
        if LATER in reason and structure.refusals <= _MOST_FIRST_CALLS:
            cache.without_graph -= {call.signature, call.inputs.plain_signature()}
        else:
            structure.failures.append(reason)
        cache.refused.append(report)
        self._warn(call.inputs, reason)

    def _waits(self, cache: _Cache) -> bool:
        """Tell whether the model changes often, and a new graph does not pay: calls since took less time than making a graph."""
        return self._changes > _MOST_CHANGES and cache.waited < self._cost

    def _note_limits(self, inputs: Inputs, structure: _Structure, report: GraphReport) -> None:
        """Note what the caller asked for and the graph does not do: free sizes, the precision, the engine."""
        if report.fixed:
            structure.failures.append(
                f"each graph for its inputs is valid for one size only, {report.fixed}. Pad the inputs to a few sizes, and optimize the model once "
                "for each"
            )
        engine = self.options.engine
        self._warn(inputs, report.unused, "computes in its own precision")
        self._warn(inputs, report.engines.get(engine), f"is computed by torch, not by {engine}")

    def _number_varies(self, cache: _Cache, call: _Call) -> bool:
        """Tell whether an input is a number with many values so far: a graph holds for one value."""
        for name, value in call.named.items():
            if type(value) in (int, float):
                seen = cache.numbers.setdefault((call.inputs.method, name), set())
                if len(seen | {value}) > _MOST_NUMBERS:
                    reason = f"the number {name!r} differs from call to call: pass it as a tensor"
                    self._warn(call.inputs, reason)
                    return True
                seen.add(value)
        return False

    def _disagreement(self, cache: _Cache, report: GraphReport) -> str:
        """Note what the forward assigns, or return why its graph cannot be used beside the graphs for other inputs.

        Graphs for other inputs may read an attribute that the forward assigns for these inputs alone.
        """
        if report.assigned is None:  # there is no graph
            return ""
        if cache.assigned is None:
            cache.assigned = {*report.assigned}
            cache.state.forgive(self._model, cache.assigned)
        cache.state.note_left()
        others = cache.assigned ^ {*report.assigned}
        if others and others <= cache.assigned and self._restarts < _MOST_RESTARTS:
            self._restarts += 1
            return _NOT_ASSIGNED
        if others:
            names = ", ".join(sorted({f"{path}.{name}".lstrip(".") for path, name in others}))
            return f"the forward assigns {names} for some inputs and not for others"
        return "" if cache.state.holds() else _CHANGED

    def _drop_unused(self) -> None:
        """Drop the least recently used graphs if there are too many."""
        graphs = sorted(
            (each for cache in self.caches for each in cache.graphs), key=lambda graph: graph.used
        )
        dropped = graphs[: -self.options.max_graphs]
        for graph in dropped:
            graph.structure.failures.append(
                f"graphs for its inputs were dropped for newer ones, because more than {self.options.max_graphs} kinds of inputs are in "
                "use: pass a larger max_graphs to optimize"
            )
        for cache in self.caches:
            cache.graphs = tuple(graph for graph in cache.graphs if graph not in dropped)

    def _obstacle(self, inputs: Inputs) -> str | None:
        """The reason to run the model itself, whatever graphs there are; empty if no warning is due, None if a graph may run."""
        if torch.compiler.is_compiling() or is_transforming() or has_any_global_hook():
            return cannot_tell()
        if self._model.training:
            return "it is in training mode; call .eval()"
        if _is_collecting():
            return "an outer model collects the outputs of its layers, by hooks that no graph runs"
        tensors = itertools.chain(self._model.parameters(), inputs.tensors())
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return "gradients are recorded; call it under torch.no_grad() or torch.inference_mode()"
        autocast = [device for device in _DEVICES if torch.is_autocast_enabled(device)]
        if autocast and self._device() in autocast:
            return "autocast is on; choose the precision when you optimize"
        return None

    def _device(self) -> str:
        return next((each.device.type for each in self._model.parameters()), "cpu")

    def _latest(self) -> _Cache | None:
        return max(self.caches, key=lambda cache: cache.used, default=None)

    def _valid_cache(self) -> _Cache | None:
        """The graphs for the present state of the model; None if there are none yet."""
        for cache in sorted(self.caches, key=lambda cache: -cache.used):
            if cache.state.holds():
                cache.used = next(self._uses)
                return cache
        return None

    def _new_cache(self, state: State | None = None) -> _Cache:
        """Add a cache for a state, by default the present one. The caller holds the lock."""
        last = self._latest()
        if last:
            self._changes, self._changed = self._changes + 1, last.state.changed
        state = state or State(self._model, {place for cache in self.caches for place in cache.state.places})
        live = sorted((b for b in self.caches if not b.state.is_gone()), key=lambda cache: -cache.used)
        made = _Cache(state, next(self._uses))
        self.caches = (made, *live)[: self.options.max_graphs]
        return made

    def _warn(self, inputs: Inputs, reason: str | None, consequence: str = "falls back to eager") -> None:
        if reason and reason not in self._warned:
            self._warned[reason] = None
            warn(f"{type(self._model).__name__}.{inputs.method} {consequence}: {reason}", FallbackWarning)


def _is_launched(lowered: Lowered, report: GraphReport, inputs: Inputs) -> bool:
    """Tell whether a call returns before its outputs are computed, and writes neither attributes nor objects such as caches."""
    launched = report.engine != TORCH and lowered.traced.device.type in _LAUNCHING
    return launched and not lowered.assigned and inputs.plain_signature() is not None


def _is_collecting() -> bool:
    """Tell whether an outer model of transformers collects outputs of layers, such as hidden states."""
    collector = getattr(sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None)
    return collector is not None and bool(collector.get())


def _after_step(optimizer: Any, *_: Any) -> None:
    """Drop graphs, because fused optimizers write into parameters without counting up their versions."""
    written = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for graphs in list(_ALL):
        graphs.caches = tuple(b for b in graphs.caches if written.isdisjoint(map(id, b.state.parameters)))


register_optimizer_step_post_hook(_after_step)
