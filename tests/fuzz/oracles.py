"""The judges of a fuzz run: promises that hold for every program."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable

import torch
from torch import nn
from torch.fx import GraphModule

import fxopt
from fxopt.objects import tensors_in
from fxopt.testing import RTOL_FLOAT64, Oracle, assert_round_trip
from tests.fuzz.changes import BETWEEN, LOSSY, VARIANTS
from tests.fuzz.histories import Fault, Lost, Player, guarded
from tests.fuzz.plans import KEEPING, Plan
from tests.fuzz.program import Program

RTOL = {"float64": RTOL_FLOAT64, "float32": 1e-4}
"""How well a right rewrite agrees, by the dtype of the program."""


class Invalid(Exception):
    """The program itself does not run, or the tracer cannot take it."""


def check(program: Program, plan: Plan) -> collections.Counter[str]:
    """Run a plan on a program; returns counts: of rewritten sites, of undone applications, of what was not verified.

    Raises:
        Invalid: there is nothing to judge.
        Fault: a promise was not kept.
    """
    keeping = {*plan.passes} <= {*KEEPING}
    try:
        model, inputs = program.model(), program.arguments()
        traced = fxopt.trace(model, tuple(inputs)) if plan.own_trace else torch.fx.symbolic_trace(model)
        reference = model if plan.own_trace else copy.deepcopy(traced)
        # In the dtype of the program, whose statements may name it: what is narrower may be off by more.
        outputs = tensors_in(copy.deepcopy(model)(*program.arguments()))
        narrow = any(each.dtype is torch.float32 for each in outputs)  # as of a quotient of integers
        rtol = RTOL["float32" if narrow else program.dtype]
        dtype = {"wide": getattr(torch, program.dtype), "rtol": rtol}
        captured = copy.deepcopy(traced)
        oracle = Oracle(
            reference,
            inputs,
            float64=reference,
            captured=captured,
            gradients=plan.gradients,
            strides=keeping,
            **dtype,
        )
    except Exception as error:
        raise Invalid(f"{type(error).__name__}: {error}") from error

    def judge(graph_module: GraphModule, kind: str = "rewritten", keeping: bool = keeping) -> None:
        if not keeping:
            fault = guarded(kind, lambda: oracle.fault(oracle.observe(graph_module)))
        else:
            verdict = guarded(kind, lambda: oracle.judge(graph_module, graph_module))
            fault = "" if verdict.grade.passes else str(verdict)
        if fault:
            raise Fault(f"{kind} outputs", fault)

    if plan.own_trace:
        judge(traced, "traced", True)
    if not program.writes():
        VARIANTS[plan.variant](traced)
    state, player = _fingerprint(model), Player(traced)
    directly = plan.applied[:-1] if plan.within and plan.reversible else plan.applied
    for number, pipeline in enumerate(directly):
        player.apply(pipeline, plan.verify, lint=number == len(directly) - 1)
    if plan.verify:
        player.counts["verified sites"] = player.counts["sites"]
    if directly:
        judge(player.graph_module)
    if len(directly) < len(plan.applied):
        player.apply_within(plan.applied[-1], judge)
    if plan.reversible:
        _undo(player, plan, judge)
    if _fingerprint(model) != state:
        raise Fault("untouched", "the model of the user was changed")
    return player.counts


def _undo(player: Player, plan: Plan, judge: Callable[[GraphModule], None]) -> None:
    """Undo; exactly, or refused where the user has thrown away what it needs."""
    lossy = plan.between in LOSSY
    traceless = any(not step.nodes for step in fxopt.history(player.graph_module))
    player.graph_module = guarded("between", lambda: BETWEEN[plan.between](player.graph_module))
    if lossy and traceless and not fxopt.history(player.graph_module):
        player.counts[f"lost by {plan.between}"] += 1
        return  # what a pass erases tells nothing of it without the record
    try:
        player.undo(plan.undone, lossy, judge)
    except Lost:
        player.counts[f"lost by {plan.between}"] += 1
        return
    if lossy:
        before, after = BETWEEN[plan.between](copy.deepcopy(player.states[0])), player.graph_module
        if plan.between == "eliminate_dead_code":
            after = BETWEEN[plan.between](after)  # undo brings back what was dead before
        if plan.between == "pickle" and player.states[0].code == after.code:
            return  # fx's pickle renames nodes, and undoing names some of them as they were
        if plan.between == "eliminate_dead_code" and _sorted_nodes(before) == _sorted_nodes(after):
            return  # a node that came back may stand elsewhere when the one beside it is gone
        guarded("round trip", lambda: assert_round_trip(before, after))


def _sorted_nodes(graph_module: GraphModule) -> list[str]:
    return sorted(str(node.format_node()) for node in graph_module.graph.nodes)


def _fingerprint(model: nn.Module) -> list[object]:
    """The facts of the user's model that no pass may change: objects, values, flags, hooks."""
    facts: list[object] = []
    for name, module in model.named_modules(remove_duplicate=False):
        tables = {key: list(value) for key, value in vars(module).items() if isinstance(value, dict)}
        facts.append((name, id(module), type(module), module.training, tables))
    for name, tensor in model.state_dict(keep_vars=True).items():
        facts.append((name, id(tensor), tensor.requires_grad, tensor.tolist()))
    return facts
