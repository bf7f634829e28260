"""Re-runs the forward until one graph is valid for every branch outcome, for repeated calls and for sizes of 1."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.export import Dim

from fxopt.capture.data_dependence.branches import (
    DataDependentBranch,
    Outcomes,
    SizeAsKeyError,
)
from fxopt.capture.fakes.fake_model import refused_change
from fxopt.capture.fakes.module_tree import recorded_modules
from fxopt.capture.fakes.shape_env import forget_shape_envs
from fxopt.capture.fakes.size_constraints import guards_of
from fxopt.capture.recording.request import Request
from fxopt.capture.runs.assembly import assemble
from fxopt.capture.runs.branch_settlement import explore_branches
from fxopt.capture.runs.cached_values import CachedValues
from fxopt.capture.runs.eager_comparison import check_against_eager
from fxopt.capture.runs.equivalence import equivalent, is_steady_state, size_one_guards
from fxopt.capture.runs.forward_run import ForwardRun
from fxopt.capture.runs.if_conversion import if_convert
from fxopt.capture.runs.left_behind import remove_fakes
from fxopt.capture.runs.outside_state import ReachableState, refused_outside
from fxopt.capture.runs.run_result import RunResult
from fxopt.capture.runtime.size_guards import SizeGuard
from fxopt.capture.runtime.traced_module import TracedModule
from fxopt.errors import TraceError
from fxopt.objects import tensors_in


def capture_graph(request: Request, verify: bool) -> TracedModule:
    """The forward as a graph module; where it excluded a size of 1, it is captured there as well."""
    outside = ReachableState(module for _, module in recorded_modules(request.model, request.layers))
    try:
        with outside.restored():
            made = _settled(request)
            given = [id(tensor) for tensor in tensors_in(request.inputs)]
            if len(set(given)) < len(given) and made.placeholders.identity_matters(made.reads):
                request = dataclasses.replace(request, shared_inputs=True)
                made = _settled(request)
            guards = guards_of(made.relied_on() + made.free.asked(), made.shape_env.replace)
            alternatives = [guards, *_size_one_alternatives(made, guards)]
        made.free.check_asked()
        traced = assemble(made, alternatives)
        if verify:
            check_against_eager(traced, request, made.written, outside.restored)
        return traced
    except DataDependentBranch as question:
        raise TraceError(str(question)) from None
    finally:
        if request.running.left_fakes:
            remove_fakes(request.running)
        forget_shape_envs()


def _settled(request: Request, like: Outcomes | None = None) -> RunResult:
    """A run with the questions on values settled that can be.

    `like` are the answers of another capture of this forward, whose graph is to hold for this one.
    """

    def record(answers: Outcomes) -> RunResult:
        nonlocal request
        try:
            made = ForwardRun(dataclasses.replace(request, answers=answers)).record()
        except SizeAsKeyError:
            request = dataclasses.replace(request, knows_keys=True)
            return record(answers)
        if not made.moved:
            _check_next_call(made)
            return made
        # Such a number counts calls or tokens: it is free, as are the sizes that it counts; in a tensor, it is no constant.
        request = dataclasses.replace(request, moving=request.moving | made.moved)
        return record(answers)

    return (
        record(Outcomes()) if request.specialize else explore_branches(record, equivalent, if_convert, like)
    )


def _check_next_call(made: RunResult) -> None:
    """Raise TraceError if the forward has changed state that could alter what a later call computes.

    It could not if a second call, which starts from that state, makes the same calls under the same guards and leaves the
    same state: then so does every later one. Of the tensors that the first one left, it may read those that are the same
    at each call.
    """
    if made.changes:
        refused = refused_change(next(iter(made.changes)))
    elif made.changed_outside:
        refused = refused_outside(next(iter(made.changed_outside)))
    else:
        return
    if any(isinstance(value, list) for value in made.changes.values()) or any(made.changed_outside.values()):
        raise refused
    again = _second_call(made, {})
    if again is None or not is_steady_state(made, again):
        cached = CachedValues(made)
        again = _second_call(made, cached.known) if cached.known else None
        if again is None or not cached.same(again):
            raise refused


def _second_call(made: RunResult, known: Mapping[int, torch.Tensor]) -> RunResult | None:
    """A run that starts from what `made` has left; None if it fails, as where it reads tensors that are not `known`."""
    request = dataclasses.replace(made.request, earlier=made.changes, known=known, hooks=made.hooks)
    try:
        return ForwardRun(request).record()
    except TraceError:
        return None


def _size_one_alternatives(made: RunResult, guards: list[SizeGuard]) -> list[list[SizeGuard]]:
    """The guards of further captures, at sizes of 1 that `guards` exclude, which gave the same graph.

    Forwards, and torch's own code, ask whether a size is 1 (for causal masks, broadcasting, strides) where
    the answer often changes nothing in the graph. Whether it does is settled by capturing there too, but for sizes that
    `dynamic_shapes` says are larger.
    """
    hints = {str(symbol): int(free.hint) for symbol, free in made.free.roots()}
    asked = guards_of(made.free.asked(), made.shape_env.replace)
    larger = {guard.symbols for guard in asked if not guard.holds(dict.fromkeys(guard.symbols, 1))}
    # Dimensions that carry one name are of size 1 together.
    groups: dict[Any, tuple[Any, ...]] = {}
    for symbol, free in made.free.roots():
        if free.dim is not None:
            name = free.choice.__name__ if isinstance(free.choice, Dim) else symbol
            groups[name] = (*groups.get(name, ()), symbol)
    candidates = []
    for group in groups.values():
        ones = dict.fromkeys(map(str, group), 1)
        about = [guard for guard in guards if ones.keys() & set(guard.symbols)]
        allowed = not any((name,) in larger for name in ones)
        if allowed and not all(guard.holds({**hints, **ones}) for guard in about):
            candidates.append(group)
    found = [(group, _captured_with_ones(made, group)) for group in candidates]
    held = [group for group, alternative in found if alternative is not None]
    if len(held) > 1:  # where one alone leads to another graph, so would all of them
        together = tuple(itertools.chain(*held))
        found.append((together, _captured_with_ones(made, together)))
    return [alternative for _, alternative in found if alternative is not None]


def _captured_with_ones(made: RunResult, ones: Sequence[Any]) -> list[SizeGuard] | None:
    """The guards under which the graph holds where the sizes `ones` are 1; None if it does not."""
    narrowed = {(f.where, f.dim) for f in made.free.dimensions if made.shape_env.replace(f.symbol) in ones}
    request = dataclasses.replace(made.request, at_one=narrowed)
    try:
        other = _settled(request, made.request.answers)
    except TraceError:
        return None  # sizes of 1 stay excluded, and the guard says so
    return size_one_guards(made, other, ones)
