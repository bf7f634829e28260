"""One graph for one structure of inputs: captured, rewritten, checked against float64 and timed."""

from __future__ import annotations

import collections
import copy
import dataclasses
import inspect
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from fxopt import graph
from fxopt.capture import trace
from fxopt.capture.runtime.input_guard import InputGuard
from fxopt.capture.runtime.input_specs import TensorSpec
from fxopt.errors import FxoptError
from fxopt.graph_index import GraphIndex
from fxopt.kernels import PACKED
from fxopt.objects import tensors_in
from fxopt.optimizing.exactness import cosine_similarity, in_float64, relative_error, unlike
from fxopt.optimizing.lowering import Lowered, lowered
from fxopt.optimizing.report import GraphReport
from fxopt.optimizing.worthwhile import FoldScaleBehindLayers, MergeFasterLinears
from fxopt.passes.change_precision import ChangePrecision
from fxopt.passes.eliminate_common_subexpressions import EliminateCommonSubexpressions
from fxopt.passes.eliminate_dead_code import EliminateDeadCode
from fxopt.passes.fold_batch_norms import FoldBatchNorms
from fxopt.passes.fold_constants import FoldConstants
from fxopt.passes.fuse_attention import FuseAttention
from fxopt.passes.fuse_epilogues import FuseEpilogues
from fxopt.passes.pack_convs import PackConvs
from fxopt.passes.pack_linears import PackLinears
from fxopt.passes.quantize_linears import QuantizeLinears
from fxopt.passes.remove_copies import RemoveCopies
from fxopt.passes.remove_identity import RemoveIdentity
from fxopt.passes.remove_repeated_heads import RemoveRepeatedHeads
from fxopt.rewriting.rewrite import Rewrite

PRECISIONS: Mapping[str, float | None] = {"float32": None, "bfloat16": 0.999, "int8": 0.99}
"""For each precision, the cosine with float64 that outputs must have; None where they must be as exact as the model's."""

MOST_ERROR = 2.0
"""How far from float64 outputs may be, by how far the model's own are."""

ROUNDING = 5e-6
"""An error, relative to an output, that rounding in float32 makes in any deep model; of two below it, luck has the smaller."""

MOST_ROUNDING = 0.05
"""An error of the model itself that says nothing of what a graph may do, such as that of one that overflows."""

LEAST_SPEEDUP = 0.98
"""A graph that is slower than this is not used: less is within what measuring leaves open."""

MEMORIES: Mapping[str, str] = {
    "high": "the model's weights and packed ones",
    "low": "packed weights, and those that are used as they are; the model's own are in a file",
}
"""For each value of `memory`, what is in memory."""

UNCAPTURED = "it cannot be captured"
"""How the reason begins where there is no graph."""

_SECONDS = 0.2  # how long to time a graph, and the model


@dataclasses.dataclass(frozen=True)
class Options:
    """What `optimize` was asked for."""

    precision: str
    tune: bool
    memory: str = "high"


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The arguments of one call."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def copied(self) -> Inputs:
        """A copy: a forward may write into its inputs, as into a cache."""
        given = (self.args, dict(self.kwargs))
        tensors: dict[int, Any] = {id(t): t.detach().clone() for t in tensors_in(given)}
        args, kwargs = copy.deepcopy(given, tensors)
        return Inputs(args, kwargs)

    def call(self, function: Callable[..., Any]) -> Any:
        """Call a function with a copy."""
        copied = self.copied()
        return function(*copied.args, **copied.kwargs)

    def named(self, model: nn.Module) -> dict[str, Any]:
        """The arguments by the names of the forward's parameters; those of `**kwargs` by their own."""
        signature = inspect.signature(model.forward)
        bound = signature.bind(*self.args, **self.kwargs).arguments
        rest = [n for n, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD]
        found = {name: value for name, value in bound.items() if name not in rest}
        return {name: value for each in rest for name, value in bound.get(each, {}).items()} | found

    def bound(self, traced: GraphModule) -> list[Any]:
        """The values of the placeholders of a graph, in order."""
        bound = inspect.signature(traced.forward).bind(*self.args, **self.kwargs)
        bound.apply_defaults()
        nodes = traced.graph.find_nodes(op="placeholder")
        return [bound.arguments[str(node.target).lstrip("*")] for node in nodes]


def prepare(
    model: nn.Module,
    inputs: Inputs,
    dynamic_shapes: Any,
    options: Options,
    title: str,
    evict: Callable[[], object] = bool,
    ask: Callable[[], object] = bool,
) -> tuple[Lowered | None, GraphReport]:
    """Make a graph for these inputs.

    Args:
        evict: lets go of the memory of the model's weights, which come back when they are read.
        ask: what is asked before each call of the graph, and so counts as its time.

    Returns:
        The graph, None where the model itself is to run, and what was done, or why.
    """
    start, made = time.perf_counter(), GraphReport(title)

    def report(reason: str | None = None, **facts: Any) -> GraphReport:
        return dataclasses.replace(made, reason=reason, seconds=time.perf_counter() - start, **facts)

    try:
        traced = trace(model, inputs.args, inputs.kwargs, dynamic_shapes=dynamic_shapes, verify=False)
    except FxoptError as error:
        return None, report(f"{UNCAPTURED}: {error}")
    effect = _effect(traced)
    if effect:
        return None, report(effect)
    _fix_dtypes(traced)
    exact, own = in_float64(traced, inputs.bound(traced)), inputs.call(model)
    apart = (
        options.tune and options.memory == "low"
    )  # the model's weights are not there while the graph's are
    before = _times(model, inputs) if apart else []
    evict()
    explanations = []
    for pass_ in pipeline(options):
        explanations.append(pass_.commit(traced))
        evict()
    traced.recompile()
    computed = lowered(traced, {*map(id, model.parameters())}, evict)
    made = dataclasses.replace(
        made,
        explanations=explanations,
        kernels=_kernels(traced),
        memory=_memory(model, computed, options),
        kept=MEMORIES[options.memory],
    )
    distance, wrong = _judged(exact, own, inputs.call(computed), PRECISIONS[options.precision])
    made = dataclasses.replace(made, error=distance)
    if wrong:
        return None, report(wrong)
    if options.tune:

        def asked(*args: Any, **kwargs: Any) -> Any:
            ask()
            return computed(*args, **kwargs)

        times = [before] if apart else []
        speedup = _speedup(model, asked, inputs, *times)
        if speedup < LEAST_SPEEDUP:  # perhaps something else was busy
            speedup = max(speedup, _speedup(model, asked, inputs, *times))
        made = dataclasses.replace(made, speedup=speedup)
        if speedup < LEAST_SPEEDUP:
            return None, report(f"its graph takes {1 / speedup:.2f} times as long")
    return computed, report()


def pipeline(options: Options) -> list[Rewrite[Any]]:
    """The passes of `optimize`, in order."""
    return [
        RemoveIdentity(),
        EliminateCommonSubexpressions(),
        FoldConstants(),
        FoldBatchNorms(reversible=False),
        FoldScaleBehindLayers(reversible=False),
        *([ChangePrecision(torch.bfloat16)] if options.precision == "bfloat16" else []),
        FuseAttention(),
        RemoveRepeatedHeads(),
        RemoveCopies(),
        EliminateDeadCode(),
        *([MergeFasterLinears()] if options.tune and options.precision != "int8" else []),
        *([QuantizeLinears(options.tune)] if options.precision == "int8" else []),
        PackConvs(options.tune),
        PackLinears(options.tune, alone=options.memory == "low"),
        FuseEpilogues(),
    ]


def _fix_dtypes(traced: GraphModule) -> None:
    """Let a graph take the dtypes that it was made for alone: a cast that changes nothing in these goes."""
    for guard in traced.modules():
        if isinstance(guard, InputGuard):
            guard.inputs = tuple(
                dataclasses.replace(each, strict_dtype=True, any_dtype=False)
                if isinstance(each, TensorSpec)
                else each
                for each in guard.inputs
            )


def _kernels(traced: GraphModule) -> dict[str, int]:
    kinds = tuple(PACKED.values())
    return dict(collections.Counter(str(m.kernel) for m in traced.modules() if isinstance(m, kinds)))


def _effect(traced: GraphModule) -> str | None:
    """Why a graph cannot be tried out, or be given up when it has begun; None where that does no harm."""
    index = GraphIndex(traced)
    writer = index.memory.writer_of(traced)
    if writer is not None:
        return f"each run writes into its weights or buffers, at {graph.place(writer)}"
    nodes = index.nodes
    if any(
        getattr(node.target, "__module__", "") == "fxopt.capture.runtime.checks" for node in nodes
    ) and any(node.op == "placeholder" and index.memory.written(node) for node in nodes):
        return "its graph might refuse these inputs when it has already written into one of them"
    return None


def _judged(exact: Any, own: Any, found: Any, least: float | None) -> tuple[float, str | None]:
    """How far `found` is from `exact`, by how far the model's `own` outputs are; and why that is too far."""
    where = unlike(own, found)
    if where:
        return float("inf"), f"its outputs differ from the model's in {where}"
    theirs, mine = relative_error(exact, own), relative_error(exact, found)
    error = mine / max(theirs, torch.finfo(torch.float32).eps)
    if least is not None:
        cosine = cosine_similarity(exact, found)
        return error, (
            f"its outputs have a cosine of {cosine:.4f} with those in float64, less than {least}"
            if not cosine >= least
            else None
        )
    return error, (
        f"its outputs are {error:.1f} times as far from those in float64 as the model's"
        if not mine <= MOST_ERROR * max(min(theirs, MOST_ROUNDING), ROUNDING)
        else None
    )


def _memory(model: nn.Module, computed: Lowered, options: Options) -> float:
    """What the weights take in memory, the model's and those of its graph, by what the model's alone take."""
    own = {id(each): each.nbytes for each in model.parameters()}
    used = {id(each): each.nbytes for each in computed.traced.parameters() if not each.is_meta}
    if options.memory == "low":
        packed = (computed.traced.get_submodule(path) for path in computed.packed)
        in_file = own.keys() & {id(layer.weight) for layer in packed}
        used = {each: size for each, size in used.items() if each not in in_file}
    else:
        used |= own
    sizes = {id(each): each.nbytes for each in computed.packed.values()}
    return (sum(used.values()) + sum(sizes.values())) / max(1, sum(own.values()))


def _speedup(
    model: nn.Module, computed: Callable[..., Any], inputs: Inputs, *before: Sequence[float]
) -> float:
    """The model's time by the graph's: the median over rounds in which both run, or beside times of the model before."""
    if before:
        return statistics.median(before[0]) / statistics.median(_times(computed, inputs))
    ratios: list[float] = []
    begun = time.perf_counter()
    while len(ratios) < 3 or (len(ratios) < 50 and time.perf_counter() - begun < 2 * _SECONDS):
        theirs, mine = _seconds(model, inputs), _seconds(computed, inputs)
        ratios.append(theirs / mine)
    return statistics.median(ratios)


def _times(function: Callable[..., Any], inputs: Inputs) -> list[float]:
    _seconds(function, inputs)  # the first one reads the weights from where they are
    found: list[float] = []
    while len(found) < 3 or (len(found) < 50 and sum(found) < _SECONDS):
        found.append(_seconds(function, inputs))
    return found


def _seconds(function: Callable[..., Any], inputs: Inputs) -> float:
    copied = inputs.copied()
    start = time.perf_counter()
    function(*copied.args, **copied.kwargs)
    return time.perf_counter() - start
