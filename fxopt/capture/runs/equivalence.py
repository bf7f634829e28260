"""Compares two runs of one forward: whether their graphs compute the same, and under which guards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch

from fxopt.capture.fakes.shape_env import LEARNED
from fxopt.capture.fakes.size_constraints import guards_of
from fxopt.capture.nodes.comparison import (
    Aliases,
    Pairs,
    matched_unbacked_symbols,
    paired_calls,
    same_calls,
    same_constants,
    same_expression,
    same_results,
    views_of_same_shape,
)
from fxopt.capture.runs.run_result import RunResult
from fxopt.capture.runtime.size_guards import SizeGuard


def equivalent(capture: RunResult, other: RunResult) -> bool:
    """Tell whether the graph of a capture computes the same as that of `other`, a capture with other outcomes."""
    pairs = paired_calls(capture.graph, other.graph)
    names = matched_unbacked_symbols(pairs)
    if names is None or _assumed_of_numbers(capture, {}) != _assumed_of_numbers(other, names):
        return False
    translated = translation(capture, other, names)
    same_size = size_comparison(capture, translated)

    return (
        capture.changes == other.changes
        and capture.state == other.state
        and capture.reads.answers() == other.reads.answers()
        and _same_guards(capture, other, translated)
        and _same_graph(capture, other, same_size)
        and same_results(pairs, same_size)
    )


def subsumes(
    capture: RunResult, other: RunResult, pairs: Pairs, aliases: Mapping[torch.fx.Node, torch.fx.Node]
) -> bool:
    """Tell whether the graph of a capture computes all that the graph of `other` does; `pairs` are their common calls."""
    names = matched_unbacked_symbols(pairs)
    if names is None or not _assumed_of_numbers(capture, {}) >= _assumed_of_numbers(other, names):
        return False
    same_size = size_comparison(capture, translation(capture, other, names))
    constants, others = capture.constants, other.constants
    return (
        assumes_all_of(capture, other, names)
        and constants.keys() >= others.keys()
        and same_constants({name: constants[name] for name in others}, others)
        and same_calls(pairs, same_size, aliases)
        and same_results(pairs, same_size)
    )


def assumes_all_of(capture: RunResult, other: RunResult, names: dict[Any, Any]) -> bool:
    """Tell whether a capture read, assumed and left all that `other` did; `names` translates the unbacked sizes of `other`."""
    translated = translation(capture, other, names)
    guards = capture.guards()
    own = {symbol: symbol for symbol in names.values()}
    return (
        capture.changes == other.changes
        and capture.state == other.state
        and capture.reads.cover(other.reads)
        and _same_dimensions(capture, other, translated)
        and all(guard in guards for guard in guards_of(other.relied_on(), translated))
        and _checked_of_numbers(capture, own) >= _checked_of_numbers(other, names)
    )


def is_steady_state(capture: RunResult, again: RunResult) -> bool:
    """Tell whether a second call, `again`, makes the same calls under the same guards and leaves the same state."""
    translated = translation(capture, again, {})
    same_size = size_comparison(capture, translated)

    return (
        _same_guards(capture, again, translated)
        and _same_graph(capture, again, same_size)
        and again.state == capture.state
        and not again.changed_outside
    )


def size_one_guards(capture: RunResult, other: RunResult, ones: Sequence[Any]) -> list[SizeGuard] | None:
    """Return the guards under which a graph is valid with the sizes `ones` set to 1, as in `other`; None if it is not."""
    mine, its = _free(capture), _free(other)
    if not its.keys() <= mine.keys():
        return None  # at size 1, the forward changes a number that it does not change at other sizes
    if not capture.reads.cover(other.reads):
        return None  # at size 1, the forward decides on a property that the graph does not check
    if capture.left_out.keys() != other.left_out.keys():
        return None  # at size 1, the graph would need checks that it does not have
    in_symbols = translation(capture, other, {})

    def at_one(expression: Any) -> Any:
        return capture.shape_env.replace(expression).xreplace(dict.fromkeys(ones, sympy.Integer(1)))

    def translated(expression: Any) -> Any:
        return at_one(in_symbols(expression))

    in_its = {mine[where]: symbol for where, symbol in its.items()}
    # Equalities of sizes that only the run at size 1 established.
    learned = [sympy.Eq(at_one(mine[where]), translated(symbol)) for where, symbol in its.items()]

    def same_size(one: Any, size: Any) -> bool:
        there = other.shape_env.replace(at_one(one).xreplace(in_its))
        return same_expression(at_one(one), translated(size)) or same_expression(
            there, other.shape_env.replace(size)
        )

    # At size 1, `if len(x) != len(positions): positions = positions.expand(len(x), -1)` changes nothing, executed or not.
    idle = {**views_of_same_shape(capture.graph, at_one), **views_of_same_shape(other.graph, translated)}
    if not _same_graph(capture, other, same_size, idle):
        return None
    conditions = [(equal, "the capture at size 1") for equal in learned]
    sizes = [SizeGuard(f"{symbol} == 1", "the capture at size 1") for symbol in ones]
    return (
        sizes
        + guards_of(conditions, at_one)
        + guards_of(other.relied_on(), translated)
        + guards_of(capture.free.asked(), at_one)
    )


def size_comparison(capture: RunResult, translated: Callable[[Any], Any]) -> Callable[[Any, Any], bool]:
    """Return a function that compares a size of `capture` with a size of another capture, after translating the latter."""
    return lambda mine, its: same_expression(capture.shape_env.replace(mine), translated(its))


def _free(capture: RunResult) -> dict[tuple[str, int | None], Any]:
    """Return the symbol of each dynamic dimension and number."""
    return {(free.where, free.dim): free.symbol for free in capture.free.dimensions}


def _assumed_of_numbers(capture: RunResult, names: dict[Any, Any]) -> set[Any]:
    """Return the conditions on unbacked sizes and the limits of these sizes, with symbols renamed by `names`."""
    shape_env = capture.shape_env
    asserts = (a for listed in shape_env.deferred_runtime_asserts.values() for a in listed)
    inputs = {free.symbol for free in capture.free.dimensions}
    unused = {symbol for symbol in shape_env.dropped if not capture.sizes.has_source(symbol)}
    limits = {
        (names.get(symbol, symbol), limit)
        for symbol, limit in shape_env.var_to_range.items()
        if symbol not in inputs | unused
    }
    return limits | {(a.expr.xreplace(names), None) for a in asserts}


def _checked_of_numbers(capture: RunResult, names: dict[Any, Any]) -> set[Any]:
    """Return the conditions on the unbacked sizes in `names` that the graph checks at its end, with symbols renamed."""
    asserts = (a for listed in capture.shape_env.deferred_runtime_asserts.values() for a in listed)
    known = names.keys() | {free.symbol for free in capture.free.dimensions}
    return {a.expr.xreplace(names) for a in asserts if a.msg != LEARNED and a.expr.free_symbols <= known}


def translation(capture: RunResult, other: RunResult, names: dict[Any, Any]) -> Callable[[Any], Any]:
    """Return a function that rewrites a size of `other` in the symbols of `capture`; `names` translates unbacked sizes."""
    mine = _free(capture)
    all_names = names | {symbol: mine[where] for where, symbol in _free(other).items() if where in mine}
    return lambda expression: capture.shape_env.replace(
        other.shape_env.replace(expression).xreplace(all_names)
    )


def _same_guards(capture: RunResult, other: RunResult, translated: Callable[[Any], Any]) -> bool:
    """Tell whether both captures assume the same about the sizes of the inputs."""
    guards = capture.guards()
    return _same_dimensions(capture, other, translated) and guards == guards_of(other.relied_on(), translated)


def _same_dimensions(capture: RunResult, other: RunResult, translated: Callable[[Any], Any]) -> bool:
    """Tell whether the same dimensions are static, and the same ones equal, in both captures."""
    mine = {where: capture.shape_env.replace(symbol) for where, symbol in _free(capture).items()}
    return mine == {where: translated(symbol) for where, symbol in _free(other).items()}


def _same_graph(
    capture: RunResult, other: RunResult, same_size: Callable[[Any, Any], bool], idle: Aliases | None = None
) -> bool:
    """Tell whether both graphs make the same calls on the same constants, except for `idle` views."""
    constants, others = capture.constants, other.constants
    pairs = paired_calls(capture.graph, other.graph, idle)
    return same_calls(pairs, same_size, idle) and same_constants(constants, others)
