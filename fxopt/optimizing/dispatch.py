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

# How many graphs for one structure may be refused, dropped, or hold for one size that was to be free.
_MOST_FAILURES = 2
_MOST_REFUSALS = 16  # how many captures of one structure may give no graph: the model refuses some inputs
_MOST_FIRST_CALLS = 3  # how many of these are tried again, as the model may have been set up meanwhile
_MOST_STRUCTURES = 64  # how many to keep in mind
_MOST_NUMBERS = 4  # how many values of one number may have a graph
_RESTLESS = 4  # after so many changes of the model, a graph is made when calls without one have taken as long as making one
_MOST_KEPT = 2  # how often graphs begin anew since a forward assigns no more what it assigned before
_DEVICES = ("cpu", "cuda")  # for which there are graphs
_LAUNCHING = ("cuda",)  # devices that compute while Python goes on

_OWN_KERNELS = "an input is a tensor of another class or layout, such as a nested or sparse one, which graphs do not take"
_CHANGED = "the model was changed while its graph was made"
_KEPT = "the forward assigns no more what it assigned before: perhaps it keeps that"
_WAITING = "it gets a graph when its calls since a change have taken as long as making a graph"
_ALL = weakref.WeakSet["Graphs"]()


@dataclasses.dataclass(eq=False)
class _Structure:
    """The calls of one structure for which a graph was asked.

    Attributes:
        sizes: all sizes of the tensors of these calls.
        failures: why graphs were refused, dropped, or hold for one size alone.
        refusals: how many captures gave no graph, those of calls that the model itself refuses included.
    """

    sizes: Sizes = frozenset()
    failures: list[str] = dataclasses.field(default_factory=list)
    refusals: int = 0


@dataclasses.dataclass(eq=False)
class _Graph:
    """A graph in use.

    Attributes:
        sizes: those that it was made for.
        kinds: the kinds of calls for which it is tried.
        used: when it was called last, as a number that grows.
        asked_late: the state that must hold after a call: a GPU computes while that is asked. None where it is asked before.
        left: for what calls leave in the attributes that it assigns, whether it holds.
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
        """The outputs; what the run leaves in attributes is known from then on."""
        value = self.lowered(*inputs.args, **inputs.kwargs)
        self.left.note(self.left.kinds(), True)
        return value

    @property
    def can_be_tried(self) -> bool:
        """Tell whether a run writes nothing but the attributes that it assigns."""
        return len({*(self.report.assigned or ())}) == len(self.left.places)

    def tried(self, inputs: Inputs, exact: bool) -> Callable[[Any], None]:
        """Compute the outputs for copies; returns what compares them with those of the model, and notes whether the graph holds."""
        kinds = self.left.kinds()
        found = inputs.call(self.lowered.function)

        def compared(value: Any) -> None:
            expected = value, self.left.values()
            limit = max(1e-4, 8 * epsilon(expected)) if exact else 0.02
            self.left.note(kinds, not unlike(expected, found) and norm_error(expected, found) < limit)

        return compared


@dataclasses.dataclass(eq=False)
class _Book:
    """The graphs for one state of the model.

    Attributes:
        used: when a call found this state last, as a number that grows.
        waited: the seconds of calls without a graph, since the book was opened or a graph was made.
        graphs: in the order in which they are tried.
        structures: what is known of each structure.
        without_graph: calls for which there is no graph, and will be none.
        numbers: the values of each input that is a number.
        assigned: the attributes that each graph assigns; None before the first.
        refused: the reports of graphs that are not used.
        changes: whether the last forward of the model itself changed the model.
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
        """Take the state that a forward without a graph left for that of the model; one that no longer changes it may get a graph."""
        if not self.state.holds():
            self.state, self.changes = State(model, self.state.places), True
        elif self.changes:
            self.without_graph, self.changes = set(), False

    def taking(self, inputs: Inputs) -> list[_Graph]:
        """The graphs for calls of this kind."""
        kind = inputs.kind
        return [graph for graph in self.graphs if kind in graph.kinds]


class Graphs:
    """Computes methods of a model by graphs, and makes one where none fits.

    The first graph for a structure of inputs (their names, containers and constants) has the sizes of the first call.
    Where a later call has other sizes, those that differ are free in the next graph. Where there are more than `max_graphs`,
    the graph that was called longest ago goes.

    Args:
        model: the model.
        options: what `optimize` was asked for.
    """

    def __init__(self, model: nn.Module, options: Options) -> None:
        self._model, self.options = model, options
        self.called: dict[str, None] = {}  # methods that were called, and not optimized
        self._warned: dict[str, None] = {}
        self._uses = itertools.count(1)
        self.refresh()
        _ALL.add(self)

    def refresh(self) -> None:
        """Drop all graphs."""
        with lock:
            self.books: tuple[_Book, ...] = ()  # one for each state
            self._changes = self._kept = 0
            self._changed = self._restless = ""  # what the last change was; the reason why no graph is made
            self._cost = 0.0  # the seconds that the last graph took to make
            # Optimized parts of the module that are called by themselves, by the ids of what they stand for.
            self.parts: dict[int, Any] = {}

    def made(self) -> list[tuple[tuple[int, tuple[str, ...], tuple[int, ...]], GraphModule]]:
        """The graphs of the forward for the model as it is, in the order of trying, each with a kind of call that it takes."""
        graphs = (graph for book in self.books if book.state.holds() for graph in book.graphs)
        return [
            (kind[1:], graph.lowered.with_weights())
            for graph in graphs
            for kind in graph.kinds
            if kind.method == "forward"
        ]

    @property
    def report(self) -> Report:
        """The graphs that there are, and why there is none."""
        own = [[*(graph.report for graph in book.graphs), *book.refused] for book in self.books]
        report = Report(itertools.chain(*own, *(part.report for part in self.parts.values())))
        report.called, report.fallbacks = tuple(self.called), tuple(self._warned)
        return report

    def run(self, inputs: Inputs) -> Any:
        """Compute the method: by a graph where there is one for these inputs, else by the model's own."""
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
                        continue  # these outputs are those of weights that the model had
                    graph.used = next(self._uses)
                    return written_back(value, mappings)
            called = self._last() if obstacle is None else None
            # A forward that sets something up at its first call gets a graph at its second one.
            settled = self._changes and called and not called.graphs and (after or called.state.holds())
            start = time.perf_counter() if called else 0.0  # torch.compile cannot trace it
            value = getattr(self._model, inputs.method)(*inputs.args, **inputs.kwargs)
            if called:
                called.waited += time.perf_counter() - start
                if settled:
                    called.note_run(self._model)
            for note in after:  # what the model itself refuses is no failure of a graph
                note(value)
            return value
        finally:
            for book in self.books:
                book.state.note_left()

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

        First come the graphs of the last call that are asked late, after their run, whether the model is as it was.

        Args:
            after: takes what is called with the outputs of the model where it runs.
        """
        if any(map(has_own_kernels, inputs.tensors())):
            self._warn(inputs, _OWN_KERNELS)
            return
        last = self._last()
        yield from (graph for graph in last.taking(inputs) if graph.asked_late) if last else ()
        book = self._found()
        known = book.taking(inputs) if book else []
        yield from known
        plain, without = inputs.plain_signature(), book.without_graph if book else set()
        if plain in without:
            return
        if (device := self._device()) not in _DEVICES:
            if device != "meta":  # where only shapes are computed
                self._warn(inputs, f"there are graphs for the CPU and CUDA, and the model is on {device}")
            return
        if not all(isinstance(each, nn.Parameter) for each in self._model.parameters()):
            return  # others are put in for the time being, as by `torch.func.functional_call`
        try:
            named = inputs.named(getattr(self._model, inputs.method))
            sizes, key = sizes_of(named), (inputs.method, inputs.kind.images, structure_of(named))
        except Exception as error:  # whatever objects the inputs are, the model may know what to do with them
            reason = f"its inputs cannot be described ({error_text(error)})"
            after.append(lambda _: self._warn(inputs, reason))
            return
        if (key, sizes) in without or not lock.acquire(blocking=self.options.wait):
            return
        try:  # perhaps another thread has made one meanwhile
            book = self._found() or self._opened()
            made = [graph for graph in book.taking(inputs) if graph not in known]
            if not made:
                waits = self._waits(book)
                graph = self._make(book, inputs, named, key, sizes, after)
                if graph is not None:
                    made = [graph]
                elif not waits and len(book.without_graph) < _MOST_STRUCTURES:
                    book.without_graph |= {(key, sizes), plain} - {None}
        finally:
            lock.release()
        yield from made

    def _make(
        self,
        book: _Book,
        inputs: Inputs,
        named: dict[str, Any],
        key: Any,
        sizes: Sizes,
        after: list[Callable[[Any], object]],
        again: bool = True,
    ) -> _Graph | None:
        """Make a graph for inputs that no graph fits; None where the model itself is to run. The lock is held."""
        full = len(book.structures) >= _MOST_STRUCTURES and key not in book.structures
        if self._varies(book, inputs, named) or full:
            return None
        structure = book.structures.setdefault(key, _Structure())
        for graph in book.graphs:
            same = graph.structure is structure and graph.sizes == sizes
            if same and graph.left.holds() is not False:  # for keywords instead of positions
                graph.kinds[inputs.kind] = None
                return graph
        if structure.refusals >= _MOST_REFUSALS:
            return None
        if len(structure.failures) >= _MOST_FAILURES:
            self._warn(inputs, structure.failures[-1])
            return None
        if again and self._waits(book):
            self._restless = self._restless or f"the model changes often, last in {self._changed}: {_WAITING}"
            self._warn(inputs, self._restless)
            return None
        free = {place for place, _ in structure.sizes - sizes}
        # Perhaps the forward assigns no more what it has assigned: the state without that is the one before its graph is made.
        states = [book.state, *([State(self._model)] if book.assigned else ())]
        with progress(f"optimize {type(self._model).__name__}", self.options.progress) as enter:
            lowered, report = prepare(self._model, inputs, named, free, self.options, states, enter)
        self._cost, book.waited = report.seconds, 0.0
        disagreement = self._disagreement(book, report)
        if disagreement == _KEPT:
            book = self._opened(states[-1])
            book.structures[key] = structure
            disagreement = self._disagreement(book, report)
        # Perhaps by its first run: models of transformers add hooks then.
        if again and disagreement == _CHANGED:
            return self._make(self._opened(), inputs, named, key, sizes, after, again=False)
        reason = report.reason or disagreement
        book.refused = [
            each for each in book.refused if each.inputs != report.inputs or LATER not in str(each.reason)
        ]
        if lowered is None or reason:

            def refuse(_: Any) -> None:
                structure.sizes |= sizes
                if LATER in reason and structure.refusals <= _MOST_FIRST_CALLS:
                    book.without_graph -= {(key, sizes), inputs.plain_signature()}
                else:
                    structure.failures.append(reason)
                book.refused.append(dataclasses.replace(report, reason=reason))
                self._warn(inputs, reason)

            structure.refusals += 1
            after.append(refuse)
            return None
        structure.sizes |= sizes
        self._note_limits(inputs, structure, report)
        asked_late = book.state if _is_launched(lowered, report, inputs) else None
        left, kinds = LeftByCalls(lowered.assigned), {inputs.kind: None}
        made = _Graph(lowered, report, structure, sizes, kinds, next(self._uses), asked_late, left)
        book.graphs = (made, *book.graphs)
        self._drop_unused()
        return made

    def _waits(self, book: _Book) -> bool:
        """Tell whether the model changes often, and calls since the last change have taken less time than making a graph."""
        return self._changes > _RESTLESS and book.waited < self._cost

    def _note_limits(self, inputs: Inputs, structure: _Structure, report: GraphReport) -> None:
        """Note what a graph does not do that was asked for: free sizes, the precision, the engine."""
        if report.fixed:
            structure.failures.append(
                f"each graph for its inputs holds for one size, {report.fixed}: pad the inputs to a few sizes, and optimize the model once "
                "for each"
            )
        engine = self.options.engine
        self._warn(inputs, report.unused, "computes in its own precision")
        self._warn(inputs, report.engines.get(engine), f"is computed by torch, not by {engine}")

    def _varies(self, book: _Book, inputs: Inputs, named: dict[str, Any]) -> bool:
        """Tell whether an input is a number that has had many values, of which a graph holds one."""
        for name, value in named.items():
            if type(value) in (int, float):
                seen = book.numbers.setdefault((inputs.method, name), set())
                if len(seen | {value}) > _MOST_NUMBERS:
                    self._warn(
                        inputs, f"the number {name!r} is another one from call to call: give it as a tensor"
                    )
                    return True
                seen.add(value)
        return False

    def _disagreement(self, book: _Book, report: GraphReport) -> str:
        """Note what the forward assigns; or say what it assigns for these inputs alone: graphs for others may read it."""
        if report.assigned is None:  # there is no graph
            return ""
        if book.assigned is None:
            book.assigned = {*report.assigned}
            book.state.forgive(self._model, book.assigned)
        book.state.note_left()
        others = book.assigned ^ {*report.assigned}
        if others and others <= book.assigned and self._kept < _MOST_KEPT:
            self._kept += 1
            return _KEPT
        if others:
            names = ", ".join(sorted({f"{path}.{name}".lstrip(".") for path, name in others}))
            return f"the forward assigns {names} for some inputs and not for others"
        return "" if book.state.holds() else _CHANGED

    def _drop_unused(self) -> None:
        """Drop the graphs that were not called for longest, where there are too many."""
        graphs = sorted((each for book in self.books for each in book.graphs), key=lambda graph: graph.used)
        dropped = graphs[: -self.options.max_graphs]
        for graph in dropped:
            graph.structure.failures.append(
                f"graphs for its inputs were dropped to make others: more than {self.options.max_graphs} kinds of inputs are in "
                "use, so give optimize a larger max_graphs"
            )
        for book in self.books:
            book.graphs = tuple(graph for graph in book.graphs if graph not in dropped)

    def _obstacle(self, inputs: Inputs) -> str | None:
        """The reason to run the model itself, whatever graphs there are; empty where nobody need know, None where a graph may run."""
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

    def _last(self) -> _Book | None:
        return max(self.books, key=lambda book: book.used, default=None)

    def _found(self) -> _Book | None:
        """The graphs for the model as it is; None if there are none yet."""
        for book in sorted(self.books, key=lambda book: -book.used):
            if book.state.holds():
                book.used = next(self._uses)
                return book
        return None

    def _opened(self, state: State | None = None) -> _Book:
        """A new book for the model as it is, or in a state. The lock is held."""
        last = self._last()
        if last:
            self._changes, self._changed = self._changes + 1, last.state.changed
        state = state or State(self._model, {place for book in self.books for place in book.state.places})
        live = sorted((b for b in self.books if not b.state.is_gone()), key=lambda book: -book.used)
        opened = _Book(state, next(self._uses))
        self.books = (opened, *live)[: self.options.max_graphs]
        return opened

    def _warn(self, inputs: Inputs, reason: str | None, consequence: str = "falls back to eager") -> None:
        if reason and reason not in self._warned:
            self._warned[reason] = None
            warn(f"{type(self._model).__name__}.{inputs.method} {consequence}: {reason}", FallbackWarning)


def _is_launched(lowered: Lowered, report: GraphReport, inputs: Inputs) -> bool:
    """Tell whether a call returns before its outputs are computed, and changes nothing, neither attributes nor objects such as caches."""
    launched = report.engine != TORCH and lowered.traced.device.type in _LAUNCHING
    return launched and not lowered.assigned and inputs.plain_signature() is not None


def _is_collecting() -> bool:
    """Tell whether a model of transformers, of which this may be a part, collects outputs of layers, such as hidden states."""
    collector = getattr(sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None)
    return collector is not None and bool(collector.get())


def _after_step(optimizer: Any, *_: Any) -> None:
    """Drop graphs: fused optimizers write into parameters and leave their versions as they were."""
    written = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for graphs in list(_ALL):
        graphs.books = tuple(b for b in graphs.books if written.isdisjoint(map(id, b.state.parameters)))


register_optimizer_step_post_hook(_after_step)
