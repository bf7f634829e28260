"""Search for the smallest sets of passes, and of sites, that make a graph wrong."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch.fx import GraphModule

from fxopt.errors import error_text
from fxopt.rewriting.chosen_sites import AtSites
from fxopt.rewriting.composition import leaves
from fxopt.rewriting.rewrite import Rewrite
from fxopt.rewriting.transformation import Transformation
from fxopt.testing.divergence import Divergence
from fxopt.testing.oracle import Oracle

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Culprit:
    """The passes and sites that make a graph wrong.

    Attributes:
        passes: the passes that are needed to make the graph wrong, in order; most often one.
        sites: the needed sites of the last pass, by the names of their nodes; empty if the pass has none.
        of: the number of all sites of the last pass.
        reason: why the graph is wrong after these passes at these sites.
        divergence: where the graph first diverges from the input of the last pass.
    """

    passes: tuple[Transformation, ...]
    sites: tuple[str, ...]
    of: int
    reason: str = ""
    divergence: Divergence | None = None

    @property
    def steps(self) -> tuple[Transformation, ...]:
        """The passes, the last one restricted to the guilty sites: applied in order, they make a wrong graph."""
        *others, last = self.passes
        if not isinstance(last, Rewrite) or len(self.sites) in (0, self.of):
            return self.passes
        return (*others, AtSites(last, self.sites))

    def __str__(self) -> str:
        *others, last = map(repr, self.passes)
        after = f" after {', '.join(others)}" if others else ""
        some = ", ".join(self.sites[:3]) + (", ..." if len(self.sites) > 3 else "")
        alone = "already " if len(self.sites) < self.of else ""  # fewer sites than all suffice
        at = f", {alone}at {len(self.sites)} of its {self.of} sites ({some})" if self.sites else ""
        return f"{last}{after} is wrong{at}" + (f"; {self.divergence}" if self.divergence else "")


def find_culprit(
    oracle: Oracle,
    graph: GraphModule,
    passes: Sequence[Transformation],
    *,
    float64: GraphModule | None = None,
) -> Culprit | None:
    """Find the fewest passes of a pipeline that make a graph wrong, and the fewest sites of the last of them.

    The search leaves out halves of the passes, then smaller parts, as long as the rest is wrong in the same way; then it
    does the same with the sites. If one of n is to blame, it takes about 2 log2(n) trials.

    Args:
        oracle: the judge of the rewritten graphs.
        graph: the graph before the passes, which stays unchanged.
        passes: the pipeline; a composition counts as its parts.
        float64: the graph in float64; by default, the oracle converts the rewritten graph.

    Returns:
        The culprit; None if the graph is right after all passes.

    Example:
        >>> import dataclasses, torch
        >>> from fxopt import MergeLinears, ReplaceActivation
        >>> from fxopt.testing import Oracle, randomise
        >>> layers = [torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Linear(4, 4)]
        >>> graph = torch.fx.symbolic_trace(randomise(torch.nn.Sequential(*layers)))
        >>> print(find_culprit(Oracle(graph, [torch.randn(2, 4)]), graph, [MergeLinears(), ReplaceActivation()]))
        ReplaceActivation(source='gelu', target='gelu_tanh') is wrong, at 1 of its 1 sites (_1); in float64, it first diverges ...
    """
    graphs = [graph] if float64 is None else [graph, float64]

    def fault(part: Sequence[Transformation]) -> tuple[str, str]:
        """The kind of fault of the graph after these passes, in a word, and the reason; empty if the graph is right."""
        try:
            verdict = oracle.judge(*(made(each, part) for each in graphs))
        except Exception as error:  # a wrong pass, or its graph, may raise anything
            return type(error).__name__, error_text(error)
        return ("" if verdict.grade.passes else "wrong"), verdict.reason

    every = [leaf for each in passes for leaf in leaves(each)]
    kind, _ = fault(every)
    if not kind:
        return None
    *others, last = smallest(every, lambda part: fault(part)[0] == kind)
    sites = list[str]()
    with contextlib.suppress(Exception):  # a pass that raises may have sites that cannot be listed
        if isinstance(last, Rewrite):
            sites = [node for node, _ in last.explain(made(graph, others)).sites]

    def fails_at(chosen: Sequence[str]) -> bool:
        return fault((*others, AtSites(last, tuple(chosen))))[0] == kind  # type: ignore[arg-type]

    guilty = smallest(sites, fails_at) if sites and fails_at(sites) else []
    found = Culprit((*others, last), tuple(guilty), len(sites))
    *before, step = found.steps
    divergence = None
    with contextlib.suppress(Exception):  # a graph that cannot be run: the reason says so
        pairs = [(given := made(each, before), made(given, [step])) for each in graphs]
        divergence = oracle.first_divergence(*pairs[0], *pairs[1:])
    return dataclasses.replace(found, reason=fault(found.steps)[1], divergence=divergence)


def made(graph: GraphModule, passes: Sequence[Transformation]) -> GraphModule:
    """Copy a graph, and apply passes to the copy."""
    made = copy.deepcopy(graph)
    for each in passes:
        made = each(made)
    return made


def smallest(items: Sequence[T], fails: Callable[[Sequence[T]], bool]) -> list[T]:
    """Find a minimal part of some items, in order, that fails; all items must fail, and more items must not repair a failure.

    Example:
        >>> smallest(range(100), lambda part: 17 in part and 60 in part)
        [17, 60]
    """
    kept, size = list(items), len(items) // 2
    while size:
        start = 0
        while start < len(kept):
            rest = kept[:start] + kept[start + size :]
            if rest and fails(rest):
                kept = rest
            else:
                start += size
        size //= 2
    return kept
