"""The oracle: whether one module computes what another does."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from fxopt.testing.broken_values import SPARED, one_by_one
from fxopt.testing.differences import Difference, other_strides, ulps, unchanged
from fxopt.testing.divergence import Divergence
from fxopt.testing.entrance import entrance_fault
from fxopt.testing.gradients import gradients_of, trained_place
from fxopt.testing.node_by_node import parting, parting_place_of
from fxopt.testing.observations import BROKEN, GIVEN, Call, Observation, differences, not_repeated, observe
from fxopt.testing.precision import epsilon, floating, has_new_weights, in_float64, narrowest
from fxopt.testing.probes import calls_of, has_finite, new_infinity, not_finite
from fxopt.testing.verdicts import Grade, Verdict

RTOL_FLOAT64 = 1e-9
"""How well a correct rewrite agrees in float64, relative to the largest value of a tensor."""


class Oracle:
    """Judges candidates against one module, which it calls once for all of them.

    Args:
        reference: the module that is right.
        args: positional inputs, in the module's own dtype.
        kwargs: keyword inputs.
        float64: the reference in float64; by default, a converted deep copy.
        wide: the dtype of what is given as `float64`, for a reference that does not run in float64 (with an `rtol` that is
            as large as that dtype rounds).
        captured: a graph of the reference: which sizes are free is read from its guards, and what it refuses
            to take is not asked of candidates.
        captured_wide: a graph of `float64`; what it refuses to take is not asked of candidates either.
        rtol: tolerance in float64, relative to the largest value of each tensor.
        factor: in its own dtype, a candidate may be this many times as far from the float64 output as the reference.
        floor: and this many units in the last place farther: the reference may be exact by chance.
        strides: whether outputs must be laid out in memory as those of the reference, if it lays them out alike twice, and
            share memory with inputs and with each other where its do; where those do not, they must not in any case.
        gradients: whether the gradients of floating inputs and weights are compared, in float64, and whether outputs have any to
            give; by default, where the reference is in training mode. One without a backward is not asked.

    Attributes:
        probes: the inputs on which candidates are judged.
        expected: what the reference does on those in its own dtype.
        unproved: the path of an output of the reference that is not finite on the given inputs, or empty.
        blank: whether all outputs of the reference are NaN or infinite on all inputs, which nothing can be told from.

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
        self._graph, self._tensors = captured or reference, list(floating(reference))
        exact = in_float64(reference) if float64 is None else float64
        self._exact: Callable[[], nn.Module] = lambda: in_float64(reference) if float64 is None else float64
        given = Call.given(args, kwargs)
        cast = given.cast(wide)
        self._is_wide = unchanged((given.args, given.kwargs), (cast.args, cast.kwargs))
        same = exact is reference and self._is_wide
        again = observe(reference, [given]), [] if same else observe(exact, [cast])
        graphs = {None: captured, wide: captured_wide}
        self._calls, self._wide_calls = calls_of(reference, exact, given, wide, graphs, rtol)
        self.probes = tuple(dict.fromkeys(call.name for call in self._wide_calls))
        self.expected, self._truth = self._observed(reference, exact)
        self.unproved = not_finite(self._truth[0].output) or not_finite(self.expected[0].output)
        self.blank = not any(has_finite(seen.output) for seen in self._truth)
        strides = strides and not other_strides(again[0][0].result, self.expected[0].result)
        buffers = {name for name, _ in reference.named_buffers()}
        self._differences = functools.partial(differences, buffers=buffers, strides=strides)
        self._unstable = not_repeated(again[0], self.expected, floor * epsilon(self.expected[0].output))
        self._unstable = self._unstable or not_repeated(again[1] or again[0], self._truth, rtol)
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
            tolerance: an error that is accepted although it is too large, in float64 or in its own dtype.

        Returns:
            The verdict. What the candidate raises is not caught.
        """
        failed = functools.partial(Verdict, error=float("inf"), limit=self._rtol, probes=self.probes)
        if self._unstable:
            return failed(Grade.UNSTABLE, reason=self._unstable)
        if fault := entrance_fault(self._graph, candidate, self._calls[0]):
            return failed(Grade.WRONG, reason=fault)
        exact = in_float64(candidate) if float64 is None else float64
        seen, wide = self._observed(candidate, exact)
        if self._frozen and (place := trained_place(candidate, self._calls[0])):
            return failed(Grade.WRONG, reason=f"{place} requires gradients, unlike that of the original")
        computed = float64 is None and has_new_weights(self._tensors, candidate)
        try:
            verdict = self._verdict(*self._compared(exact, wide), seen, computed, tolerance)
            if verdict.grade.passes and self._gradients is not None:
                self._gradients.expect_of(
                    exact, max(self._rtol, verdict.float64.max_rel), f"in {self._name}, "
                )
            return verdict
        except AssertionError as error:
            return failed(Grade.WRONG, reason=str(error))

    def _observed(self, module: nn.Module, exact: nn.Module) -> tuple[list[Observation], list[Observation]]:
        """The behaviour of a module on the calls in its own dtype, and of `exact` on those in float64; both may be one."""
        wide = observe(exact, self._wide_calls)
        if exact is module and self._is_wide:
            return [wide[0], wide[-1]][: len(self._calls)], wide
        return observe(module, self._calls), wide

    def first_divergence(
        self,
        before: GraphModule,
        after: GraphModule,
        float64: tuple[GraphModule, GraphModule] | None = None,
    ) -> Divergence | None:
        """The first node that does what the reference does not, on the inputs on which candidates are judged, if any.

        Arguments and errors are those of `fxopt.testing.first_divergence`.
        """
        for graph in (before, after, *(float64 or ())):
            if not isinstance(graph, GraphModule):
                raise TypeError(
                    f"first_divergence compares node by node, and a {type(graph).__name__} has no nodes: "
                    "give graph modules, such as fxopt.trace(model, inputs), or compare outputs with assert_equivalent"
                )
        step = epsilon(self.expected[0].output)
        rounded = float64 is None and has_new_weights(self._tensors, after)
        wide_before, wide_after = float64 or (in_float64(before), in_float64(after))
        return parting(
            (wide_before, before),
            (wide_after, after),
            self._calls,
            self._wide_calls,
            wide_limit=max(self._rtol, self._floor * step) if rounded else self._rtol,
            own_limit=lambda error: self._factor * error + self._floor * step,
        )

    def parting_place(self, reference: nn.Module, graph: GraphModule) -> str:
        """Where a captured graph, before any pass, parts from its model; empty where nothing differs."""
        return parting_place_of(reference, graph, self._calls)

    def observe(self, candidate: nn.Module) -> list[Observation]:
        """Run a candidate on the inputs of `expected`."""
        return observe(candidate, self._calls)

    def error(self, candidate: nn.Module) -> Difference:
        """How far a candidate is from the float64 output of the reference, where it is farthest."""
        return max((error for _, _, error, _ in self._own(self.observe(candidate))), key=_max_rel)

    def fault(self, seen: Sequence[Observation]) -> str:
        """How a candidate that may give other values differs nevertheless; empty where it does not.

        It may not differ in the types of containers, shapes and dtypes, in what it writes, nor change a result that
        it has given, nor overflow. The buffers that it writes may be of other dtypes.
        """
        try:
            for call, expected, actual in zip(self._calls, self.expected, seen, strict=True):
                self._differences(call, expected, actual, buffer_dtypes=False)
                if where := new_infinity(expected.output, actual.output):
                    return f"{where} is not finite where the original is{_with(call)}"
        except AssertionError as error:
            return str(error)
        return ""

    def _compared(
        self, candidate: nn.Module, wide: Sequence[Observation]
    ) -> tuple[list[tuple[Call, Difference]], str]:
        """How far a candidate in float64 is from the reference, and a remark on its NaN, where they need one."""
        found, remark, where = list[tuple[Call, Difference]](), "", f"in {self._name}, "
        for call, truth, actual in zip(self._wide_calls, self._truth, wide, strict=True):
            each = self._differences(call, truth, actual, where)
            if call.name == BROKEN and not all(one.max_rel <= self._rtol for one in each):
                alone = one_by_one(self._wide_calls[0], call, self._exact(), candidate)
                if any(spared for *_, spared in alone):
                    each = [d for c, right, its, _ in alone for d in self._differences(c, right, its, where)]
                    remark = SPARED
            found += [(call, one) for one in each]
        return found, remark

    def _verdict(
        self,
        exact: Sequence[tuple[Call, Difference]],
        remark: str,
        seen: Sequence[Observation],
        computed: bool,
        tolerance: float,
    ) -> Verdict:
        for call, expected, actual in zip(self._calls, self.expected, seen, strict=True):
            self._differences(call, expected, actual)
        off = [each for each in exact if not each[1].max_rel <= self._rtol]
        call, worst = off[0] if off else max(exact, key=lambda each: each[1].max_rel)
        at, baseline, error, limit = max(
            self._own(seen), key=lambda each: each[2].max_rel / (each[3] or 1e-300)
        )
        verdict = Verdict(
            Grade.ACCURATE,
            error.max_rel,
            limit,
            error.where,
            remark,
            ulps=max(ulps(one.output, two.output) for one, two in zip(self.expected, seen, strict=True)),
            probes=self.probes,
            own_limit=limit,
            float64=worst,
            own=error,
            baseline=baseline,
        )
        change = functools.partial(dataclasses.replace, verdict)
        far = not error.max_rel <= limit
        too_large = [*(each.max_rel for _, each in off), *([error.max_rel] if far else [])]
        if too_large and max(too_large) <= tolerance:
            return change(grade=Grade.TOLERANCE, error=max(too_large), limit=tolerance)
        if off and (far or not computed or not worst.max_rel <= limit):
            wrong = {"error": worst.max_rel, "limit": self._rtol, "where": worst.where}
            text = f"a correct rewrite agrees to {self._rtol:.0e}"
            return change(
                grade=Grade.WRONG, reason=f"in {self._name}{_with(call)}, {_apart(worst)}; {text}", **wrong
            )
        if far:
            text = (
                f"in its own dtype{_with(at)}, {error.where} is {error.max_rel:.3g} of its largest value away from the "
                f"float64 output; the original is {baseline.max_rel:.3g} away, so the limit is {limit:.3g}"
            )
            return change(grade=Grade.WRONG, reason=text)
        if off:
            text = (
                f"its weights were computed in {narrowest(self._tensors)}, so that it is {worst.max_rel:.3g} off in "
                "float64: for a proof, apply the pass to the model in float64 and give both as `float64`"
            )
            return change(reason="; ".join(filter(None, [text, remark])))
        exact_grade = Grade.ULP if verdict.ulps else Grade.BIT_EXACT
        return change(grade=exact_grade) if verdict.ulps <= self._floor else verdict

    def _own(self, seen: Sequence[Observation]) -> Iterator[tuple[Call, Difference, Difference, float]]:
        """For each call in the own dtype: how far the original is from float64, the candidate, and how far it may be."""
        truths = (self._truth[0], self._truth[-1])
        for call, truth, expected, actual in zip(self._calls, truths, self.expected, seen, strict=False):
            baseline = max(self._differences(call, truth, expected, dtypes=False), key=_max_rel)
            error = max(self._differences(call, truth, actual, dtypes=False), key=_max_rel)
            step = epsilon(expected.output)
            if baseline.max_rel == float("inf"):  # an overflow: float64 is no measure of it
                baseline = max(self._differences(call, expected, expected), key=_max_rel)
                error = max(self._differences(call, expected, actual), key=_max_rel)
            limit = self._factor * baseline.max_rel + self._floor * step
            yield (
                call,
                baseline,
                error,
                max(limit, self._rtol) if step == torch.finfo(self._wide).eps else limit,
            )


def _apart(worst: Difference) -> str:
    if worst.max_abs == float("inf"):
        return f"{worst.where} is not NaN or infinite where the original is"
    return f"{worst.where} differs by {worst.max_rel:.3g} of its largest value ({worst.max_abs:.3g})"


def _with(call: Call) -> str:
    return f", with {call.name}" if call.name != GIVEN else ""


_max_rel = operator.attrgetter("max_rel")
