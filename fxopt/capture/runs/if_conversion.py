"""If-conversion: proves that the body of a data-dependent branch may run unconditionally.

`for expert in hit.nonzero():` and `if mask.any():` lead to writes at some places of a tensor, or to copies that differ there;
there are none where the answer is the other one. To be shown is that two captures differ by nothing else, that nothing later
uses what is left out, Python's variables among it, and that it writes only where an index or a mask says. The graph checks
that these are empty whenever the forward would have left it out.
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
    """`run`, with checks in `left_out`, if its graph holds for `other`, which leaves something out after branches at a line."""
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
        # Python counts what is left out, or keeps it for a later time.
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
    """The pairs of calls from the same lines, and for each branch what follows it in `calls` alone; None if other calls differ."""
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
    """How often random numbers were drawn after each branch and before the next one."""
    counts = [*(question.drawn for question in asked), run.drawn]
    return [after - before for before, after in itertools.pairwise(counts)]
