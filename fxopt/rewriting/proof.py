"""The proof of a rule: both functions of a pattern run on random values, weights and numbers."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import io
import itertools
import math
import pickle
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.fx import Node

from fxopt import graph
from fxopt.compare import Unlike, epsilon, norm_error, pairs, rounds, row_error, text_of
from fxopt.errors import PassError, error_text
from fxopt.float64 import Float64
from fxopt.graph_index import GraphIndex
from fxopt.memory import storage_of
from fxopt.rewriting.function_graph import FunctionGraph, trace_function
from fxopt.rewriting.random_inputs import (
    FAR,
    LARGE,
    ZERO_OR_ONE,
    Numbers,
    has_integers,
    is_finite,
    number_of,
    number_with,
)

RTOL = 1e-9
"""Limit of the error in float64, relative to the largest value of a row."""

NUMBERS = (0.3, -1.7)
"""Numbers that take the place of the number of a site in further proofs."""


MOST_ROUNDING = 1000
"""How many times the rounding error of the pattern, or the unit of rounding, the replacement may have."""


_NEAR = (-9, 10)  # integers


class _DoesNotRunError(Exception):
    """The pattern does not run on some values."""


class Rule(Protocol):
    """Two functions, of which one takes the place of the other."""

    @property
    def signature(self) -> str: ...
    def refuses(self, *values: Any, **named: Any) -> str | None: ...


@dataclasses.dataclass(frozen=True)
class Proof:
    """The result of a proof.

    Attributes:
        reason: why a rule cannot be applied to such values; `None` where it is right.
        moves: the parameters that the result of one function is, or shares memory with, and that of the other is not.
        strides: those of the result, but for dimensions of size 1.
        steps: the calls of the replacement that was proved.
    """

    reason: str | None = None
    moves: frozenset[str] = frozenset()
    strides: Sequence[int] = ()
    steps: tuple[Any, ...] = ()


_PROOFS: weakref.WeakKeyDictionary[type, dict[tuple[Any, ...], Proof]] = weakref.WeakKeyDictionary()


def prove(
    rule: Rule,
    values: Mapping[str, Any],
    floats: Sequence[str],
    index: GraphIndex,
    own_layers: bool = False,
) -> Proof:
    """Run both functions of a rule on values like those of a place; what was proved is not proved again.

    Args:
        rule: the rule.
        values: the nodes, numbers and layers of the place, by parameter.
        floats: the parameters that are floating numbers.
        index: of the graph.
        own_layers: whether to take copies of the layers with their own weights.

    Raises:
        PassError: the functions differ.
    """
    described = {name: graph.value_of(value) for name, value in values.items() if isinstance(value, Node)}
    if not all(isinstance(value, Tensor) for value in described.values()):
        return Proof("the shape of an input is unknown: capture the model with fxopt.trace")
    place = _Place(rule, values, {**values, **described}, index.graph_module.training, own_layers)
    proofs = _PROOFS.setdefault(type(rule), {})
    try:
        kinds = [*map(_kind, place.described.values())]
    except Exception:  # a layer may hold what cannot be pickled
        return place.proof_with_numbers(floats)
    key = rule.signature, place.trains, *kinds
    if key in proofs and not own_layers:
        return proofs[key]
    found = place.proof_with_numbers(floats)
    if not place.needs_own_layers:
        proofs[key] = found
    return found


@dataclasses.dataclass
class _Place:
    """A place where a rule is to be proved.

    Attributes:
        rule: the rule.
        values: the nodes, numbers and layers, by parameter.
        described: the same, with descriptions of tensors in the place of nodes.
        trains: whether the graph is in training mode.
        needs_own_layers: whether the rule refuses layers with other weights, as far as known.
    """

    rule: Rule
    values: Mapping[str, Any]
    described: Mapping[str, Any]
    trains: bool
    needs_own_layers: bool = False

    def proof_with_numbers(self, floats: Sequence[str]) -> Proof:
        """The proof for the numbers of this place, and for others in the place of floating ones."""
        found = self.proof({})
        for number in NUMBERS if floats and not found.reason else ():
            others = dict.fromkeys(floats, number)
            if not self.rule.refuses(**{**self.values, **others}):
                self.proof(others)
        return found

    def proof(self, others: Mapping[str, float]) -> Proof:
        """The proof, with some other numbers."""
        found: Proof | None = None
        described = {**self.described, **others}
        ranges = (FAR, _NEAR, ZERO_OR_ONE) if has_integers(described.values()) else (_NEAR,)
        for sizes in _ways_of_sizes(described):
            for integers in ranges:
                try:
                    proof = self._tried(described, Numbers(None, sizes, integers))
                except _DoesNotRunError as error:
                    failed = Proof(str(error))
                    continue
                if proof.reason:
                    return proof
                found = found or proof
                if integers != FAR:  # what is far apart hides what is near 0
                    break
        for numbers in self._near_constants(described) if found else ():
            with contextlib.suppress(_DoesNotRunError):
                proof = self._tried(described, numbers)
                if proof.reason:
                    return proof
        return found or failed

    def _near_constants(self, described: Mapping[str, Any]) -> Iterator[Numbers]:
        """Ways to draw numbers near those that stand in the pattern: as many as hold all of them, and at most 4."""
        pattern = trace_function(self.rule, "pattern", _without_tensors(described)).graph
        constants = [number for number in graph.numbers_in(pattern.nodes) if abs(number) < LARGE]
        counts = [
            math.prod(map(number_of, value.shape))
            for value in described.values()
            if isinstance(value, Tensor)
        ]
        turns = math.ceil(3 * len(constants) / max(1, min(counts, default=1)))
        # The second may be indices.
        ranges = (_NEAR, ZERO_OR_ONE) if has_integers(described.values()) else (_NEAR,)
        for turn, integers in itertools.product(range(min(4, turns)), ranges):
            yield Numbers(None, integers=integers, constants=constants, turn=turn)

    def _tried(self, described: Mapping[str, Any], numbers: Numbers) -> Proof:
        """The proof on one draw of values."""
        drawn = self._drawn(described, numbers)
        given = ", ".join(f"{name}={text_of(value)}" for name, value in drawn.items())
        try:
            truth = _run(self.rule, "pattern", drawn, self.trains)
        except Exception as error:  # an index is too large, or a size is no multiple of another
            text = error_text(error)
            raise _DoesNotRunError(f"pattern does not run on random values ({text}); for {given}") from error
        if numbers.integers == FAR and not is_finite(truth.wide):
            raise _DoesNotRunError("far integers overflow")  # such as an exponential
        return self._compared(drawn, truth, given)

    def _compared(self, drawn: Mapping[str, Any], truth: _Run, given: str) -> Proof:
        """The replacement on the same values as the pattern."""
        try:
            made = _run(self.rule, "replacement", drawn, self.trains)
        except PassError:
            raise
        except (
            AttributeError,
            ImportError,
            NameError,
            TypeError,
        ) as error:  # a slip of the author, at any site
            text = f"replacement raises {error_text(error)}; for {given}"
            if "NoneType" in str(error):  # this layer has no bias, and others have
                return Proof(text)
            raise PassError(f"{self.rule!r} is wrong: {text}") from error
        except Exception as error:  # what the author calls may raise anything
            return Proof(f"replacement raises {error_text(error)}; for {given}")
        if made.graph.draws:
            return Proof("replacement draws random numbers")
        reason = _difference(truth, made)
        if reason:
            raise PassError(f"{self.rule!r} is wrong: for {given}, {reason}")
        if truth.strides != made.strides:
            return Proof("replacement gives another layout in memory")
        errors = [norm_error(truth.wide, each.own, integers=True) for each in (truth, made)]
        if errors[1] > MOST_ROUNDING * max(errors[0], epsilon(truth.own)):
            return Proof(
                f"replacement is off by {errors[1]:.2g} of the norm, by rounding; pattern by {errors[0]:.2g}"
            )
        moves = frozenset(name for name, _ in truth.shares ^ made.shares)
        return Proof(None, moves, truth.strides, made.graph.steps)

    def _drawn(self, described: Mapping[str, Any], numbers: Numbers) -> dict[str, Any]:
        """Random values for descriptions, and copies of layers with random weights, or with their own where the rule refuses these."""
        drawn = {name: _drawn(value, seed, numbers) for seed, (name, value) in enumerate(described.items())}
        layers = {name: value for name, value in drawn.items() if isinstance(value, nn.Module)}
        plain = {name: value for name, value in described.items() if not isinstance(value, Tensor)}
        if layers and (self.needs_own_layers or self.rule.refuses(**{**self.values, **plain, **layers})):
            self.needs_own_layers = True
            drawn |= {name: copy.deepcopy(described[name]).cpu() for name in layers}
        return drawn


@dataclasses.dataclass(frozen=True)
class _Run:
    """A function as a graph, its result in its own dtype and in float64, its gradients, and what it did to memory."""

    graph: FunctionGraph
    own: Any
    wide: Any
    gradients: Any
    inputs: Any
    strides: Any
    shares: set[tuple[str, str]]


def _without_tensors(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: None if isinstance(value, Tensor) else value for name, value in values.items()}


def _run(rule: Rule, method: str, drawn: Mapping[str, Any], trains: bool) -> _Run:
    # Computed as in the graph that is rewritten: by traced calls, of layers that are made without gradients.
    def traced(values: Mapping[str, Any]) -> FunctionGraph:
        return trace_function(rule, method, _without_tensors(values))

    given = copy.deepcopy(dict(drawn))
    made = traced(given)
    with torch.no_grad():
        own = made.run(given)
    wide, gradients = _in_float64(lambda values: traced(values).run(values), drawn, trains)
    inputs = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    one = own if isinstance(own, Tensor) else torch.empty(0)
    shares = {(name, "memory") for name, value in inputs.items() if storage_of(value) == storage_of(one)}
    shares |= {(name, "identity") for name, value in inputs.items() if value is own}
    return _Run(made, own, wide, gradients, inputs, strides_of(one), shares)


def strides_of(value: Tensor) -> list[int]:
    """The strides of a tensor or its description in the example, but for dimensions of size 1."""
    sizes = zip(value.stride(), value.shape, strict=True)
    return [number_of(step) for step, size in sizes if number_of(size) > 1]


def _in_float64(
    function: Callable[[Mapping[str, Any]], Any], drawn: Mapping[str, Any], trains: bool
) -> tuple[Any, list[Tensor]]:
    """The result in float64, and the gradients that the inputs get from it in training."""
    given = {name: _wide(value) for name, value in copy.deepcopy(dict(drawn)).items()}
    for layer in (value for value in given.values() if isinstance(value, nn.Module)):
        layer.requires_grad_(False)  # a replacement changes copies of weights
    inputs = [v.requires_grad_() for v in given.values() if isinstance(v, Tensor) and v.is_floating_point()]
    with torch.set_grad_enabled(trains), Float64():
        # A function may write into its inputs, and torch forbids writes into leaves.
        out = function(
            {n: v * 1 if isinstance(v, Tensor) and v.requires_grad else v for n, v in given.items()}
        )
        found: Sequence[Tensor | None] = [None] * len(inputs)
        if inputs and isinstance(out, Tensor) and out.requires_grad:
            found = torch.autograd.grad(out.sin().sum(), inputs, allow_unused=True)
    return out, [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)]


def _difference(truth: _Run, made: _Run) -> str | None:
    what = "the value"
    try:
        pairs(truth.own, made.own)
        results = {"the value": (truth.wide, made.wide), "the gradient": (truth.gradients, made.gradients)}
        for what, (expected, actual) in results.items():
            pairs(expected, actual, dtypes=False)
            if (error := row_error(expected, actual, 1e-30)) > RTOL:
                return (
                    f"{what} of replacement is off by {error:.2g} of the largest value in its row, in float64"
                )
    except Unlike as differs:
        return f"{what} of replacement is {differs.actual}, it was {differs.expected}"
    if row_error(truth.inputs, made.inputs, 1e-30) > 0:
        return "replacement writes into its inputs"
    return None


def _ways_of_sizes(values: Mapping[str, Any]) -> Iterator[Callable[[Any], int]]:
    """The sizes of the example, and where some are free, others."""
    yield number_of
    sizes: list[Any] = [
        size for value in values.values() if isinstance(value, Tensor) for size in value.shape
    ]
    symbols = {
        symbol for size in sizes if isinstance(size, torch.SymInt) for symbol in size.node.expr.free_symbols
    }
    drawn = [
        functools.partial(
            number_with, {symbol: least + place for place, symbol in enumerate(sorted(symbols, key=str))}
        )
        for least in ((5, 7, 11, 100) if symbols else ())
    ]
    # The length behind a convolution may be negative for short inputs.
    possible = [size_of for size_of in drawn if all(size_of(size) > 0 for size in sizes)]
    free = [size for size in sizes if isinstance(size, torch.SymInt)]
    # A replacement with the size of the example in it holds for that size.
    possible.sort(key=lambda size_of: sum(size_of(size) == number_of(size) for size in free))
    yield from possible[:1]


def _drawn(value: Any, seed: int, numbers: Numbers) -> Any:
    """Random values for a description, a copy of a layer with other weights, or the number itself."""
    if not isinstance(value, nn.Module):
        return numbers.like(value.cpu(), seed) if isinstance(value, Tensor) else value
    generator, layer = torch.Generator().manual_seed(seed), copy.deepcopy(value).cpu()
    for tensor in filter(rounds, (*layer.parameters(), *layer.buffers())):
        tensor.data += torch.rand(tensor.shape, generator=generator).to(tensor.dtype)
    for parameter in filter(rounds, layer.parameters()):  # buffers may be variances
        parameter.data *= torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
    return layer


def _wide(value: Any) -> Any:
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.double() if floating or isinstance(value, nn.Module) else value


def _kind(value: Any) -> Any:
    """The property of a value for which a proof holds."""
    if isinstance(value, Tensor):
        return value.dtype, str(tuple(value.shape)), str(value.stride())
    kind = io.BytesIO()
    _WithoutDrawnNumbers(kind).dump(value)
    return kind.getvalue()


class _WithoutDrawnNumbers(pickle.Pickler):
    """Pickles a layer without the numbers that a proof draws."""

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        return str(value.dtype), tuple(value.shape), None if rounds(value) else value.tolist()
