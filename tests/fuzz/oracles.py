"""The judges of a fuzz run: promises that hold for every program."""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

import fxopt
from fxopt.testing import assert_round_trip
from tests.fuzz.changes import BETWEEN, LOSSY, VARIANTS
from tests.fuzz.histories import Fault, Lost, Player, guarded
from tests.fuzz.plans import KEEPING, Plan
from tests.fuzz.program import Program


class Invalid(Exception):
    """The program itself does not run, or the tracer cannot take it."""


def check(program: Program, plan: Plan) -> collections.Counter[str]:
    """Run a plan on a program; returns counts: of rewritten sites, of undone applications, of what was not verified.

    Raises:
        Invalid: there is nothing to judge.
        Fault: a promise was not kept.
    """
    run = _Runner(program.stateful())
    try:
        model, inputs = program.model(), program.arguments()
        eager = run(model, inputs)
        traced = fxopt.trace(model, tuple(inputs)) if plan.own_trace else torch.fx.symbolic_trace(model)
        gradients = plan.gradients and _has_gradients(run, model, inputs)
        expected = run(traced, inputs, gradients)
    except Exception as error:
        raise Invalid(f"{type(error).__name__}: {error}") from error
    if plan.own_trace:
        _expect("traced", eager, dataclasses.replace(expected, gradients=[]))
    if not program.writes():
        VARIANTS[plan.variant](traced)

    def judge(graph_module: GraphModule) -> None:
        changed = guarded("rewritten", lambda: run(graph_module, inputs, gradients))
        if {*plan.passes} <= {*KEEPING}:
            _expect("rewritten", expected, changed)
        else:
            _expect_shapes(expected, changed)

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


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The results of a run: the leaves of the output, gradients of the inputs, and buffers afterwards."""

    outputs: list[Any]
    gradients: list[Any]
    buffers: dict[str, Tensor]


class _Runner:
    """Calls modules on inputs; a module that a call may change is copied first."""

    def __init__(self, stateful: bool) -> None:
        self.stateful = stateful

    def __call__(self, module: nn.Module, inputs: Sequence[Tensor], gradients: bool = False) -> Outcome:
        if self.stateful:
            module = copy.deepcopy(module)
        leaves = [x.clone().requires_grad_(gradients and x.is_floating_point()) for x in inputs]
        with torch.set_grad_enabled(gradients):
            outputs = tree_leaves(module(*(x * 1 for x in leaves)))
        found: list[Any] = []
        if gradients:
            tensors = [t.double() for t in outputs if isinstance(t, Tensor) and t.requires_grad]
            terms = [
                (t / _size(t.detach())).sin().sum() for t in tensors
            ]  # sin of a large value is all noise
            if terms:
                torch.stack(terms).sum().backward()
            found = [x.grad for x in leaves]
        buffers = {name: b.clone() for name, b in module.named_buffers()} if self.stateful else {}
        return Outcome([t.detach() if isinstance(t, Tensor) else t for t in outputs], found, buffers)


def _has_gradients(run: _Runner, module: nn.Module, inputs: Sequence[Tensor]) -> bool:
    try:
        run(module, inputs, gradients=True)
    except RuntimeError:  # in-place writes may leave a program without a backward
        return False
    return True


def _expect(kind: str, expected: Outcome, actual: Outcome) -> None:
    pairs = [
        ("outputs", expected.outputs, actual.outputs),
        ("gradients", expected.gradients, actual.gradients),
    ]
    if not actual.gradients:
        pairs.pop()
    common = [name for name in expected.buffers if name in actual.buffers]
    pairs.append(("buffers", *([side.buffers[n] for n in common] for side in (expected, actual))))
    for what, left, right in pairs:
        problem = difference(left, right)
        if problem:
            raise Fault(f"{kind} {what}", problem)


def difference(left: Sequence[Any], right: Sequence[Any]) -> str | None:
    """How two lists of tensors and other values differ; `None` where they agree to rounding errors."""
    if len(left) != len(right):
        return f"{len(left)} values became {len(right)}"
    for number, (a, b) in enumerate(zip(left, right, strict=True)):
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            if type(a) is not type(b) or a != b:
                return f"value {number}: {a!r} became {b!r}"
            continue
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"value {number}: {a.dtype} {list(a.shape)} became {b.dtype} {list(b.shape)}"
        tolerance = 1e-9 if a.dtype == torch.float64 else 1e-4 if a.is_floating_point() else 0
        if not torch.allclose(a, b, rtol=tolerance, atol=tolerance * _size(a), equal_nan=True):
            return f"value {number} differs by {(a.double() - b.double()).abs().max():.3g}"
    return None


def _size(tensor: Tensor) -> float:
    finite = tensor[tensor.isfinite()]
    return max(1.0, float(finite.abs().max())) if finite.numel() else 1.0


def _expect_shapes(expected: Outcome, actual: Outcome) -> None:
    facts = [
        [(t.shape, t.dtype) if isinstance(t, Tensor) else t for t in side.outputs]
        for side in (expected, actual)
    ]
    if facts[0] != facts[1]:
        raise Fault("rewritten outputs", f"{facts[0]} became {facts[1]}")


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
