"""Re-runs the forward until one graph is valid for every branch outcome, for repeated calls and for sizes of 1."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.export import Dim

from fxopt.capture.data_dependence.branches import (
    DataDependentBranch,
    Outcomes,
    SizeAsKeyError,
)
from fxopt.capture.fakes.kept_state import Changes, Counted, KeptState, refused_change
from fxopt.capture.fakes.shape_env import forget_shape_envs
from fxopt.capture.fakes.size_constraints import guards_of
from fxopt.capture.fakes.snapshots import Snapshot
from fxopt.capture.nodes.shared_memory import OutOfSightError
from fxopt.capture.nodes.source_location import CAPTURE, describe_origin
from fxopt.capture.recording.placeholders import ChangedInputError
from fxopt.capture.recording.request import Request
from fxopt.capture.runs.assembly import assemble
from fxopt.capture.runs.assigned_buffers import replaced_buffers, unshared_buffers
from fxopt.capture.runs.both_sides import called_in_branches
from fxopt.capture.runs.branch_settlement import KeptRuns, explore_branches
from fxopt.capture.runs.cached_values import RepeatedCalls
from fxopt.capture.runs.eager_comparison import check_against_eager
from fxopt.capture.runs.equivalence import equivalent, is_steady_state, size_one_guards
from fxopt.capture.runs.forward_run import ForwardRun
from fxopt.capture.runs.left_behind import remove_fakes
from fxopt.capture.runs.outside_state import ReachableState, refused_outside
from fxopt.capture.runs.run_result import RunResult
from fxopt.capture.runtime.size_guards import SizeGuard
from fxopt.capture.runtime.traced_module import TracedModule
from fxopt.errors import TraceError
from fxopt.objects import tensors_in


def capture_graph(request: Request, verify: bool) -> TracedModule:
    """Capture the forward as a graph module; if its guards exclude a size of 1, capture it at that size as well."""
    outside = ReachableState(request.model, request.layers)
    try:
        with outside.restored():
            made = _settled(request)
            given = [id(tensor) for tensor in tensors_in(request.inputs)]
            if len(set(given)) < len(given) and made.placeholders.identity_matters(made.reads):
                request = dataclasses.replace(request, shared_inputs=True)
                made = _settled(request)
            _leave_out_gradient_mode(made)
            guards = guards_of(made.relied_on() + made.free.asked(), made.shape_env.replace)
            alternatives = [guards, *_size_one_alternatives(made, guards)]
        made.free.check_asked()
        traced = assemble(made, alternatives)
        if verify:
            check_against_eager(traced, request, made.written, outside.restored, _tables(made))
        return traced
    except DataDependentBranch as question:
        raise TraceError(str(question)) from None
    finally:
        if request.running.left_fakes:
            remove_fakes(request)
        forget_shape_envs()


assert capture_graph.__name__ == CAPTURE


def _settled(request: Request, general: RunResult | None = None) -> RunResult:
    """Return a run with all branches on values settled; with `general`, in the same way as in that run."""

    def modules_at(names: Iterable[str]) -> set[int]:
        return {id(request.model.get_submodule(name)) for name in names}

    def record(answers: Outcomes, **changes: Any) -> RunResult:
        """Run with this script; `changes` modify the request for this run and all later ones."""
        nonlocal request
        if changes:
            kept.clear()
            request = dataclasses.replace(request, **changes)
        run = ForwardRun(dataclasses.replace(request, answers=answers))
        try:
            made = run.record()
            # The forward assigns to attributes of these layers, so they cannot be single nodes.
            given = modules_at(name for name, _ in made.assigned) & request.layers
            if given:
                return record(answers, layers=request.layers - given)
            if not made.moved:
                tried = general is not None and general.keeps_tables
                replaced = replaced_buffers(made, persistent=True)
                assigned = unshared_buffers(made, replaced - request.assigned)
                try:
                    if not assigned:
                        if replaced:  # the `state_dict` would have the old buffer
                            raise refused_change(min(replaced))
                        return dataclasses.replace(made, keeps_tables=_keeps_tables(made, tried))
                except TraceError:
                    tables = replaced_buffers(made, persistent=False)
                    assigned = unshared_buffers(made, tables - request.assigned)
                    if not assigned:
                        raise
                return record(answers, assigned=request.assigned | assigned)
        except SizeAsKeyError:
            return record(answers, reads_dict_keys=True)
        except ChangedInputError:
            if request.changes_inputs:
                raise
            return record(answers, changes_inputs=True)
        except OutOfSightError:
            # A hook may have made the call; calls of hooks are recorded if the layer is not a leaf.
            hooked = modules_at(run.recorder.hooked) & request.layers
            if not hooked:
                raise
            return record(answers, layers=request.layers - hooked)
        # Moved numbers count calls or tokens: they become dynamic, like the sizes that they count. In tensors, they are not constants.
        return record(answers, moving=request.moving | made.moved)

    kept = KeptRuns(record)
    if request.specialize:
        return record(Outcomes())
    like = general.request.answers if general else None
    while True:
        try:
            made = explore_branches(kept, like)
        except DataDependentBranch as question:
            if not question.on_state:
                raise
            try:
                return _settled(dataclasses.replace(request, by_state=True), general)
            except TraceError:
                raise question from None
        finally:
            kept.clear()
        inside = modules_at(called_in_branches(made.graph))
        if not inside:
            return made
        request, like = dataclasses.replace(request, layers=request.layers - inside), made.request.answers


def _leave_out_gradient_mode(made: RunResult) -> None:
    """Drop the condition on the gradient mode if the graph is the same with and without gradients.

    Models of diffusers read this mode before they read whether activation checkpointing is enabled.
    """
    modes = made.reads.modes_read
    if "grad" not in modes or "gradients" in made.reads.read_at:  # the mode decides requires_grad
        return
    asked = modes.pop("grad")
    try:
        with torch.set_grad_enabled(not asked[0]):
            other = _settled(made.request)
    except TraceError:
        other = None
    if other is not None and "grad" in other.reads.modes_read:
        del other.reads.modes_read["grad"]
        if made.reads.cover(other.reads) and equivalent(made, other):
            return
    modes["grad"] = asked


def _keeps_tables(made: RunResult, tried: bool) -> bool:
    """Tell whether later calls read state that the forward keeps; TraceError if that could change their results.

    State is harmless if a second call, which starts from it, makes the same calls of torch under the same guards and leaves
    the same state. State made only of sizes, constants and weights may be read: calls at several sizes prove that it is
    harmless, unless an earlier run has `tried` them.
    """
    if not (made.changes or made.changed_outside):
        return False
    outside = refused_outside(next(iter(made.changed_outside))) if made.changed_outside else None
    if outside and any(made.changed_outside.values()):
        raise outside
    again = _second_call(made, made.changes)
    others = [p for p in made.changes if again is not None and again.state.get(p) != made.state.get(p)]
    refused = outside
    if made.changes:
        place = (others or [*made.changes])[0]
        refused = TraceError(f"{refused_change(place)}{_origin(made, place)}")
    if (again is not None and is_steady_state(made, again)) or _only_counts(made):
        if made.request.method:
            _refuse_left_in_containers(made)
        return False
    if made.request.method:
        _refuse_left_in_containers(made, dict)  # a dict may be a table
    if outside:
        raise outside
    if not tried:
        try:
            RepeatedCalls(made, lambda request: ForwardRun(request).record()).check()
        except TraceError as reason:
            raise TraceError(
                f"{refused} It is no table of sizes, constants and weights alone: {reason}"
            ) from None
    return True


def _refuse_left_in_containers(made: RunResult, but_for: tuple[type, ...] | type = ()) -> None:
    """Raise TraceError if the forward leaves a tensor or a dynamic size in a list, dict or object that existed before."""
    for place, value in made.changes.items():
        kept = isinstance(value, Snapshot) and not isinstance(value.kept, but_for)
        if kept and place not in made.assigned and (value.tensors or value.sizes):
            name = ".".join(place).lstrip(".")
            if isinstance(value.kept, torch.Tensor):
                raise TraceError(f"the forward replaces the buffer {name!r}. Write into it with `.copy_()`.")
            raise TraceError(
                f"the forward writes into {name!r}, a {type(value.kept).__name__} that the model keeps, which a graph "
                f"cannot do. Assign a new one to the attribute.{_origin(made, place)}"
            )


def _origin(made: RunResult, place: tuple[str, str]) -> str:
    """Describe the tensor that the forward leaves in a place, with its line; empty if it is not the result of a call."""
    tensors = getattr(made.changes[place], "tensors", ())
    nodes = [node for tensor in tensors if (node := made.made_by(tensor)) is not None]
    return f" The attribute then holds {describe_origin(nodes[0])}." if nodes else ""


def _only_counts(made: RunResult) -> bool:
    """Tell whether only counters differ from call to call: numbers used only to compute their next values."""
    counted = {
        key: Counted(type(value)) for key, value in made.changes.items() if type(value) in (int, float)
    }
    again = _second_call(made, made.changes | counted) if counted else None
    if again is None:
        return False
    still = [key for key in counted if isinstance(again.state.get(key), Snapshot)]
    return is_steady_state(
        made, dataclasses.replace(again, state=again.state | {key: made.state[key] for key in still})
    )


def _tables(made: RunResult) -> set[str]:
    """Return the names of the non-persistent buffers that the forward replaces; later calls read equal values there."""
    return {".".join(place).lstrip(".") for place in replaced_buffers(made, persistent=False)}


def _second_call(made: RunResult, changes: Changes) -> RunResult | None:
    """Run the forward from the state `changes`; None if this fails, for example because it reads tensors in that state."""
    request = dataclasses.replace(
        made.request,
        earlier=KeptState(changes, made.own, made.hooks, made.variables, assigned=made.assigned),
    )
    try:
        return ForwardRun(request).record()
    except TraceError:
        return None


def _size_one_alternatives(made: RunResult, guards: list[SizeGuard]) -> list[list[SizeGuard]]:
    """Capture again at sizes of 1 that `guards` exclude; return the guards of each capture with the same graph.

    Forwards and torch itself ask whether a size is 1 (for causal masks, broadcasting, strides), but the answer often does
    not change the graph. Sizes that are larger according to `dynamic_shapes` are skipped.
    """
    hints = made.hints()
    larger = {
        guard.symbols for guard in made.guards_asked() if not guard.holds(dict.fromkeys(guard.symbols, 1))
    }
    # Dimensions with the same name have size 1 together.
    groups: dict[str, tuple[str, ...]] = {}
    for symbol, free in made.free.roots():
        if free.dim is not None:
            name = free.choice.__name__ if isinstance(free.choice, Dim) else str(symbol)
            groups[name] = (*groups.get(name, ()), str(symbol))
    candidates: dict[tuple[str, ...], None] = {}
    for group in groups.values():
        ones = _equal_to(group, guards, hints)
        about = [guard for guard in guards if set(ones) & set(guard.symbols)]
        allowed = not any((name,) in larger for name in ones)
        if allowed and not all(_holds(guard, hints, ones) for guard in about):
            candidates[ones] = None
    found = [(group, _captured_with_ones(made, group)) for group in candidates]
    # No guard relates sizes that meet only in an index by values: sizes that are equal in the example are tried together.
    failed: dict[int, tuple[str, ...]] = {}
    for group in (group for group, alternative in found if alternative is None):
        failed[hints[group[0]]] = (*failed.get(hints[group[0]], ()), *group)
    joined = [group for group in failed.values() if group not in candidates]
    found += [(group, _captured_with_ones(made, group)) for group in joined]
    held = [group for group, alternative in found if alternative is not None]
    if len(held) > 1:  # a group that changes the graph by itself is left out
        together = tuple(dict.fromkeys(itertools.chain(*held)))
        found.append((together, _captured_with_ones(made, together)))
    return [alternative for _, alternative in found if alternative is not None]


def _equal_to(group: Sequence[str], guards: Sequence[SizeGuard], hints: Mapping[str, int]) -> tuple[str, ...]:
    """Return the sizes that are 1 if those of `group` are: guards relate them, and they are equal in the example."""
    ones: set[str] = {*group}
    last: set[str] = set()
    values = {hints[symbol] for symbol in group}
    while ones != last:
        last = set(ones)
        for guard in guards:
            if last & {*guard.symbols} and not _holds(guard, hints, last):
                ones |= {symbol for symbol in guard.symbols if hints[symbol] in values}
    return tuple(symbol for symbol in hints if symbol in ones)


def _holds(guard: SizeGuard, hints: Mapping[str, int], ones: Collection[str]) -> bool:
    """Tell whether a guard is true for the example with the sizes `ones` set to 1; False if it cannot be computed."""
    return guard.holds({**hints, **dict.fromkeys(ones, 1)})


def _captured_with_ones(made: RunResult, ones: Sequence[str]) -> list[SizeGuard] | None:
    """Return the guards under which the graph is valid with the sizes `ones` set to 1; None if it is not valid."""
    symbols = [symbol for symbol, _ in made.free.roots() if str(symbol) in ones]
    narrowed = {(f.where, f.dim) for f in made.free.dimensions if made.shape_env.replace(f.symbol) in symbols}
    request = dataclasses.replace(made.request, at_one=narrowed)
    try:
        other = _settled(request, made)
    except TraceError:
        return None  # sizes of 1 stay excluded, and the guard says so
    if other.changes != made.changes and not made.keeps_tables:
        for one, left in ((made, other.changes), (other, made.changes)):
            again = _second_call(one, left)
            if again is None or not is_steady_state(one, again):
                return None  # a call of the one reads state that a call of the other left
    try:
        return size_one_guards(made, other, symbols)
    except ZeroDivisionError:
        return None  # a size of the general graph divides by another size, which is 0 here
