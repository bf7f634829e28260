"""Tables that a forward keeps for later calls and computes only from sizes, constants and weights: positions, grids, masks.

The graph computes the tables in each call. This is correct if a call returns the same, whatever calls came before it.
Sequences of calls are tried at several sizes, on fake tensors; only the kept state has real values. If a later call reads a
condition on sizes, calls are tried with both outcomes of it, at sizes other than those of the call that made the state.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fxopt.capture.fakes.dynamic_shapes import SymbolicNumber
from fxopt.capture.fakes.kept_state import Changes, Counted, KeptState
from fxopt.capture.fakes.size_constraints import guards_of
from fxopt.capture.fakes.snapshots import Snapshot, SnapshotMaker
from fxopt.capture.recording.request import Request
from fxopt.capture.runs.equivalence import translation
from fxopt.capture.runs.partial_evaluation import PartialEvaluation, same_tensors
from fxopt.capture.runs.run_result import RunResult
from fxopt.errors import TraceError
from fxopt.memory import storage_of
from fxopt.objects import tensors_in

# After this many calls, the state counts as one that changes with every call.
_MOST_RUNS = 80
_NUMBERS = (int, float)
_MOST_NUMBERS = 4_000_000
_LONGER = (37, 9, 3, 2)
_OTHER = (2, 3, 4, 5, 6, 8, 9, 12, 16, 20, 24, 28, 32, 48, 64, 96, 128, 256, 448, 512, 1024)
_SEARCHED = (*range(1, 1025), *sorted({2**n + d for n in range(11, 13) for d in (-1, 0, 1)}))

Record = Callable[[Request], RunResult]
# A size for each symbol.
Sizes = Mapping[str, int]


@dataclasses.dataclass(frozen=True, eq=False)
class _State(KeptState):
    """The state after a call, to compare it with others. Its tensors may share memory (`shares_memory`); stand-ins never do."""

    shares_memory: bool = False

    def parts(self) -> dict[Any, Any]:
        """Return the whole content in a form that can be compared; all unknown tensors count as equal."""
        describe = SnapshotMaker(
            lambda t: _Content(self.known.get(id(t))),
            lambda size: self.known.get(id(size)),
            lambda module: self.known.get(id(module)),
        )
        return {
            key: describe(value.kept).parts if isinstance(value, Snapshot) else value
            for key, value in self.changes.items()
        }


@dataclasses.dataclass(frozen=True, eq=False)
class _Content:
    value: torch.Tensor | str | None  # a string names a tensor that existed before

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Content):
            return False
        mine, its = self.value, other.value
        if isinstance(mine, torch.Tensor) and isinstance(its, torch.Tensor):
            return same_tensors(mine, its)
        return type(mine) is type(its) and mine == its

    def __hash__(self) -> int:
        return 0


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
    """A call that was tried: its run, the evaluation of its graph, and the state that it left."""

    made: RunResult
    evaluation: PartialEvaluation
    state: _State


class RepeatedCalls:
    """Tries sequences of calls of a forward; `made` is the first call, and `record` runs the forward."""

    def __init__(self, made: RunResult, record: Record) -> None:
        self._made, self._record = made, record
        self._runs = 0
        self._first: dict[tuple[int, ...], _Call] = {}
        # The numbers that change with each call.
        self._counted: Changes = {}
        self._hints = made.hints()
        self._asked = made.guards_asked()
        self._guards = [*made.guards(), *self._asked]

    def check(self) -> None:
        """Raise TraceError, with the reason, if a call may return something else after another call."""
        self._count()
        main, others = self._samples()
        left = [(self._first_call(sizes).state, sizes, main, True) for sizes in main]
        left[0] = (left[0][0], main[0], [*main, *others], True)
        left += [(self._first_call(sizes).state, sizes, main[:1], False) for sizes in others]
        seen = [state.parts() for state, *_ in left]
        while left:
            state, made_at, samples, crosses = left.pop(0)
            tried = list(samples)
            for sizes in tried:  # the loop appends to this list
                after = self._call(sizes, state)
                if not self._first_call(sizes).evaluation.same(after.evaluation):
                    raise TraceError("a later call computes something else with it")
                if after.made.changed_outside:
                    raise TraceError("a later call changes state outside of the model")
                if (parts := after.state.parts()) not in seen:
                    seen.append(parts)
                    left.append((after.state, sizes, main, crosses and sizes in samples))
                if crosses:
                    tried += self._untried(
                        after.made, sizes, [each for each in tried if each != made_at], made_at
                    )

    def _count(self) -> None:
        """Find the numbers that a second call changes again: later calls may use them only to count further."""
        if any(type(value) in _NUMBERS for value in self._made.changes.values()):
            first = self._first_call(self._hints).state
            again = self._call(self._hints, first).state.changes
            numbers = {key: value for key, value in first.changes.items() if type(value) in _NUMBERS}
            self._counted = {k: Counted(type(v)) for k, v in numbers.items() if v != again.get(k)}
            self._first.clear()

    def _untried(self, after: RunResult, sizes: Sizes, tried: list[Sizes], made_at: Sizes) -> list[Sizes]:
        """Find sizes for the untried outcomes of each condition that a later call reads and the first call does not."""
        found: list[Sizes] = []
        for guard in guards_of(after.relied_on(), translation(self._made, after, {})):
            if guard in self._guards or not set(guard.symbols) <= self._hints.keys():
                continue
            others = [
                {**sizes, one: sizes[other], other: sizes[one]}
                for one, other in itertools.combinations(guard.symbols, 2)
            ]
            others += [{**sizes, symbol: size} for symbol in guard.symbols for size in _SEARCHED]
            for side in {True, False} - {guard.holds(each) for each in [*tried, *found]}:
                on_side = (s for s in others if guard.holds(s) == side and s != made_at and self._holds(s))
                found += itertools.islice(on_side, 1)
        return found

    def _samples(self) -> tuple[list[Sizes], list[Sizes]]:
        """Return the example's sizes, all of them longer, and all 1; also sizes that differ from the example in one symbol."""
        main: list[Sizes] = [self._hints]
        for factor in _LONGER if self._hints else ():
            longer = {symbol: size * factor for symbol, size in self._hints.items()}
            if self._holds(longer) and self._numbers(longer) < _MOST_NUMBERS:
                main.append(longer)
                break
        ones = dict.fromkeys(self._hints, 1)
        if self._hints and self._is_possible(ones):
            main.append(ones)
        others: list[Sizes] = []
        for symbol, size in self._hints.items():
            larger = ({**self._hints, symbol: n} for n in _OTHER if n > size)
            others += itertools.islice((sizes for sizes in larger if self._holds(sizes)), 1)
            if self._is_possible(one := {**self._hints, symbol: 1}):
                others.append(one)
        return main, [sizes for sizes in others if sizes not in main] if len(self._hints) > 1 else []

    def _holds(self, sizes: Sizes) -> bool:
        return all(guard.holds(sizes) for guard in self._guards)

    def _is_possible(self, sizes: Sizes) -> bool:
        """Tell whether the forward accepts these sizes, even if its guards exclude them, as they often exclude sizes of 1."""
        if not all(guard.holds(sizes) for guard in self._asked):
            return False
        try:
            self._first_call(sizes)
        except TraceError:
            return False
        return True

    def _numbers(self, sizes: Sizes) -> int:
        """Return an upper bound for the count of numbers in the inputs at these sizes."""
        factor = math.prod(max(1, size // max(1, self._hints[symbol])) for symbol, size in sizes.items())
        return factor * sum(tensor.numel() for tensor in tensors_in(self._made.request.inputs))

    def _first_call(self, sizes: Sizes) -> _Call:
        """Return the call of the model in the user's state, at these sizes."""
        key = tuple(sizes[symbol] for symbol in self._hints)
        if key not in self._first:
            self._first[key] = self._call(sizes, None)
        return self._first[key]

    def _call(self, sizes: Sizes, state: _State | None) -> _Call:
        self._runs += 1
        if self._runs > _MOST_RUNS:
            raise TraceError("it is another one after each call")
        request = self._made.request
        chosen = {}
        for free in self._made.free.dimensions:
            expression = self._made.shape_env.replace(free.symbol)
            value = expression.xreplace({s: sizes[str(s)] for s in expression.free_symbols})
            chosen[free.where, free.dim] = int(value)
        request = dataclasses.replace(request, sizes=chosen, earlier=state or request.earlier)
        made = self._made if state is None and sizes == self._hints else self._record(request)
        evaluation = PartialEvaluation(made)
        return _Call(made, evaluation, _left(made, evaluation, state, self._counted))


def _left(made: RunResult, evaluation: PartialEvaluation, earlier: _State | None, counted: Changes) -> _State:
    """Return the state after a call."""
    # A tensor that replaces an earlier one is not visible as a change.
    keys = made.changes.keys() | (earlier.changes.keys() if earlier else set())
    left = {key: counted.get(key, made.state.get(key)) for key in sorted(keys)}
    snapshots = [value for value in left.values() if isinstance(value, Snapshot)]
    sizes = [size for value in snapshots for size in value.sizes if isinstance(size, SymbolicNumber)]
    tensors = {id(tensor): tensor for value in snapshots for tensor in value.tensors}
    # The value of a written tensor is the computed one.
    written = {id(tensor) for tensor in made.written.outside}
    own = {key: value for key, value in made.own.items() if id(value) not in written}
    values = {key: evaluation.known(tensor) for key, tensor in tensors.items() if key not in own}
    earlier_computed = set(map(id, earlier.computed)) if earlier else set()
    computed = [own[key] for key in tensors.keys() & own.keys() if id(own[key]) in earlier_computed]
    computed += [v for key, v in values.items() if v is not None and not made.is_constant(tensors[key])]
    known = {id(size): size.node.hint for size in sizes if size.node.has_hint()}
    known |= {key: value for key, value in values.items() if value is not None}
    if earlier and earlier.shares_memory and written & set(map(id, earlier.known.values())):
        raise TraceError("it writes into a tensor that may share its memory with another one")
    shares = len(set(map(storage_of, tensors.values()))) < len(tensors)
    shares |= bool(earlier and earlier.shares_memory)
    return _State(left, {**known, **own}, made.hooks, made.variables, computed, made.assigned, shares)
