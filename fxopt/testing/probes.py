"""The calls on which a module is judged: the inputs at hand, others with large values, and others of other sizes.

Outputs agree on one input by chance: a graph that has the batch of the example built in, one that remembers its first
result, a clamp that no value reached. So the inputs are varied as far as the model takes the variations.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt.capture.runtime.input_guard import InputGuard
from fxopt.capture.runtime.input_specs import NumberSpec, TensorSpec
from fxopt.capture.runtime.size_guards import SizeExpression
from fxopt.errors import GuardError
from fxopt.testing.differences import leaves
from fxopt.testing.observations import Call, Observation, observe

VALUES, SIZES = "other values", "other sizes"


def first_taken(
    calls: Iterable[Call], run: Callable[[Call], list[Observation]], refused: Callable[[Call], bool]
) -> Call | None:
    """The first call that the reference takes, with a finite result, and that its graphs do not refuse."""
    for call in calls:
        try:
            (seen,) = run(call)
        except Exception:  # whatever it raises: the model does not take such inputs
            continue
        if not not_finite(seen.output) and not refused(call):
            return call
    return None


def refused(graphs: Mapping[torch.dtype | None, nn.Module | None], call: Call) -> bool:
    """Tell whether a graph refuses a call, in the dtype that it is given with."""
    for dtype, graph in graphs.items():
        if graph is not None:
            try:
                observe(graph, [call if dtype is None else call.cast(dtype)])
            except GuardError:
                return True
            except Exception:  # no refusal: where a candidate raises it as well, that is its fault
                continue
    return False


def large_values(given: Call) -> Iterator[Call]:
    """Calls with large values and zeros, for a model that does not take them with tamer ones; integers in another order."""
    for scale, zeros in ((64.0, True), (4.0, False)):
        yield given.changed(functools.partial(_other, scale=scale, zeros=zeros), VALUES)
    yield given.changed(lambda t: _other(t, 4.0, False) if t.is_floating_point() else t.clone(), VALUES)


def other_values(given: Call) -> Iterator[Call]:
    """Calls with the same numbers in another order; ids as they were, for a model where they stand for places."""
    yield given.changed(_other, VALUES)
    yield given.changed(lambda t: _other(t) if t.is_floating_point() else t.clone(), VALUES)


def other_sizes(given: Call, graph: nn.Module | None) -> Iterator[Call]:
    """Calls with other sizes where the graph leaves them free, as far as its own guards allow."""
    guard = input_guard(graph)
    if graph is None or guard is None:
        return
    tensors = _guarded_tensors(given, graph, guard)
    fixed = {str(each.value) for each in guard.inputs if isinstance(each, NumberSpec)}
    known: dict[str, int] = {}
    for expected, tensor in tensors:
        if len(expected.shape) == tensor.ndim:
            known |= {s: n for s, n in zip(expected.shape, tensor.shape, strict=True) if isinstance(s, str)}
    symbols = [symbol for symbol in sorted(known) if symbol.isidentifier() and symbol not in fixed]
    # Sizes that are equal stay so: a graph may have a symbol for the batch of each input.
    distinct = sorted({known[symbol] for symbol in symbols})
    smaller = {n: n // 2 - 1 if n >= 6 else n + 1 for n in distinct}
    larger = {n: n + 1 + i for i, n in enumerate(distinct)}
    for new in (smaller, larger, *({n: larger[n]} for n in distinct), *({n: smaller[n]} for n in distinct)):
        sizes = {symbol: new[known[symbol]] for symbol in symbols if known[symbol] in new}
        wanted = {s: n for s, n in known.items() if s.isidentifier()} | sizes
        if sizes and any(all(g.holds(wanted) for g in guards) for guards in guard.alternatives):
            shapes = {
                id(tensor): [
                    SizeExpression(n).value(wanted) if isinstance(n, str) else n for n in expected.shape
                ]
                for expected, tensor in tensors
            }
            yield given.changed(functools.partial(_resized, shapes=shapes), SIZES)


def input_guard(graph: nn.Module | None) -> InputGuard | None:
    """The check of inputs in a captured graph, if it is one."""
    modules = graph.modules() if isinstance(graph, GraphModule) else ()
    return next((module for module in modules if isinstance(module, InputGuard)), None)


def _other(tensor: Tensor, scale: float = 1.0, zeros: bool = False) -> Tensor:
    """The same numbers in another order; floating ones larger, but for those between 0 and 1, such as masks."""
    numbers = tensor.detach().flatten().flip(0)
    if tensor.is_floating_point() and not bool(((tensor >= 0) & (tensor <= 1)).all()):
        numbers *= scale
        if zeros:
            numbers[::7] = 0
    return torch.empty_like(tensor).copy_(numbers.reshape(tensor.shape))


def _resized(tensor: Tensor, shapes: Mapping[int, list[int]]) -> Tensor:
    """The tensor with some entries left out, or repeated, in their order: a mask hides the end; but for the first dimension,
    where they change places.
    """
    resized = tensor.detach().clone()
    for dim, size in enumerate(shapes.get(id(tensor), ())):
        old = tensor.shape[dim]
        entries = torch.arange(size, device=tensor.device) * old // size
        resized = resized.index_select(dim, (entries + (dim == 0)) % old)
    return resized


def _guarded_tensors(given: Call, graph: nn.Module, guard: InputGuard) -> list[tuple[TensorSpec, Tensor]]:
    """Each tensor of a call, beside what the graph expects there."""
    try:
        named: Mapping[str, Any] = (
            inspect.signature(graph.forward).bind(*given.args, **given.kwargs).arguments
        )
    except TypeError:  # not the signature of the graph: nothing is known of its sizes
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


def not_finite(output: object) -> str:
    """The path of a tensor of an output that holds NaN or infinity; empty if none does."""
    for path, value in leaves(output):
        if isinstance(value, Tensor) and value.is_floating_point() and not value.isfinite().all():
            return path
    return ""


def has_finite(output: object) -> bool:
    """Tell whether a tensor of an output holds a number that is neither NaN nor infinite."""
    return any(isinstance(value, Tensor) and bool(value.isfinite().any()) for _, value in leaves(output))
