"""The oracle, which judges whether one module computes the same as another."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt.capture.runs.first_difference import place_of_divergence
from fxopt.compare import Difference, checksum, epsilon, rounds, ulps, unchanged, unlike
from fxopt.float64 import in_float64
from fxopt.testing.divergence import Divergence, divergence
from fxopt.testing.entrance import entrance_fault
from fxopt.testing.gradients import gradients_of, trained_place
from fxopt.testing.observations import (
    GIVEN,
    Call,
    Observation,
    difference,
    not_repeated,
    observe,
    run_call,
)
from fxopt.testing.probes import calls_of, has_finite, new_infinity, not_finite
from fxopt.testing.verdicts import Grade, Verdict

RTOL_FLOAT64 = 1e-9
"""Largest difference of a correct rewrite in float64, relative to the largest value of a tensor."""


class Oracle:
    """Judges candidates against one reference module, whose results are computed once for all candidates.

    Args:
        reference: the module that is right.
        args: positional inputs, in the module's own dtype.
        kwargs: keyword inputs.
        float64: the reference in float64; by default, a converted deep copy.
        wide: the dtype of `float64`, for a reference that does not run in float64; `rtol` must then allow for the rounding
            of this dtype.
        captured: a graph of the reference; its guards tell which sizes are dynamic, and inputs that it refuses are not
            used to judge candidates.
        captured_wide: a graph of `float64`; inputs that it refuses are not used either.
        rtol: tolerance in float64, relative to the largest value of each tensor.
        factor: largest accepted ratio of errors vs float64 in the own dtype, candidate ÷ reference.
        floor: units in the last place that are accepted in addition, because the reference may be exact by chance.
        strides: whether outputs must have the strides of the reference, if these are the same in two calls, and must share
            memory wherever its outputs do. New sharing of memory is wrong in any case.
        gradients: compare, in float64, the gradients of floating inputs and weights, and whether each output requires gradients.
            By default, if the reference is in training mode. A reference without a backward is not compared.

    Attributes:
        probes: the names of the inputs on which candidates are judged.
        expected: the observations of the reference on these inputs in its own dtype.
        unproved: the path of an output of the reference that is not finite on the given inputs, or empty.
        blank: whether all outputs of the reference are NaN or infinite on all inputs, so that nothing can be compared.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(2, 3)
        >>> oracle = Oracle(layer, [torch.randn(4, 2)])
        >>> twice = torch.nn.Sequential(layer, torch.nn.Identity())
        >>> oracle.judge(twice).probes
        ('the given inputs', 'other values', 'NaN and infinities')
        >>> print(oracle.judge(torch.nn.Sequential(layer, torch.nn.ReLU())))
        wrong: in float64, output differs by ... of its largest value (...); a correct rewrite agrees to 1e-09
    """

    def __init__(
        self,
        reference: nn.Module,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        float64: nn.Module | None = None,
        wide: torch.dtype = torch.float64,
        captured: nn.Module | None = None,
        captured_wide: nn.Module | None = None,
        rtol: float = RTOL_FLOAT64,
        factor: float = 2.0,
        floor: float = 4.0,
        strides: bool = False,
        gradients: bool | None = None,
    ) -> None:
        self._rtol, self._factor, self._floor = rtol, factor, floor
        self._wide, self._name = wide, str(wide).removeprefix("torch.")
        self._graph, self._tensors = captured or reference, _floating(reference)
        exact = in_float64(reference) if float64 is None else float64
        given = Call.given(args, kwargs)
        cast = given.cast(wide)
        self._is_wide = unchanged((given.args, given.kwargs), (cast.args, cast.kwargs))
        again = observe(reference, [given])[0]
        again_wide = again if exact is reference and self._is_wide else observe(exact, [cast])[0]
        graphs = {None: captured, wide: captured_wide}
        self._calls, self._wide_calls = calls_of(reference, exact, given, wide, graphs, rtol)
        self.probes = tuple(dict.fromkeys(call.name for call in self._wide_calls))
        self.expected, self._truth = self._observed(reference, exact)
        self.unproved = not_finite(self._truth[0].output) or not_finite(self.expected[0].output)
        self.blank = not any(has_finite(seen.output) for seen in self._truth)
        self._difference = functools.partial(
            difference,
            buffers={name for name, _ in reference.named_buffers()},
            strides=strides and not unlike(again.result, self.expected[0].result, strides=True),
        )
        self._step = epsilon(self.expected[0].output)
        self._unstable = not_repeated(again, self.expected[0], floor * self._step) or not_repeated(
            again_wide, self._truth[0], rtol
        )
        self._frozen = not any(parameter.requires_grad for parameter in reference.parameters())
        wanted = reference.training if gradients is None else gradients
        self._gradients = gradients_of(exact, self._wide_calls[0]) if wanted else None

    def judge(
        self, candidate: nn.Module, float64: nn.Module | None = None, *, tolerance: float = 0.0
    ) -> Verdict:
        """Call a candidate on the inputs that the reference was called on, and compare.

        Args:
            candidate: the module to judge.
            float64: the candidate in float64; by default, a converted deep copy.
            tolerance: an error that is accepted beyond the limits, in float64 or in the own dtype.

        Returns:
            The verdict. Exceptions of the candidate are not caught.
        """
        failed = functools.partial(Verdict, error=math.inf, limit=self._rtol, probes=self.probes)
        if self._unstable:
            return failed(Grade.UNSTABLE, reason=self._unstable)
        if fault := entrance_fault(self._graph, candidate):
            return failed(Grade.WRONG, reason=fault)
        exact = in_float64(candidate) if float64 is None else float64
        seen, wide = self._observed(candidate, exact)
        if self._frozen and (place := trained_place(candidate, self._calls[0])):
            return failed(Grade.WRONG, reason=f"{place} requires gradients, unlike that of the original")
        computed = float64 is None and self._has_new_weights(candidate)
        try:
            verdict = self._verdict(wide, seen, computed, tolerance)
            if verdict.grade.passes and self._gradients is not None:
                error = max(self._rtol, verdict.float64.max_rel)
                self._gradients.expect_of(exact, error, f"in {self._name}, ")
            return verdict
        except AssertionError as error:
            return failed(Grade.WRONG, reason=str(error))

    def first_divergence(
        self,
        before: GraphModule,
        after: GraphModule,
        float64: tuple[GraphModule, GraphModule] | None = None,
    ) -> Divergence | None:
        """Find the first node whose value diverges, on the inputs on which candidates are judged; None if none does.

        Arguments and errors are those of `fxopt.testing.first_divergence`.
        """
        for graph in (before, after, *(float64 or ())):
            if not isinstance(graph, GraphModule):
                raise TypeError(
                    f"first_divergence compares node by node, and a {type(graph).__name__} has no nodes: "
                    "give graph modules, such as fxopt.trace(model, inputs), or compare outputs with assert_equivalent"
                )
        rounded = float64 is None and self._has_new_weights(after)
        wide_limit = max(self._rtol, self._floor * self._step) if rounded else self._rtol
        wide_before, wide_after = float64 or (in_float64(before), in_float64(after))
        runs = (
            (torch.float64, wide_before, wide_after, self._wide_calls, lambda _: wide_limit),
            (None, before, after, self._calls, lambda error: self._factor * error + self._floor * self._step),
        )
        for dtype, original, changed, calls, limit_of in runs:
            for number in range(1, len(calls) + 1):
                found = divergence(wide_before, original, changed, calls[:number], limit_of)
                if found is not None:
                    return dataclasses.replace(found, dtype=dtype)
        return None

    def place_of_divergence(self, reference: nn.Module, graph: GraphModule) -> str:
        """Describe where a captured graph, before any pass, diverges from its model; empty if nothing differs."""
        reference, graph = copy.deepcopy(reference), copy.deepcopy(graph)
        called = {str(node.target) for node in graph.graph.find_nodes(op="call_module")}
        layers = [name for name, _ in reference.named_modules() if name in called]
        for call in self._calls:
            left, right = (observe(module, [call])[0].output for module in (reference, graph))
            if not unchanged(left, right):
                place = place_of_divergence(
                    graph, reference, layers, lambda run, call=call: run_call(run, call)
                )
                return f"they diverge at {place}"
        return ""

    def observe(self, candidate: nn.Module) -> list[Observation]:
        """Run a candidate on the inputs of `expected`."""
        return observe(candidate, self._calls)

    def fault(self, seen: Sequence[Observation]) -> str:
        """Describe a fault of a candidate that may compute other values; empty if there is none.

        A fault is another container type, shape or dtype of an output, another in-place write, a later change of an
        earlier result, or an overflow. Written buffers may have other dtypes.
        """
        try:
            for call, expected, actual in zip(self._calls, self.expected, seen, strict=True):
                self._difference(call, expected, actual, exact=False)
                if where := new_infinity(expected.output, actual.output):
                    return f"{where} is not finite where the original is{_with(call)}"
        except AssertionError as error:
            return str(error)
        return ""

    def _observed(self, module: nn.Module, exact: nn.Module) -> tuple[list[Observation], list[Observation]]:
        """Observe a module on the calls in its own dtype, and `exact` on those in float64; both may be the same module."""
        wide = observe(exact, self._wide_calls)
        if exact is module and self._is_wide:
            return [wide[0], wide[-1]][: len(self._calls)], wide
        return observe(module, self._calls), wide

    def _has_new_weights(self, candidate: nn.Module) -> bool:
        """Tell whether a candidate has a tensor in a dtype below float64 that equals no tensor of the reference."""
        known = {*map(id, self._tensors)}
        new = [each for each in _floating(candidate) if id(each) not in known and each.dtype not in _WIDE]
        sums = {(each.shape, each.dtype, checksum(each)) for each in self._tensors if new}
        return any((each.shape, each.dtype, checksum(each)) not in sums for each in new)

    def _own_differences(
        self, seen: Sequence[Observation]
    ) -> Iterator[tuple[Call, Difference, Difference, float]]:
        """For each call in the own dtype: the errors vs float64 of the original and of the candidate, and the limit."""
        truths = (self._truth[0], self._truth[-1])
        for call, truth, expected, actual in zip(self._calls, truths, self.expected, seen, strict=False):
            baseline = self._difference(call, truth, expected, dtypes=False)
            error = self._difference(call, truth, actual, dtypes=False)
            step = epsilon(expected.output)
            if baseline.max_rel == math.inf:  # an overflow, which float64 does not have
                baseline = self._difference(call, expected, expected)
                error = self._difference(call, expected, actual)
            limit = self._factor * baseline.max_rel + self._floor * step
            wide = step == torch.finfo(self._wide).eps
            yield call, baseline, error, max(limit, self._rtol) if wide else limit

    def _verdict(
        self, wide: Sequence[Observation], seen: Sequence[Observation], computed: bool, tolerance: float
    ) -> Verdict:
        exact = [
            (call, self._difference(call, truth, actual, f"in {self._name}, "))
            for call, truth, actual in zip(self._wide_calls, self._truth, wide, strict=True)
        ]
        for call, expected, actual in zip(self._calls, self.expected, seen, strict=True):
            self._difference(call, expected, actual)
        off = [each for each in exact if each[1].max_rel > self._rtol]
        call, worst = off[0] if off else max(exact, key=lambda each: each[1].max_rel)
        at, baseline, error, limit = max(
            self._own_differences(seen), key=lambda each: each[2].max_rel / (each[3] or 1e-300)
        )
        steps = max(ulps(one.output, two.output) for one, two in zip(self.expected, seen, strict=True))
        graded = functools.partial(
            Verdict,
            where=error.where,
            ulps=steps,
            probes=self.probes,
            own_limit=limit,
            float64=worst,
            own=error,
            baseline=baseline,
        )
        far = error.max_rel > limit
        largest = max([*(each.max_rel for _, each in off), *([error.max_rel] if far else [0.0])])
        if 0 < largest <= tolerance:
            return graded(Grade.TOLERANCE, largest, tolerance)
        if off and (far or not computed or worst.max_rel > limit):
            text = (
                f"in {self._name}{_with(call)}, {_apart(worst)}; a correct rewrite agrees to {self._rtol:.0e}"
            )
            return graded(Grade.WRONG, worst.max_rel, self._rtol, where=worst.where, reason=text)
        if far:
            text = (
                f"in its own dtype{_with(at)}, {error.where} is {error.max_rel:.3g} of its largest value away from the "
                f"float64 output; the original is {baseline.max_rel:.3g} away, so the limit is {limit:.3g}"
            )
            return graded(Grade.WRONG, error.max_rel, limit, reason=text)
        if off:
            narrowest = max(self._tensors, key=epsilon, default=torch.zeros(())).dtype
            text = (
                f"its weights were computed in {str(narrowest).removeprefix('torch.')}, so that it is {worst.max_rel:.3g} "
                "off in float64: for a proof, apply the pass to the model in float64 and give both as `float64`"
            )
            return graded(Grade.ACCURATE, error.max_rel, limit, reason=text)
        exact_grade = Grade.ULP if steps else Grade.BIT_EXACT
        grade = exact_grade if steps <= self._floor else Grade.ACCURATE
        return graded(grade, error.max_rel, limit)


def _floating(module: nn.Module) -> list[Tensor]:
    return [*filter(rounds, (*module.parameters(), *module.buffers()))]


_WIDE = (torch.float64, torch.complex128)


def _apart(worst: Difference) -> str:
    if worst.max_abs == math.inf:
        return f"{worst.where} is not NaN or infinite where the original is"
    return f"{worst.where} differs by {worst.max_rel:.3g} of its largest value ({worst.max_abs:.3g})"


def _with(call: Call) -> str:
    return f", with {call.name}" if call.name != GIVEN else ""
