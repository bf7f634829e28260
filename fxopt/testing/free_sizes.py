"""Calls with other sizes where a graph has dynamic sizes, as far as its guards allow."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt.capture.runtime.input_guard import InputGuard
from fxopt.capture.runtime.input_specs import NumberSpec, TensorSpec
from fxopt.capture.runtime.size_guards import SizeExpression
from fxopt.testing.observations import Call

SIZES = "other sizes"
APART = "other sizes, each by itself"
"""Sizes that may not fit each other: an eager model accepts them if it never reads one of the inputs."""


def other_sizes(given: Call, graph: nn.Module | None) -> Iterator[Call]:
    """Yield calls with other values for the dynamic sizes of a graph, as far as its guards allow.

    The first calls have sizes that differ from each other and from the example, where sizes may be equal by chance.
    """
    free = _FreeSizes(given, graph)
    sizes = sorted({free.known[symbol] for symbol in free.symbols})
    alike = [[symbol for symbol in free.symbols if free.known[symbol] == size] for size in sizes]
    ways = [
        free.apart(_smaller),
        free.apart(_larger),
        # Equal sizes stay equal, for a graph with a separate symbol for the batch of each input.
        {symbol: _smaller(free.known[symbol]) for symbol in free.symbols},
        {s: _larger(free.known[s]) + rank for rank, symbols in enumerate(alike) for s in symbols},
    ]
    tried: list[dict[str, int]] = [{}]
    for part in (free.symbols, *([symbol] for symbol in free.symbols), *alike):
        for new in ways:
            wanted = {symbol: new[symbol] for symbol in part}
            if wanted not in tried and (call := free.call(wanted)):
                yield dataclasses.replace(call, name=APART) if len(tried) <= 2 else call
            tried.append(wanted)


def batch_of_one(given: Call, graph: nn.Module | None) -> Iterator[Call]:
    """Yield the call with the first dimension of each input cut to 1, where it is dynamic, if the guards allow that."""
    free = _FreeSizes(given, graph)
    firsts = {str(expected.shape[0]) for expected, _ in free.tensors if expected.shape}
    sizes = dict.fromkeys((s for s in free.symbols if s in firsts and free.known[s] > 1), 1)
    if sizes and (call := free.call(sizes)):
        yield call


def input_guard(graph: nn.Module | None) -> InputGuard | None:
    """Find the guard of the inputs in a captured graph; None if there is none."""
    modules = graph.modules() if isinstance(graph, GraphModule) else ()
    return next((module for module in modules if isinstance(module, InputGuard)), None)


def _smaller(size: int) -> int:
    return size // 2 - 1 if size >= 6 else size + 1


def _larger(size: int) -> int:
    return size + 1


class _FreeSizes:
    """The dynamic sizes of a graph in a call: the symbols, and their values."""

    def __init__(self, given: Call, graph: nn.Module | None) -> None:
        guard = input_guard(graph)
        self._given = given
        self.tensors: list[tuple[TensorSpec, Tensor]] = []
        self.known: dict[str, int] = {}
        self.symbols: list[str] = []
        if graph is None or guard is None:
            return
        self._guard = guard
        self.tensors = _guarded_tensors(given, graph, guard)
        fixed = {str(each.value) for each in guard.inputs if isinstance(each, NumberSpec)}
        for expected, tensor in self.tensors:
            if len(expected.shape) == tensor.ndim:
                self.known |= {
                    s: n for s, n in zip(expected.shape, tensor.shape, strict=True) if isinstance(s, str)
                }
        self.symbols = [s for s, n in sorted(self.known.items()) if n and s.isidentifier() and s not in fixed]

    def apart(self, first: Callable[[int], int]) -> dict[str, int]:
        """Choose another size for each symbol, different from all known and chosen sizes."""
        taken, found = set(self.known.values()), dict[str, int]()
        for symbol in self.symbols:
            size = first(self.known[symbol])
            while size in taken:
                size += 1
            found[symbol] = size
            taken.add(size)
        return found

    def call(self, sizes: Mapping[str, int]) -> Call | None:
        """Make the call with these sizes; `None` if the guards forbid them."""
        wanted = {s: n for s, n in self.known.items() if s.isidentifier()} | dict(sizes)
        if not self._guard.takes(wanted):
            return None
        shapes = {
            id(tensor): [SizeExpression(n).value(wanted) if isinstance(n, str) else n for n in expected.shape]
            for expected, tensor in self.tensors
        }
        return self._given.changed(functools.partial(_resized, shapes=shapes), SIZES)


def _resized(tensor: Tensor, shapes: Mapping[int, list[int]]) -> Tensor:
    """Resize a tensor: leave out or repeat entries, in order, because masks hide the end; the first dimension is also rotated."""
    resized = tensor.detach().clone()
    for dim, size in enumerate(shapes.get(id(tensor), ())):
        old = tensor.shape[dim]
        entries = torch.arange(size, device=tensor.device) * old // size
        resized = resized.index_select(dim, (entries + (dim == 0)) % old)
    return resized


def _guarded_tensors(given: Call, graph: nn.Module, guard: InputGuard) -> list[tuple[TensorSpec, Tensor]]:
    """Pair each tensor of a call with the specification that the graph has for it."""
    try:
        named = inspect.signature(graph.forward).bind(*given.args, **given.kwargs).arguments
    except TypeError:  # the call does not fit the signature of the graph
        return []
    found = []
    for expected in guard.inputs:
        if isinstance(expected, TensorSpec) and expected.name in named:
            value = named[expected.name]
            for kind, key in expected.path:
                value = value[key] if kind == "item" else getattr(value, key)
            if isinstance(value, Tensor):
                found.append((expected, value))
    return found
