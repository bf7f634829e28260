"""Finds the passes of a pipeline that make a graph wrong, and their sites: the smallest sets that do."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch.fx import GraphModule

from fxopt.rewriting.chosen_sites import AtSites, site_names
from fxopt.rewriting.composition import leaves
from fxopt.rewriting.rewrite import Rewrite
from fxopt.rewriting.transformation import Transformation
from fxopt.testing.divergence import Divergence
from fxopt.testing.oracle import Oracle

T = TypeVar("T")

Judge = Callable[[GraphModule, GraphModule], str]
"""Says why a graph is wrong, given in its own dtype and in float64; empty where it is right."""


@dataclasses.dataclass(frozen=True)
class Culprit:
    """The passes and sites that make a graph wrong.

    Attributes:
        passes: the passes that are needed for it, in order; most often one.
        sites: the names of the nodes that stand for the sites of the last one that are needed; empty where it has none.
        of: how many sites it has.
        reason: why the graph is wrong that these passes make at these sites.
        divergence: where it first parts from what the last of these passes was given.
    """

    passes: tuple[Transformation, ...]
    sites: tuple[str, ...]
    of: int
    reason: str
    divergence: Divergence | None

    @property
    def steps(self) -> tuple[Transformation, ...]:
        """The passes, the last one at the guilty sites alone: applied in order, they make a wrong graph."""
        *others, last = self.passes
        if not isinstance(last, Rewrite) or len(self.sites) in (0, self.of):
            return self.passes
        return (*others, AtSites(last, self.sites))

    def __str__(self) -> str:
        *others, last = map(repr, self.passes)
        after = f" after {', '.join(others)}" if others else ""
        some = ", ".join(self.sites[:3]) + (", ..." if len(self.sites) > 3 else "")
        at = f", at {len(self.sites)} of its {self.of} sites ({some})" if self.sites else ""
        return f"{last}{after} is wrong{at}" + (f"; {self.divergence}" if self.divergence else "")


def find_culprit(
    oracle: Oracle,
    graph: GraphModule,
    passes: Sequence[Transformation],
    *,
    float64: GraphModule | None = None,
    judge: Judge | None = None,
    tolerance: float = 0.0,
    seconds: float = float("inf"),
) -> Culprit | None:
    """Find the fewest passes of a pipeline that make a graph wrong, and the fewest sites of the last of them.

    The passes, then the sites, are halved as long as a part of them alone is wrong in the same way (delta debugging, Zeller
    and Hildebrandt 2002): some 2 log2(n) trials where one of n is to blame.

    Args:
        oracle: judges what the passes make.
        graph: the graph before the passes; it stays as it is.
        passes: the pipeline; a composition stands for its parts.
        float64: the graph in float64; by default, it is judged as it is.
        judge: says why a graph is wrong; by default, what the oracle says.
        tolerance: an error that the oracle is to accept although it is too large.
        seconds: after this time, the sets found so far are the answer, if not the smallest.

    Returns:
        The culprit; None where the passes make nothing wrong.

    Example:
        >>> import dataclasses, torch
        >>> from fxopt import MergeLinears, ReplaceActivation
        >>> from fxopt.testing import Oracle, randomise
        >>> layers = [torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Linear(4, 4)]
        >>> graph = torch.fx.symbolic_trace(randomise(torch.nn.Sequential(*layers)))
        >>> print(find_culprit(Oracle(graph, [torch.randn(2, 4)]), graph, [MergeLinears(), ReplaceActivation()]))
        ReplaceActivation(source='gelu', target='gelu_tanh') is wrong, at 1 of its 1 sites (_1); in float64, it first parts ...
    """
    end = time.monotonic() + seconds
    trial = _Trial(oracle, graph, float64, judge, tolerance)
    every = [leaf for each in passes for leaf in leaves(each)]
    kind, _ = trial.fault(every)
    if not kind:
        return None

    def fails(part: Sequence[Transformation]) -> bool:
        return time.monotonic() < end and trial.fault(part)[0] == kind

    *others, last = smallest(every, fails)
    sites, of = list[str](), 0
    if isinstance(last, Rewrite):
        names = site_names(last, trial.made(graph, others))
        of = len(names)
        if fails([*others, AtSites(last, tuple(names))]):
            sites = smallest(names, lambda part: fails([*others, AtSites(last, tuple(part))]))
    found = Culprit((*others, last), tuple(sites), of, "", None)
    reason = trial.fault(found.steps)[1]
    divergence = trial.divergence(found.steps) if judge is None else None
    return dataclasses.replace(found, reason=reason, divergence=divergence)


def smallest(items: Sequence[T], fails: Callable[[Sequence[T]], bool]) -> list[T]:
    """A part of some items, in order, that fails, and none of which can be left out; all of them fail together.

    Example:
        >>> smallest(range(100), lambda part: 17 in part and 60 in part)
        [17, 60]
    """
    kept, parts = list(items), 2
    while len(kept) > 1:
        edges = [*itertools.pairwise(len(kept) * number // parts for number in range(parts + 1))]
        chunks = (kept[start:stop] for start, stop in edges)
        rests = (kept[:start] + kept[stop:] for start, stop in edges if parts > 2)
        if found := next(filter(fails, chunks), None):
            kept, parts = found, 2
        elif found := next(filter(fails, rests), None):
            kept, parts = found, parts - 1
        elif parts < len(kept):
            parts = min(2 * parts, len(kept))
        else:
            break
    return kept


class _Trial:
    """Applies passes to copies of a graph, and judges what they make."""

    def __init__(
        self,
        oracle: Oracle,
        graph: GraphModule,
        float64: GraphModule | None,
        judge: Judge | None,
        tolerance: float,
    ) -> None:
        self._oracle, self._graph, self._wide, self._judge = oracle, graph, float64, judge
        self._tolerance = tolerance

    def fault(self, passes: Sequence[Transformation]) -> tuple[str, str]:
        """How what they make is wrong, in a word, and why; empty where it is right."""
        try:
            own = self.made(self._graph, passes)
            wide = None if self._wide is None else self.made(self._wide, passes)
            if self._judge is not None:
                reason = self._judge(own, own if wide is None else wide)
                return ("wrong" if reason else ""), reason
            verdict = self._oracle.judge(own, wide, tolerance=self._tolerance)
        except Exception as error:  # whatever a wrong pass, or what it made, raises
            return type(error).__name__, f"{type(error).__name__}: {error}"
        return ("" if verdict.grade.passes else "wrong"), verdict.reason

    def divergence(self, passes: Sequence[Transformation]) -> Divergence | None:
        """Where what they make first parts from what the last of them was given."""
        try:
            before = [
                self.made(graph, passes[:-1]) for graph in (self._graph, self._wide) if graph is not None
            ]
            after = [self.made(graph, passes[-1:]) for graph in before]
            pairs = list(zip(before, after, strict=True))
            return self._oracle.first_divergence(*pairs[0], *pairs[1:])
        except Exception:  # a pass that raises makes nothing that could be run: the reason says so
            return None

    @staticmethod
    def made(graph: GraphModule, passes: Sequence[Transformation]) -> GraphModule:
        """A copy of a graph, with passes applied."""
        made = copy.deepcopy(graph)
        for each in passes:
            made = each(made)
        return made
