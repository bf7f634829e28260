"""Translation validation: both pieces of a rewritten site run on random inputs, and must give equal results.

The model itself is not run: the log of the rewriter tells which nodes a site had before and has after the rewrite, and
the metadata of the nodes around the site gives shapes and dtypes of its inputs.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from fxopt import graph
from fxopt.compare import Unlike, epsilon, norm_error, pairs, row_error
from fxopt.constants import computed_constant, constants_of, is_changing
from fxopt.errors import PassError, UnverifiedWarning, error_text, warn
from fxopt.float64 import Float64, wide_dtype
from fxopt.graph_index import GraphIndex
from fxopt.memory import storage_of
from fxopt.outputs import tensors
from fxopt.rewriting.edits import Edit, NodeState
from fxopt.rewriting.host_first import errors_of_the_host
from fxopt.rewriting.piece import Piece, Read
from fxopt.rewriting.random_inputs import (
    ANY_SIGN,
    FAR,
    LARGE,
    ZERO_OR_ONE,
    Numbers,
    has_integers,
    is_finite,
    number_of,
    resized,
)
from fxopt.rewriting.snapshot import Snapshot
from fxopt.submodules import attribute, prefixes, sharing_copy, weights_of
from fxopt.torch_internals import FakeTensorMode, is_erased, pytree

Verify = bool | tuple[Any, ...]
"""True to verify, or example inputs of the graph module, from which nodes without metadata get shapes and dtypes."""

RTOL = 1e-9
"""Limit of the difference of both pieces in float64, relative to the largest value of a row, if no weights were rounded."""

SMALLEST = 1e-6
"""Lower bound for the largest value of a row, in nodes around a site, where values may cancel out."""


class Verifier:
    """Compares the pieces of rewritten sites of one graph module, if `verify` asks for it.

    Attributes:
        verifies: whether sites are compared.
        unverified: why sites could not be verified, by the node where this failed; an empty name stands for all sites.
    """

    def __init__(self, pass_: Any, graph_module: GraphModule, verify: Verify) -> None:
        if not isinstance(verify, bool | tuple):
            raise TypeError(
                f"verify is of type {type(verify).__name__}; give True, or a tuple of example inputs"
            )
        self.unverified: dict[str, str] = {}
        self._pass, self.verifies = pass_, verify is not False
        self._preserves, self._tolerance = pass_.preserves_computation, pass_.tolerance
        if not self.verifies:
            return
        self._graph_module = graph_module
        self._values = _described(graph_module, verify) if isinstance(verify, tuple) else {}
        self._nodes: Mapping[str, Node] = {}
        index, env = GraphIndex(graph_module), graph.shape_env_of(graph_module)
        self._constants = constants_of(index, freeze=True)
        guard = index.module(index.guard) if index.guard else None
        self._doubled = resized(env, guard, lambda size: 2 * size) or number_of
        self._ones = resized(env, guard, lambda size: 1)

    def difference(self, edits: Sequence[Edit], before: Snapshot, made: Mapping[str, Node]) -> str | None:
        """Compare a site before and after its changes.

        Args:
            edits: all changes of the site, with the modules and tensors that were swapped.
            before: the graph module before the changes.
            made: the nodes that were created, by name.

        Returns:
            The difference, in words; None if the pieces agree, or if the site cannot be run.
        """
        if not self.verifies:
            return None
        if not self._preserves and self._tolerance is None:
            self.unverified[""] = "it states neither `preserves_computation = True` nor a `tolerance`"
        # After a roll back, another node may have the same name.
        there = {node.name: node for node in before.graph_module.graph.nodes}
        self._nodes = {**before.nodes, **made, **there}
        try:
            piece = self._piece(edits, before)
            reason = _thawed(piece) if self._preserves else None
            reason = reason or self._compared(piece)
        except _CannotRun as error:
            self.unverified[graph.place(error.node) if error.node else ""] = str(error)
            return None
        # A changed node may compensate for another one through untouched nodes between them.
        whole = self._piece(edits, before, whole=True) if reason else None
        if whole and whole.between:
            with contextlib.suppress(_CannotRun):
                return self._compared(whole)
        return reason

    def report(self) -> None:
        """Warn of the sites that could not be verified."""
        for where, why in self.unverified.items():
            site = f"the site at {where}" if where else "its sites"
            warn(f"{self._pass!r} could not verify {site}: {why}", UnverifiedWarning)

    def _piece(self, edits: Sequence[Edit], before: Snapshot, *, whole: bool = False) -> Piece:
        return Piece(before, self._nodes, edits, around=self._preserves, whole=whole)

    def _compared(self, piece: Piece) -> str | None:
        dtype, even = torch.float64 if self._preserves else None, not self._preserves
        smaller = self._smaller_sizes(piece)

        def small(size: Any) -> int:
            return smaller.get(self._doubled(size), self._doubled(size))

        ways = [
            Numbers(None, integers=ZERO_OR_ONE, even=even),
            Numbers(dtype, integers=ZERO_OR_ONE, even=even),
            Numbers(dtype, even=even),
            Numbers(dtype, integers=ANY_SIGN, even=even),
        ]
        doubled = [self._doubled] if self._doubled is not number_of else []
        for size_of in (*doubled, small) if smaller else doubled:
            ways += [dataclasses.replace(way, size_of=size_of) for way in ways[2:4]]
        while True:
            try:
                reason = self._differs(piece, ways[-1])
                if reason is None:
                    return self._differs_further(piece, ways[-1])
                if ways[-1].size_of is not small:
                    return reason
                ways = [way for way in ways if way.size_of is not small]  # the graph may contain its sizes
            except _Stopped as stopped:
                if stopped.name in piece.around and ways[-1].integers == ZERO_OR_ONE:
                    piece.leave_out(stopped.name)
                elif len(ways) > 1:
                    ways.pop()
                else:
                    raise stopped.reason from stopped

    def _differs_further(self, piece: Piece, way: Numbers) -> str | None:
        """Compare with dynamic sizes of 1, on integers near and far from 0, and near constants, if the earlier piece runs on these."""
        ways = [dataclasses.replace(way, size_of=self._ones)] if self._ones else []
        if way.integers == ANY_SIGN and has_integers(self._tensors(piece)):
            ways += [dataclasses.replace(way, integers=each) for each in (FAR, ZERO_OR_ONE)]
            ways.append(dataclasses.replace(way, constants=[c for c in piece.constants if abs(c) < LARGE]))
        for way in ways:
            with contextlib.suppress(_Stopped):
                if reason := self._differs(piece, way):
                    return reason
        return None

    def _tensors(self, piece: Piece) -> list[Tensor]:
        """The descriptions of the input tensors of a piece; empty if one is unknown."""
        try:
            values = [self._value(self._nodes[name]) for name in piece.inputs]
        except _CannotRun:
            return []
        return tensors(values)

    def _smaller_sizes(self, piece: Piece) -> dict[int, int]:
        """Map each large size of the inputs to a small one, unless weights or arguments contain the size, too.

        Small sizes save most of the work. If the pieces differ on them, they are compared again with larger sizes.
        """
        weights = [w for s in piece.before.values() for w in weights_of(self._standing(s, piece.taken))]
        sizes = {self._doubled(size) for tensor in self._tensors(piece) for size in tensor.shape}
        sizes -= {*piece.constants}.union(*(weight.shape for weight in weights))
        return {size: 16 + number for number, size in enumerate(sorted(s for s in sizes if s > 32))}

    def _differs(self, piece: Piece, numbers: Numbers) -> str | None:
        """Compare on random numbers and, if no changed node mixes values, on multiples of the constants."""
        units: list[float | None] = [None]
        if self._preserves and not piece.changes_mix:
            units += [c for c in piece.constants if 1 < abs(c) < LARGE][:2] or [1]
        runs = (self._differs_on(piece, dataclasses.replace(numbers, unit=unit)) for unit in units)
        return next(filter(None, runs), None)

    def _differs_on(self, piece: Piece, numbers: Numbers) -> str | None:
        inputs, own_numbers = dict[str, Any](), dataclasses.replace(numbers, dtype=None)
        truth = self._run(piece, False, inputs, numbers)
        if numbers.integers == FAR and not is_finite(truth):
            return None  # far integers overflow, for example in an exponential
        try:
            result = self._run(piece, True, inputs, numbers)
        except _Stopped as stopped:
            if numbers.dtype:  # perhaps the node does not support float64
                return self._differs_on(piece, own_numbers)
            if numbers.integers in (ANY_SIGN, FAR) and stopped.name not in piece.around:
                raise  # perhaps the node uses the integers as indices
            return f"{stopped.name} no longer runs: {stopped.reason}"
        labels = [*(now for _, now in piece.outputs), *(read.new for read in piece.reads)]
        for label, expected, actual in zip(labels, truth, result, strict=True):
            try:
                pairs(expected, actual, dtypes=self._preserves)
            except Unlike as differs:
                if numbers.dtype:  # perhaps a node names the dtype of the model
                    return self._differs_on(piece, own_numbers)
                return f"{label} is {differs.actual}, it was {differs.expected}"
        if not self._preserves:
            return self._beyond_tolerance(labels, truth, result)
        least = [SMALLEST if label in piece.around else 1e-30 for label in labels]
        # In its own dtype, fused attention on a GPU rounds by 80 units; in bfloat16, 128 units are as large as a value.
        limits = [RTOL if numbers.dtype else min(128 * epsilon(truth), 0.5)] * len(labels)
        errors = [*map(row_error, truth, result, least)]
        is_beyond = any(error > limit for error, limit in zip(errors, limits, strict=True))
        if is_beyond and numbers.dtype and piece.rounds:
            own = self._run(piece, False, inputs, own_numbers)
            limits = [4 * error + 16 * epsilon(own) for error in map(row_error, truth, own, least, own)]
            errors = [*map(row_error, truth, result, least, own)]
        elif is_beyond and not numbers.dtype:  # rounding may take the new piece as far as the old one
            with contextlib.suppress(_Stopped), Float64():
                exact = self._run(piece, False, inputs, dataclasses.replace(numbers, dtype=torch.float64))
                rounding = [*map(row_error, exact, truth, least)]
                if max(rounding) < math.inf:
                    limits = [4 * error + 16 * epsilon(truth) for error in rounding]
                    errors = [*map(row_error, exact, result, least)]
        for label, error, limit in zip(labels, errors, limits, strict=True):
            if error > limit:
                return f"{label} differs by {error:.2g} of the largest value in its row; the limit is {limit:.2g}"
        for label, other in self._shared(piece, result) - self._shared(piece, truth):
            return f"the graph returns {label}, which shares memory with {other} now"
        return None

    def _shared(self, piece: Piece, values: Sequence[Any]) -> set[tuple[str, str]]:
        """Pairs of a value that the graph returns and a graph input that share memory, after a piece was run."""
        memory = ({*map(storage_of, tensors(value))} for value in values)
        found = dict(zip(piece.outputs, memory, strict=False))
        inputs = [name for name in piece.inputs if self._nodes[name].op in ("placeholder", "get_attr")]
        return {
            (pair[0], name) for pair in piece.returned for name in inputs if found[pair] & found[name, name]
        }

    def _beyond_tolerance(
        self, labels: Sequence[str], truth: Sequence[Any], result: Sequence[Any]
    ) -> str | None:
        if self._tolerance is not None:
            for label, expected, actual in zip(labels, truth, result, strict=True):
                error = norm_error(expected, actual, integers=True)
                if not error <= self._tolerance:
                    return f"{label} moves by {error:.2g} of its norm; the tolerance is {self._tolerance:.2g}"
        return None

    def _value(self, node: Node) -> Any:
        """A tensor without data, or a number, that describes the value of a node."""
        if node.op == "get_attr":
            return attribute(self._graph_module, str(node.target))
        value = self._values.get(node.name, graph.value_of(node))
        if value is None:
            raise _CannotRun(
                "its shape is unknown: trace with fxopt.trace, run torch.fx.passes.fake_tensor_prop.FakeTensorProp, "
                "or give example inputs as verify=(x, ...)",
                node,
            )
        return value

    def _input(self, node: Node, numbers: Numbers) -> Any:
        if (node in self._constants or not is_changing(node)) and not is_erased(node):
            return computed_constant(self._graph_module, node, {})
        value, seed = self._value(node), zlib.crc32(node.name.encode())
        return (
            value if node.op == "get_attr" else pytree.tree_map(lambda leaf: numbers.like(leaf, seed), value)
        )

    def _run(self, piece: Piece, after: bool, inputs: dict[str, Any], numbers: Numbers) -> list[Any]:
        """Run one of the two pieces; returns its `outputs` at the end, and the values of its `reads`, taken before later writes."""
        values, early, reads = dict[str, Any](), dict[Read, Any](), piece.read_before(after)

        def value(name: str) -> Any:
            if name not in values:
                if name not in inputs:
                    inputs[name] = self._input(self._nodes[name], numbers)
                values[name] = pytree.tree_map(lambda leaf: _cast(leaf, numbers.dtype), inputs[name])
            return values[name]

        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(0)
            for name, state in (piece.after if after else piece.before).items():
                early |= {read: _cast(value(read[1 + after]), None) for read in reads.get(name, ())}
                try:
                    args, kwargs = state.arguments(value)
                    standing = _cast(
                        self._standing(state, piece.put if after else piece.taken), numbers.dtype
                    )
                    with errors_of_the_host():
                        values[name] = _called(state, standing, args, kwargs)
                except Exception as error:  # a function may not accept random inputs
                    raise _Stopped(name, error) from error
            found_early = (early[read] if read in early else value(read[1 + after]) for read in piece.reads)
            return [*(value(pair[after]) for pair in piece.outputs), *found_early]

    def _standing(self, state: NodeState, swapped: Mapping[str, Any]) -> Any:
        """The module or tensor that a node calls or reads, looked up in `swapped` first; None for other nodes."""
        if state.op not in ("call_module", "get_attr"):
            return None
        for prefix in prefixes(state.target):
            if swapped.get(prefix) is not None:
                value, rest = swapped[prefix], state.target[len(prefix) + 1 :]
                return functools.reduce(getattr, rest.split(".") if rest else (), value)
        return attribute(self._graph_module, state.target)


def _thawed(piece: Piece) -> str | None:
    """Return a reason if new weights require gradients and none of the replaced weights did."""
    taken, put = (
        [w.requires_grad for value in values.values() for w in weights_of(value)]
        for values in (piece.taken, piece.put)
    )
    if taken and not any(taken) and any(put):
        return f"the weights of {', '.join(piece.put)} require gradients now"
    return None


class _CannotRun(Exception):
    def __init__(self, text: str, node: Node | None = None) -> None:
        super().__init__(text)
        self.node = node


class _Stopped(Exception):
    """An error that a node of a piece raised."""

    def __init__(self, name: str, error: Exception) -> None:
        self.name, text = name, f"it cannot be run on random inputs ({error_text(error)})"
        self.reason = error if isinstance(error, _CannotRun) else _CannotRun(text)


def _called(state: NodeState, standing: Any, args: Any, kwargs: Any) -> Any:
    if state.op.startswith("call"):
        return graph.called_with(state, standing, args, kwargs)
    return args[0] if state.op == "output" else standing


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    """Copy a tensor or module, with floating and complex numbers in `dtype`; other values are returned as they are."""
    memo: dict[int, Any] = {}
    for tensor in weights_of(value):
        if tensor.is_meta:
            raise _CannotRun("its weights are on the meta device")
        wide = tensor.detach().to(wide_dtype(tensor, dtype), copy=True)
        memo[id(tensor)] = nn.Parameter(wide, False) if isinstance(tensor, nn.Parameter) else wide
    return copy.deepcopy(value, memo) if isinstance(value, Tensor | nn.Module) else value


def _described(graph_module: GraphModule, inputs: tuple[Any, ...]) -> dict[str, Any]:
    """Describe the value of each node by tensors without data, given example inputs."""
    described, mode = sharing_copy(graph_module), FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with torch.no_grad():
            FakeTensorProp(described, mode).propagate(*inputs)
    except Exception as error:  # a graph may raise anything on wrong inputs
        raise PassError(
            f"verify: the graph module does not take these example inputs ({error_text(error)})"
        ) from error
    return {node.name: node.meta.get("val") for node in described.graph.nodes}
