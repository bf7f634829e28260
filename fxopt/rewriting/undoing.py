"""Undo of transformations, in any order that their changes allow; an undo is exact, or raises."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from torch.fx import GraphModule

from fxopt.errors import UndoError, error_text
from fxopt.rewriting.attempt import Applied, Attempt
from fxopt.rewriting.edits import NodeEdit, conflicts
from fxopt.rewriting.fingerprint import fingerprint
from fxopt.rewriting.playback import play_back
from fxopt.rewriting.record import (
    Step,
    marked_nodes,
    set_steps,
    steps_of,
    unmark,
)
from fxopt.rewriting.snapshot import Snapshot
from fxopt.rewriting.weights import provenance
from fxopt.torch_internals import name_counts, used_names


def own_steps(pass_: Any, graph_module: GraphModule) -> list[Step]:
    """List the steps of a transformation; raise an UndoError if its options were changed since."""
    steps, signature = steps_of(graph_module), pass_.signature
    for step in steps:
        if step.transformation is pass_ and step.signature != signature:
            raise UndoError(
                f"{pass_!r} was applied with other options, as {step.name}: undo it with those options, or with fxopt.undo"
            )
    return [step for step in steps if step.signature == signature]


def check_no_trace(pass_: Any, graph_module: GraphModule) -> None:
    """Raise an UndoError if a graph module has marks or modules of a pass that its record does not list."""
    left = [node.name for node in marked_nodes(graph_module, pass_.signature)]
    left += [name for name, m in graph_module.named_modules() if pass_.signature in provenance(m)]
    if not left:
        return
    why = (
        "the record of its changes is gone. The record is a child module of the graph module; delete_all_unused_submodules, "
        "copy.copy, retracing and GraphModule(module, graph) lose it. Undo the pass before these"
    )
    for step in steps_of(graph_module):
        if pass_.signature in {part.signature for part in step.parts}:
            why = f"it was a part of {step.name}: undo that"
    raise UndoError(f"{pass_!r} cannot be undone: it rewrote {', '.join(left)}, but {why}")


def undo_steps(graph_module: GraphModule, chosen: Sequence[Step]) -> Applied:
    """Undo steps, the last one first.

    Raises:
        UndoError: a step cannot be undone exactly, or another step has to be undone before it; all steps stay applied.
    """
    result, done = graph_module, contextlib.ExitStack()
    try:
        for step in reversed(chosen):
            if step.key in {other.key for other in steps_of(result)}:
                result, undone = _undone(result, step, {other.key for other in chosen})
                done.callback(undone)
    except BaseException:
        done.close()
        graph_module.recompile()
        raise
    return result, done.close


def _undone(graph_module: GraphModule, step: Step, chosen: Collection[str]) -> Applied:
    if not step.reversible:
        raise UndoError(
            f"{step.name} cannot be undone, so earlier steps cannot be undone in order. A transformation whose "
            "nodes are as it left them can still be undone separately: transformation(gm, reverse=True)"
        )
    same = [other for other in steps_of(graph_module) if other.signature == step.signature]
    if not step.by_hand:
        return _played_back(graph_module, step)
    if not {other.key for other in same} <= {*chosen}:
        raise UndoError(
            f"{step.name} was applied {len(same)} times, and its reverse() undoes all of these together: undo all of them"
        )
    return reverse_by_hand(step.load(), graph_module, same)


def _played_back(graph_module: GraphModule, step: Step) -> Applied:
    """Undo one step by inverting its log."""
    snapshot = Snapshot(graph_module)
    _check_order([step], snapshot.steps)
    orders, standing = snapshot.orders, [other for other in snapshot.steps if other.key != step.key]
    is_as_left = fingerprint(graph_module) == step.after  # if not, later changes by others stay
    try:
        if step.edits is None:
            raise UndoError(
                "its changes could not be pickled, or saved, together with the graph module. If they contain a class or function "
                "of yours, pass it in `trusted` to save and to load"
            )
        play_back(graph_module, step.edits, orders)
        if is_as_left and fingerprint(graph_module) != step.before:
            raise UndoError(_INEXACT)
        _unmark(graph_module, [step], standing)
        set_steps(graph_module, standing, orders)
    except BaseException as error:
        snapshot.roll_back()
        if not isinstance(error, Exception):
            raise
        why = str(error) if isinstance(error, UndoError) else error_text(error)
        raise UndoError(f"{step.name} cannot be undone: {why}") from error
    return graph_module, snapshot.roll_back


def reverse_by_hand(pass_: Any, graph_module: GraphModule, undone: Sequence[Step]) -> Applied:
    """Undo all applications of a transformation by its hand-written `reverse`, and check the result."""
    steps = steps_of(graph_module)
    _check_order(undone, steps)
    keys = {step.key for step in undone}
    with Attempt(pass_, graph_module, "reverse") as attempt:
        if any(step.parts for step in undone):  # `reverse` may undo the parts itself
            parts = [part for step in steps for part in (step.parts if step.key in keys else (step,))]
            set_steps(graph_module, parts, attempt.snapshot.orders)
        reserved = _free_names(graph_module)
        with attempt.writes:
            result = pass_.reverse(graph_module)
        attempt.check(result)
        used_names(result.graph).update(reserved)
        if undone:
            _check_exact(pass_, attempt, result, undone, steps)
            standing = [step for step in attempt.standing(result)[0] if step.key not in keys]
            _unmark(result, undone, standing)
            set_steps(result, standing, attempt.snapshot.orders)
        elif attempt.snapshot.edits(result):
            raise UndoError(f"{pass_!r} cannot be undone: the graph module has no record of it")
    return result, attempt.roll_back


def _free_names(graph_module: GraphModule) -> set[str]:
    """Free the names of erased nodes for nodes that `reverse` creates, and return all reserved names.

    torch.fx reserves the names of erased nodes, and would append a number.
    """
    names = used_names(graph_module.graph)
    reserved = {*names}
    names.intersection_update(node.name for node in graph_module.graph.nodes)
    name_counts(graph_module.graph).clear()
    return reserved


def _check_order(undone: Sequence[Step], steps: Sequence[Step]) -> None:
    """Raise an UndoError if later steps depend on these; it names the steps to undo first."""
    keys = {step.key for step in undone}
    for number, step in enumerate(steps):
        if step.key in keys:
            later = [other for other in steps[number + 1 :] if other.key not in keys]
            names = dict.fromkeys(other.name for other in reversed(later) if _meet(step, other))
            if names:
                raise UndoError(
                    f"{step.name} cannot be undone yet: a later pass rewrote the same site. "
                    f"Undo {', then '.join(names)} first"
                )


def _meet(step: Step, later: Step) -> bool:
    return step.edits is None or later.edits is None or conflicts(step.edits, later.edits)


def _check_exact(
    pass_: Any, attempt: Attempt, result: GraphModule, undone: Sequence[Step], steps: Sequence[Step]
) -> None:
    """Raise an UndoError if a hand-written `reverse` does not restore the earlier graph."""
    if any(step.edits is None for step in undone):
        return
    back = [
        dataclasses.replace(edit, before=edit.after, after=edit.before)
        for step in reversed(undone)
        for edit in reversed(step.edits or ())
        if isinstance(edit, NodeEdit)
    ]
    wrong = attempt.snapshot.past_nodes(back, result, by_others=True)
    exact = attempt.fingerprint == undone[-1].after and [*steps[-len(undone) :]] == [*undone]
    # `reverse` may leave numbers of another type, and modules in another order: only the module digest counts.
    if wrong or (exact and fingerprint(result).split()[1] != undone[0].before.split()[1]):
        where = f": {wrong}" if wrong else ""
        raise UndoError(f"{pass_!r} cannot be undone: {_INEXACT} by {type(pass_).__name__}.reverse{where}")


_INEXACT = "the result differs from the graph module before the pass, because some changes are not undone"


def _unmark(graph_module: GraphModule, undone: Sequence[Step], standing: Sequence[Step]) -> None:
    """Remove the marks of undone steps from nodes that no remaining step has marked."""
    signature = undone[0].signature
    held = {name for step in standing if step.signature == signature for name in step.marked}
    for node in marked_nodes(graph_module, signature):
        if node.name not in held:
            unmark(node, signature)
