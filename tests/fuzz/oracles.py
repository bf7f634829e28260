"""What must hold for every program: the judges of a fuzz run."""

from __future__ import annotations

import copy
import dataclasses
import operator
import pickle
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves

import fxopt
from fxopt.testing import assert_round_trip
from fxopt.transformation import ReversibleTransformation, Transformation
from tests.fuzz.program import Program


class SameReLU(nn.Module):
    """Computes what ReLU does, so that replacing one by the other keeps the outputs."""

    def forward(self, values: Tensor) -> Tensor:
        return values.masked_fill(values <= 0, 0)


class SameGELU(nn.Module):
    """Computes what exact GELU does."""

    def forward(self, values: Tensor) -> Tensor:
        return 0.5 * values * (1 + torch.erf(values / 2**0.5))


PASSES: dict[str, Callable[[], Transformation]] = {
    "MergeLinears()": fxopt.MergeLinears,
    "FuseBiasInLinear()": fxopt.FuseBiasInLinear,
    "ChangeTrueDivToMulByInverse()": fxopt.ChangeTrueDivToMulByInverse,
    "FuseBatchNorm2dInConv2d()": fxopt.FuseBatchNorm2dInConv2d,
    "FuseBatchNorm1dInLinear()": fxopt.FuseBatchNorm1dInLinear,
    "ReplaceActivation('relu', SameReLU)": lambda: fxopt.ReplaceActivation("relu", SameReLU),
    "ReplaceActivation('gelu', SameGELU)": lambda: fxopt.ReplaceActivation("gelu", SameGELU),
    "ChangePrecision()": fxopt.ChangePrecision,
}
"""The passes by the text that makes them; all but the last keep the outputs here."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is done to a program.

    Attributes:
        own_trace: captured by `fxopt.trace`, else by `torch.fx.symbolic_trace`.
        passes: keys of `PASSES`, in order.
        between: what the user does to the graph module before undoing: a key of `BETWEEN`.
        variant: a rewriting of the graph that keeps its meaning, applied first: a key of `VARIANTS`.
        gradients: whether gradients are compared, too.
    """

    own_trace: bool
    passes: tuple[str, ...]
    between: str
    variant: str
    gradients: bool


class Invalid(Exception):
    """The program itself does not run, or the tracer cannot take it."""


class Fault(AssertionError):
    """A promise that was not kept; `kind` names the judge."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


def make_plan(draw: random.Random, program: Program) -> Plan:
    """A random plan: passes in any order, the last one maybe twice."""
    dtype, needs_own_trace = program.dtype, "] = " in "".join(program.body)  # fx cannot trace an assignment
    names = list(PASSES)[:-1]
    passes = draw.sample(names, draw.choice((1, 2, 3, 4)))
    if draw.random() < 0.15:
        passes.append(passes[-1])  # with another between them, the first would have to be undone last
    if dtype == "float32":
        passes.insert(draw.randint(0, len(passes)), "ChangePrecision()")
    return Plan(
        own_trace=dtype == "float32" or draw.random() < 0.35 or needs_own_trace,
        passes=tuple(passes),
        between=draw.choices(list(BETWEEN), (14, 3, 1, 1, 1))[0],
        variant=draw.choices(list(VARIANTS), (9, 1, 1, 2))[0],
        # What is written through `.data` is hidden from autograd: gradients are then wrong in any graph.
        gradients=draw.random() < 0.3 and dtype != "float32" and ".data." not in "".join(program.body),
    )


def check(program: Program, plan: Plan) -> int:
    """Run a plan on a program; returns how many sites were rewritten.

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
    state, before = _fingerprint(model), copy.deepcopy(traced)
    passes = [PASSES[name]() for name in plan.passes]
    traced = _guarded("pass", lambda: _applied(passes, traced))
    sites = sum(len(pass_.get_transformed_nodes(traced)) for pass_ in passes)
    changed = _guarded("rewritten", lambda: run(traced, inputs, gradients))
    if "ChangePrecision()" in plan.passes:
        _expect_shapes(expected, changed)
    else:
        _expect("rewritten", expected, changed)
    _undo(before, _guarded("between", lambda: BETWEEN[plan.between](traced)), passes, plan.between)
    if _fingerprint(model) != state:
        raise Fault("untouched", "the model of the user was changed")
    return sites


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run gave: the leaves of the output, gradients of the inputs, and buffers afterwards."""

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
            terms = [t.double().sin().sum() for t in outputs if isinstance(t, Tensor) and t.requires_grad]
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


def _applied(passes: Sequence[Transformation], graph_module: GraphModule) -> GraphModule:
    for number, pass_ in enumerate(passes):
        graph_module = pass_(graph_module, lint_and_recompile=number == len(passes) - 1)
    return graph_module


def _guarded(kind: str, function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception as error:
        raise Fault(kind, f"{type(error).__name__}: {error}") from error


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


def _undo(before: GraphModule, after: GraphModule, passes: Sequence[Transformation], between: str) -> None:
    """Undo in reverse order; exact, or refused where the user has thrown away what it needs."""
    if not all(isinstance(pass_, ReversibleTransformation) for pass_ in passes):
        return
    try:
        for pass_ in reversed(list(dict.fromkeys(passes))):
            after = pass_(after, reverse=True)
    except fxopt.UndoError as error:
        if between in _LOSSY:
            return
        raise Fault("undo", str(error)) from error
    if between == "pickle" and before.code == after.code:
        return  # fx's pickle renames nodes, and undoing names some of them as they were
    if between in _LOSSY:
        before = BETWEEN[between](before)
    if between == "eliminate_dead_code" and _sorted_nodes(before) == _sorted_nodes(after):
        return  # a node that came back may stand elsewhere when the one beside it is gone
    _guarded("round trip", lambda: assert_round_trip(before, after))


def _sorted_nodes(graph_module: GraphModule) -> list[str]:
    return sorted(str(node.format_node()) for node in graph_module.graph.nodes)


def _fingerprint(model: nn.Module) -> list[object]:
    """What a pass must not change of the user's model: objects, values, flags, hooks."""
    facts: list[object] = []
    for name, module in model.named_modules(remove_duplicate=False):
        tables = {key: list(value) for key, value in vars(module).items() if isinstance(value, dict)}
        facts.append((name, id(module), type(module), module.training, tables))
    for name, tensor in model.state_dict(keep_vars=True).items():
        facts.append((name, id(tensor), tensor.requires_grad, tensor.tolist()))
    return facts


def _eliminate(graph_module: GraphModule) -> GraphModule:
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()
    return graph_module


def _delete_unused(graph_module: GraphModule) -> GraphModule:
    graph_module.delete_all_unused_submodules()
    return graph_module


def _pickled(graph_module: GraphModule) -> GraphModule:
    if any(parametrize.is_parametrized(module) for module in graph_module.modules()):
        return graph_module  # torch refuses to pickle it
    carried: GraphModule = pickle.loads(pickle.dumps(graph_module))
    return carried


BETWEEN: dict[str, Callable[[GraphModule], GraphModule]] = {
    "nothing": lambda gm: gm,
    "deepcopy": copy.deepcopy,
    "pickle": _pickled,
    "eliminate_dead_code": _eliminate,
    "delete_all_unused_submodules": _delete_unused,
}
_LOSSY = ("pickle", "eliminate_dead_code", "delete_all_unused_submodules")


def _insert_identity(graph_module: GraphModule) -> None:
    for node in list(graph_module.graph.nodes):
        if node.op == "call_module" and node.users:
            with graph_module.graph.inserting_after(node):
                same = graph_module.graph.call_function(operator.mul, (node, 1))
            node.replace_all_uses_with(same, delete_user_cb=lambda user, same=same: user is not same)
    graph_module.recompile()


def _swap_operands(graph_module: GraphModule) -> None:
    for node in graph_module.graph.nodes:
        if node.target in (operator.add, operator.mul) and len(node.args) == 2:
            node.args = tuple(reversed(node.args))
    graph_module.recompile()


def _split_linear(graph_module: GraphModule) -> None:
    """A linear layer as two, each with a part of its rows."""
    modules = dict(graph_module.named_modules())
    for number, node in enumerate(list(graph_module.graph.nodes)):
        layer = modules.get(str(node.target)) if node.op == "call_module" else None
        if type(layer) is not nn.Linear or layer.out_features < 2 or vars(layer).get("_forward_hooks"):
            continue
        if (
            layer._forward_pre_hooks
            or "forward" in vars(layer)
            or set(layer._parameters) != {"weight", "bias"}
        ):
            continue
        parts = []
        for rows in (slice(0, 1), slice(1, None)):
            part = copy.deepcopy(layer)
            part.weight = nn.Parameter(layer.weight.detach()[rows].clone(), layer.weight.requires_grad)
            if layer.bias is not None:
                part.bias = nn.Parameter(layer.bias.detach()[rows].clone(), layer.bias.requires_grad)
            part.out_features = part.weight.shape[0]
            name = f"part{number}_{len(parts)}"
            graph_module.add_module(name, part)
            with graph_module.graph.inserting_before(node):
                parts.append(graph_module.graph.call_module(name, node.args, node.kwargs))
        value = node.meta.get("val")
        for part_node, size in zip(parts, (1, layer.out_features - 1), strict=True):
            if isinstance(value, Tensor):
                part_node.meta["val"] = value.new_empty((*value.shape[:-1], size))
        node.op, node.target, node.args, node.kwargs = "call_function", torch.cat, (parts, -1), {}
    graph_module.recompile()


VARIANTS: dict[str, Callable[[GraphModule], None]] = {
    "as it is": lambda gm: None,
    "identities": _insert_identity,
    "swapped operands": _swap_operands,
    "split layers": _split_linear,
}
