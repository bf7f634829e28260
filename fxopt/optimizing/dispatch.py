"""The graphs of one optimized model: which one serves a call, and when another one is made."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.optim.optimizer import register_optimizer_step_post_hook

from fxopt.capture.patches.interception import lock
from fxopt.errors import FallbackWarning, GuardError
from fxopt.objects import tensors_in
from fxopt.optimizing.inputs import Inputs, Kind, written_back
from fxopt.optimizing.lowering import Lowered
from fxopt.optimizing.prepare import UNCAPTURED, Options, prepare
from fxopt.optimizing.report import GraphReport, Report
from fxopt.optimizing.structures import (
    Shapes,
    Signature,
    differing,
    dynamic_shapes,
    has_own_kernels,
    plain_signature,
    shapes_of,
    structure_of,
    text_of,
)
from fxopt.optimizing.watching import State
from fxopt.torch_internals import cannot_tell, has_any_global_hook, is_transforming
from fxopt.version import __version__

_MOST_FAILURES = 2  # how often to try for one structure
_MOST_FIXED = 2  # how many may hold for one size alone, though others were to be free
_MOST_DROPPED = 2  # how many graphs for one structure may be dropped
_MOST_STRUCTURES = 64  # how many to keep in mind
_MOST_NUMBERS = 4  # how many values of one number may have a graph
_RESTLESS = 4  # after as many changes of the model, a graph is made for what holds for two calls
_EVERY = 16  # in how many calls to look once at a model that changes and has no graph

_ALL = weakref.WeakSet["Graphs"]()


@dataclasses.dataclass(eq=False)
class _Graph:
    """A graph in use.

    Attributes:
        used: when it was called last, as a number that grows.
        kinds: the kinds of calls for which it is tried, as `Inputs.kind` has them.
    """

    lowered: Lowered
    report: GraphReport
    calls: _Calls
    shapes: Shapes
    used: int
    kinds: dict[Kind, None]


@dataclasses.dataclass(eq=False)
class _Calls:
    """The calls of one structure for which a graph was asked.

    Attributes:
        graphs: the graph for the shapes of each, None where there is none.
        free: the dimensions that were not the same in all of them.
        dropped: how many were dropped.
        fixed: for each graph that holds for one size alone, where the forward fixes it.
    """

    graphs: dict[Shapes, _Graph | None] = dataclasses.field(default_factory=dict)
    free: set[tuple[int, int]] = dataclasses.field(default_factory=set)
    dropped: int = 0
    fixed: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False)
class _Book:
    """The graphs for one state of the model.

    Attributes:
        graphs: in the order in which they are tried.
        calls: what is known of each structure.
        vain: calls for which there is no graph, and will be none.
        numbers: the values of each input that is a number.
        assigned: the attributes that each graph assigns; None before the first.
        settled: whether graphs may be made for this state.
        refused: the reports of graphs that are not used.
    """

    state: State
    graphs: tuple[_Graph, ...] = ()
    calls: dict[Any, _Calls] = dataclasses.field(default_factory=dict)
    vain: set[Signature] = dataclasses.field(default_factory=set)
    numbers: dict[str, set[Any]] = dataclasses.field(default_factory=dict)
    assigned: set[tuple[str, str]] | None = None
    settled: bool = True
    refused: list[GraphReport] = dataclasses.field(default_factory=list)


class Graphs:
    """Computes a model's forward by graphs, and makes one where none fits.

    The first graph for a structure of inputs (their names, containers and constants) has the sizes of the first call.
    Where a later call has other sizes, those that differ are free in the next graph. Where there are more than `max_graphs`,
    the graph that was called longest ago goes.

    Args:
        model: the model.
        options: what `optimize` was asked for.
        dynamic: the sizes that are free in every graph, as `fxopt.trace` takes them; None to go by the calls.
        method: the method of the model to compute.
    """

    def __init__(
        self, model: nn.Module, options: Options, dynamic: Any = None, method: str = "forward"
    ) -> None:
        self._model, self.options, self.dynamic, self._method = model, options, dynamic, method
        names = options.methods if method == "forward" else ()
        self.methods = {name: Graphs(model, options, None, name) for name in names}
        self.called = set[str]()  # other methods that were called
        self._warned = dict[str, None]()
        self._uses = itertools.count(1)
        self.lock = threading.RLock()
        self.refresh()
        _ALL.add(self)

    def refresh(self) -> None:
        """Drop all graphs."""
        with self.lock:
            self.books: tuple[_Book, ...] = ()  # one for each state, that of the last call first
            self._changes = 0
            # Optimized parts of the module that are called by themselves, by the ids of what they stand for.
            self.parts: dict[int, Any] = {}
        for graphs in self.methods.values():
            graphs.refresh()

    def made(self) -> list[tuple[Kind, GraphModule]]:
        """The graphs for the model as it is, in the order of trying, each with a kind of call that it takes."""
        graphs = [graph for book in self.books[:1] if book.state.holds() for graph in book.graphs]
        return [(kind, graph.lowered.with_weights()) for graph in graphs for kind in graph.kinds]

    @property
    def report(self) -> Report:
        """The graphs that there are, and why there is none."""
        own = (each for book in self.books for each in (*(g.report for g in book.graphs), *book.refused))
        others = (*self.methods.values(), *self.parts.values())
        report = Report([*own, *(each for other in others for each in other.report)])
        report.called, report.fallbacks = tuple(self.called), tuple(self._warned)
        return report

    def run(self, inputs: Inputs) -> Any:
        """Compute the method: by a graph where there is one for these inputs, else by the model's own."""
        mappings = inputs.mappings()
        given = inputs.replaced(mappings) if mappings else inputs
        try:
            for graph in self._candidates(given):
                with contextlib.suppress(GuardError):
                    value = graph.lowered(*given.args, **given.kwargs)
                    graph.used = next(self._uses)
                    return written_back(value, mappings)
            return getattr(self._model, self._method)(*inputs.args, **inputs.kwargs)
        finally:
            for book in self.books[:1]:
                book.state.note_left()

    def _candidates(self, inputs: Inputs) -> Iterator[_Graph]:
        """Yield the graphs that may take these inputs, and then one that is made for them."""
        obstacle = self._obstacle(inputs)
        book = self._book() if obstacle is None else None
        if book is None:
            self._warn(obstacle or "")
            return
        known = [graph for graph in book.graphs if inputs.kind in graph.kinds]
        yield from known
        plain = plain_signature(inputs)
        if plain in book.vain or not book.settled or not self.lock.acquire(blocking=self.options.wait):
            return
        try:  # perhaps another thread has made one meanwhile
            made = [each for each in book.graphs if inputs.kind in each.kinds and each not in known]
            made = made or [*filter(None, [self._make(book, inputs)])]
        finally:
            self.lock.release()
        if not made and plain is not None and len(book.vain) < _MOST_STRUCTURES:
            book.vain.add(plain)
        yield from made

    def make(self, inputs: Inputs) -> Lowered | None:
        """Make a graph for some inputs ahead of a call."""
        with self.lock:
            book = self._book()
            made = book and self._make(book, inputs)
        return made.lowered if made else None

    def _make(self, book: _Book, inputs: Inputs) -> _Graph | None:
        """Make a graph for inputs that no graph fits; None where the model itself is to run. The lock is held."""
        try:
            named = inputs.named(getattr(self._model, self._method))
            structure, shapes = structure_of(named), shapes_of(named)
        except Exception as error:  # whatever objects the inputs are, the model may know what to do with them
            self._warn(f"its inputs cannot be described ({type(error).__name__}: {error})")
            return None
        if any(map(has_own_kernels, tensors_in(named))) or self._varies(book, named):
            return None
        if len(book.calls) >= _MOST_STRUCTURES and structure not in book.calls:
            return None
        calls = book.calls.setdefault(structure, _Calls())
        known = calls.graphs.get(shapes)
        if known is not None:  # for keywords instead of positions
            known.kinds[inputs.kind] = None
            return known
        if shapes in calls.graphs or [*calls.graphs.values()].count(None) >= _MOST_FAILURES:
            return None
        if len(calls.fixed) >= _MOST_FIXED or calls.dropped > _MOST_DROPPED:
            self._warn(
                f"each graph for its inputs holds for one size, which the forward fixes at {calls.fixed[0]}: pad them to a few "
                "sizes, and optimize the model once for each"
                if calls.fixed[_MOST_FIXED - 1 :]
                else f"graphs for its inputs were dropped to make others: more than {self.options.max_graphs} kinds of inputs are in "
                "use, so give optimize a larger max_graphs"
            )
            return None
        for others in calls.graphs:
            calls.free |= differing(shapes, others)
        lowered, report = self._prepared(book, inputs, named, calls.free)
        calls.fixed += [*report.fixed.values()][:1]
        disagreement = self._disagreement(book, report)
        if lowered and disagreement:
            lowered, report = None, dataclasses.replace(report, reason=disagreement)
        if lowered is None:
            book.refused.append(report)
            calls.graphs[shapes] = None
            self._warn(str(report.reason))
            return None
        self._warn(report.unused or "", "computes in its own precision")
        made = calls.graphs[shapes] = _Graph(
            lowered, report, calls, shapes, next(self._uses), {inputs.kind: None}
        )
        book.graphs = (made, *book.graphs)
        self._drop_unused()
        return made

    def _varies(self, book: _Book, named: dict[str, Any]) -> bool:
        """Tell whether an input is a number that has had many values, of which a graph holds one."""
        for name, value in named.items():
            if type(value) in (int, float):
                seen = book.numbers.setdefault(name, set())
                if value not in seen and len(seen) >= _MOST_NUMBERS:
                    self._warn(
                        f"the number {name!r} is another one from call to call, and a graph holds one: give it as a tensor"
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
        others = sorted(name for _, name in book.assigned ^ {*report.assigned})
        if others:
            return f"the forward assigns {', '.join(others)} for some inputs and not for others"
        return "" if book.state.holds() else "the model was changed while its graph was made"

    def _drop_unused(self) -> None:
        """Drop the graphs that were not called for longest, where there are too many."""
        graphs = sorted((each for book in self.books for each in book.graphs), key=lambda graph: -graph.used)
        for graph in graphs[self.options.max_graphs :]:
            graph.calls.graphs.pop(graph.shapes, None)
            graph.calls.dropped += 1
        for book in self.books:
            book.graphs = tuple(each for each in book.graphs if each in graphs[: self.options.max_graphs])

    def _prepared(
        self, book: _Book, inputs: Inputs, named: dict[str, Any], free: set[tuple[int, int]]
    ) -> tuple[Lowered | None, GraphReport]:
        """A graph with these sizes free, or, where that cannot be captured, with none."""
        dynamic = dynamic_shapes(named, free) if free and self.dynamic is None else self.dynamic
        try:
            with lock, torch.no_grad():  # a fork waits for its end
                lowered, report = prepare(
                    self._model, inputs, dynamic, self.options, book.state.holds, self._method
                )
        except Exception as error:  # the model can still run, and whoever reads the report can tell us
            first = str(error).partition("\n")[0]
            reason = (
                f"{type(error).__name__} while its graph was made. Please report this with the model, torch "
                f"{torch.__version__} and fxopt {__version__}: {first}"
            )
            lowered, report = None, GraphReport(reason=reason)
        title = text_of(named, free - report.fixed.keys() if dynamic is not None else set())
        title = title if self._method == "forward" else f"{self._method}({title})"
        report = dataclasses.replace(report, inputs=title)
        if dynamic is not self.dynamic and str(report.reason).startswith(UNCAPTURED):
            book.refused.append(report)
            return self._prepared(book, inputs, named, set())
        return lowered, report

    def _obstacle(self, inputs: Inputs) -> str | None:
        """Why the model itself is to run, whatever graphs there are, empty where that is not to be said; None where it need not."""
        if (
            torch.compiler.is_compiling()
            or is_transforming()
            or has_any_global_hook()
            or any(map(has_own_kernels, (*inputs.args, *inputs.kwargs.values())))
        ):
            return cannot_tell()
        if self._model.training:
            return "it is in training mode; call .eval()"
        if torch.is_grad_enabled() and (
            any(p.requires_grad for p in self._model.parameters())
            or any(tensor.requires_grad for tensor in tensors_in((inputs.args, dict(inputs.kwargs))))
        ):
            return "gradients are recorded; call it under torch.no_grad() or torch.inference_mode()"
        device = next((each.device.type for each in self._model.parameters()), "cpu")
        if device not in ("cpu", "cuda"):
            return ""
        return (
            "autocast is on; choose the precision when you optimize"
            if torch.is_autocast_enabled(device)
            else None
        )

    def _book(self) -> _Book | None:
        """The graphs for the model as it is, perhaps none; None where it has other parameters for the time being."""
        for book in self.books:
            if book.state.holds():
                book.settled = True
                if self.books[:1] != (book,) and self.lock.acquire(blocking=False):
                    if book in self.books:  # it was not refreshed meanwhile
                        self._opened(book)
                    self.lock.release()
                return book
        if not all(isinstance(each, nn.Parameter) for each in self._model.parameters()):
            return None  # as in `torch.func.functional_call`
        resting = self._changes > _RESTLESS and not any(book.graphs for book in self.books)
        if (resting and next(self._uses) % _EVERY) or not self.lock.acquire(blocking=self.options.wait):
            return None
        try:  # perhaps another thread has opened it meanwhile
            if not (self.books and self.books[0].state.holds()):
                self._changes += bool(self.books)
                places = self.books[0].state.places if self.books else ()
                self._opened(_Book(State(self._model, places), settled=self._changes <= _RESTLESS))
            return self.books[0]
        finally:
            self.lock.release()

    def _opened(self, book: _Book) -> None:
        others = (each for each in self.books if each is not book and not each.state.is_gone())
        self.books = (book, *others)[: self.options.max_graphs]

    def _warn(self, reason: str, consequence: str = "falls back to eager") -> None:
        if reason and reason not in self._warned:
            self._warned[reason] = None
            text = f"{type(self._model).__name__}.{self._method} {consequence}: {reason}"
            level = 1
            while (frame := sys._getframe(level)).f_back and _is_ours(frame.f_globals.get("__name__", "")):
                level += 1
            warnings.warn(text, FallbackWarning, stacklevel=level + 1)


def _is_ours(module: str) -> bool:
    """Tell whether a frame lies between a call and what the caller wrote."""
    return module.partition(".")[0] in ("fxopt", "torch")


def _after_fork() -> None:
    """Threads of a process that forked do not exist in the child; the locks that they hold would stay locked."""
    for graphs in list(_ALL):
        graphs.lock = threading.RLock()


def _after_step(optimizer: Any, *_: Any) -> None:
    """Drop graphs: fused optimizers write into parameters and leave their versions as they were."""
    written = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for graphs in list(_ALL):
        graphs.books = tuple(b for b in graphs.books if written.isdisjoint(map(id, b.state.parameters)))


os.register_at_fork(after_in_child=_after_fork)
register_optimizer_step_post_hook(_after_step)
