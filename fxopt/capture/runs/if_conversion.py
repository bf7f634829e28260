"""If-conversion: proves that the body of a data-dependent branch may run unconditionally.

The body of `for expert in hit.nonzero():` or `if mask.any():` writes selected elements of a tensor, or of a copy of it. If the
model skips the body, no element is selected. The proof shows that two captures differ only in the bodies, that nothing later
uses a value or a Python variable of a body, and that an index or a mask selects the elements of each write. The graph checks
that this selection is empty whenever the model would skip the body.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import torch

from fxopt.capture.data_dependence.branch_decisions import BranchAtLine
from fxopt.capture.data_dependence.python_state import same_state
from fxopt.capture.nodes.comparison import Pairs, calls_of, made_at
from fxopt.capture.runs.body_effects import BodyEffects
from fxopt.capture.runs.equivalence import equivalent, subsumes
from fxopt.capture.runs.run_result import RunResult, UnprovedError


def if_convert(run: RunResult, other: RunResult, line: str) -> RunResult:
    """Return `run`, with checks in `left_out`, if its graph is also valid for `other`, which skips bodies at `line`."""
    mine, its = run.branches[line], other.branches[line]
    if len(mine) != len(its):
        raise UnprovedError("the two outcomes lead to different numbers of branches at this line")
    aligned = _aligned(calls_of(run.graph), calls_of(other.graph), [branch.node for branch in mine])
    if aligned is None or not any(aligned[1]):
        if equivalent(run, other):
            return run
        raise UnprovedError("both outcomes make calls, or leave state, that the other does not")
    pairs, bodies = aligned
    both = list(zip(mine, its, strict=True))
    if any(body and a.answer == b.answer for (a, b), body in zip(both, bodies, strict=True)):
        raise UnprovedError("what follows one branch depends on another one")
    opposite = all(a.answer != b.answer for a, b in both)
    if opposite and not all(same_state(a.state, b.state) for a, b in both):
        # Python counts in the body, or stores a value of the body for later.
        raise UnprovedError("the body of the branch changes variables of Python")
    if _draws(mine, run) != _draws(its, other):
        raise UnprovedError("the body of the branch draws random numbers")
    effects = BodyEffects(run, bodies)
    written = [effects.written_by(number, body) for number, body in enumerate(bodies)]
    if not subsumes(run, other, pairs, effects.aliases):
        raise UnprovedError("what follows uses what the body of the branch made, or assumes something else")
    return dataclasses.replace(run, left_out={line: written, **run.left_out})


def _aligned(
    calls: Sequence[torch.fx.Node], others: Sequence[torch.fx.Node], questions: Sequence[torch.fx.Node]
) -> tuple[Pairs, list[list[torch.fx.Node]]] | None:
    """Pair the calls of equal lines, and collect after each branch the calls only in `calls`; None if other calls differ."""
    pairs: list[tuple[torch.fx.Node, torch.fx.Node]] = []
    bodies: list[list[torch.fx.Node]] = []
    left = list(reversed(others))
    for node in calls:
        if left and made_at(node) == made_at(left[-1]):
            pairs.append((node, left.pop()))
        elif bodies:
            bodies[-1].append(node)
        else:
            return None
        if len(bodies) < len(questions) and node is questions[len(bodies)]:
            bodies.append([])
    return None if left else (pairs, bodies)


def _draws(asked: Sequence[BranchAtLine], run: RunResult) -> list[int]:
    """Count the draws of random numbers after each branch and before the next one."""
    counts = [*(question.drawn for question in asked), run.drawn]
    return [after - before for before, after in itertools.pairwise(counts)]
