"""The proof of a rule: both functions of a pattern are run on random values, weights and numbers, and compared."""

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
"""Numbers that replace the floating numbers of a site in further proofs."""


MOST_ROUNDING = 1000
"""Limit of the replacement's rounding error, as a multiple of the pattern's, or of the rounding unit if that is larger."""


_NEAR = (-9, 10)  # integers


class _DoesNotRunError(Exception):
    """The pattern raises on some random values."""


class Rule(Protocol):
    """Two functions, `pattern` and `replacement`; the second replaces the first."""

    @property
    def signature(self) -> str: ...
    def refuses(self, *values: Any, **named: Any) -> str | None: ...


@dataclasses.dataclass(frozen=True)
class Proof:
    """The result of a proof.

    Attributes:
        reason: why the rule cannot be applied to such values; `None` if it can.
        moves: the parameters that are the result of, or share memory with the result of, only one of the two functions.
        strides: the strides of the result, without those of dimensions of size 1.
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
    """Run both functions of a rule on values like those of a site; results are cached by rule and kind of values.

    Args:
        rule: the rule.
        values: the nodes, numbers and layers of the site, by parameter.
        floats: the parameters that are floating numbers.
        index: the index of the graph.
        own_layers: run copies of the layers with the weights of the site, instead of random weights.

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
    except Exception:  # a layer may hold an object that cannot be pickled
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
    """A site where a rule is to be proved.

    Attributes:
        rule: the rule.
        values: the nodes, numbers and layers, by parameter.
        described: `values` with each node replaced by a description of its tensor.
        trains: whether the graph is in training mode.
        needs_own_layers: whether proofs keep the weights of the layers; set when the rule refuses random weights.
    """

    rule: Rule
    values: Mapping[str, Any]
    described: Mapping[str, Any]
    trains: bool
    needs_own_layers: bool = False

    def proof_with_numbers(self, floats: Sequence[str]) -> Proof:
        """Prove the rule for the numbers of this site, and for other floating numbers."""
        found = self.proof({})
        for number in NUMBERS if floats and not found.reason else ():
            others = dict.fromkeys(floats, number)
            if not self.rule.refuses(**{**self.values, **others}):
                self.proof(others)
        return found

    def proof(self, others: Mapping[str, float]) -> Proof:
        """Prove the rule; `others` replaces numbers of the site, by parameter."""
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
                if integers != FAR:  # large distances hide errors near 0
                    break
        for numbers in self._near_constants(described) if found else ():
            with contextlib.suppress(_DoesNotRunError):
                proof = self._tried(described, numbers)
                if proof.reason:
                    return proof
        return found or failed

    def _near_constants(self, described: Mapping[str, Any]) -> Iterator[Numbers]:
        """Yield ways to draw numbers near the constants of the pattern: enough draws to use all constants, but at most 4."""
        pattern = trace_function(self.rule, "pattern", _without_tensors(described)).graph
        constants = [number for number in graph.numbers_in(pattern.nodes) if abs(number) < LARGE]
        counts = [
            math.prod(map(number_of, value.shape))
            for value in described.values()
            if isinstance(value, Tensor)
        ]
        turns = math.ceil(3 * len(constants) / max(1, min(counts, default=1)))
        # The second range is for integers that are indices.
        ranges = (_NEAR, ZERO_OR_ONE) if has_integers(described.values()) else (_NEAR,)
        for turn, integers in itertools.product(range(min(4, turns)), ranges):
            yield Numbers(None, integers=integers, constants=constants, turn=turn)

    def _tried(self, described: Mapping[str, Any], numbers: Numbers) -> Proof:
        """Prove the rule on one draw of values."""
        drawn = self._drawn(described, numbers)
        given = ", ".join(f"{name}={text_of(value)}" for name, value in drawn.items())
        try:
            truth = _run(self.rule, "pattern", drawn, self.trains)
        except Exception as error:  # an index is too large, or a size is not divisible
            text = error_text(error)
            raise _DoesNotRunError(f"pattern does not run on random values ({text}); for {given}") from error
        if numbers.integers == FAR and not is_finite(truth.wide):
            raise _DoesNotRunError("far integers overflow")  # for example in an exponential
        return self._compared(drawn, truth, given)

    def _compared(self, drawn: Mapping[str, Any], truth: _Run, given: str) -> Proof:
        """Run the replacement on the values of the pattern, and compare."""
        try:
            made = _run(self.rule, "replacement", drawn, self.trains)
        except PassError:
            raise
        except Exception as error:  # functions that the author calls may raise anything
            text = f"replacement raises {error_text(error)}; for {given}"
            of_author = isinstance(error, AttributeError | ImportError | NameError | TypeError)
            if of_author and "NoneType" not in str(error):  # else perhaps only this layer has no bias
                raise PassError(f"{self.rule!r} is wrong: {text}") from error
            return Proof(text)
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
        """Draw random values for descriptions; copy layers with random weights, or with their own if the rule refuses random ones."""
        drawn = {name: _drawn(value, seed, numbers) for seed, (name, value) in enumerate(described.items())}
        layers = {name: value for name, value in drawn.items() if isinstance(value, nn.Module)}
        plain = {name: value for name, value in described.items() if not isinstance(value, Tensor)}
        if layers and (self.needs_own_layers or self.rule.refuses(**{**self.values, **plain, **layers})):
            self.needs_own_layers = True
            drawn |= {name: copy.deepcopy(described[name]).cpu() for name in layers}
        return drawn


@dataclasses.dataclass(frozen=True)
class _Run:
    """A function as a graph, with its result in its own dtype and in float64, its gradients, and its effects on memory."""

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
    # As in the rewritten graph: the traced calls are run, and new layers are made without gradients.
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
    """The strides of a tensor, or of its description, for the sizes of the example; dimensions of size 1 are left out."""
    sizes = zip(value.stride(), value.shape, strict=True)
    return [number_of(step) for step, size in sizes if number_of(size) > 1]


def _in_float64(
    function: Callable[[Mapping[str, Any]], Any], drawn: Mapping[str, Any], trains: bool
) -> tuple[Any, list[Tensor]]:
    """Compute a function in float64; returns the result, and the gradients of the inputs if the graph is in training mode."""
    given = {name: _wide(value) for name, value in copy.deepcopy(dict(drawn)).items()}
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
    """Yield functions for the sizes of the example and, if some are dynamic, for larger sizes, all different."""
    yield number_of
    shapes = (value.shape for value in values.values() if isinstance(value, Tensor))
    sizes: list[Any] = [size for shape in shapes for size in shape if isinstance(size, torch.SymInt)]
    symbols = {symbol: size for size in sizes for symbol in size.node.expr.free_symbols}
    # Larger than in the example, because a convolution may accept no shorter inputs, and than a small number in the replacement.
    numbers = {
        symbol: max(4, int(symbols[symbol].node.shape_env.backed_var_to_val.get(symbol, 4))) + 1 + place
        for place, symbol in enumerate(sorted(symbols, key=str))
    }
    if numbers:
        yield functools.partial(number_with, numbers)


def _drawn(value: Any, seed: int, numbers: Numbers) -> Any:
    """Draw random values for a description, or copy a layer with other weights; numbers are returned as they are."""
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
    """The properties of a value on which a proof depends."""
    if isinstance(value, Tensor):
        return value.dtype, str(tuple(value.shape)), str(value.stride())
    kind = io.BytesIO()
    _WithoutDrawnNumbers(kind).dump(value)
    return kind.getvalue()


class _WithoutDrawnNumbers(pickle.Pickler):
    """Pickles a layer without the floating values that a proof replaces by random ones."""

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        return str(value.dtype), tuple(value.shape), None if rounds(value) else value.tolist()
