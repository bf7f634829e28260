"""One graph for one structure of inputs: captured, rewritten, checked against float64 and timed."""

from __future__ import annotations

import collections
import dataclasses
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from fxopt.capture import TracedModule, trace_method
from fxopt.capture.runtime.input_guard import InputGuard
from fxopt.capture.runtime.input_specs import TensorSpec
from fxopt.capture.runtime.traced_module import ASSIGNED
from fxopt.errors import FxoptError
from fxopt.float64 import run_in_float64
from fxopt.kernels import PACKED
from fxopt.optimizing.inputs import Inputs
from fxopt.optimizing.lowering import Lowered, lowered
from fxopt.optimizing.report import GraphReport
from fxopt.optimizing.speed import speedup
from fxopt.optimizing.trial import Trial, Unused
from fxopt.optimizing.worthwhile import FoldScaleAndShift
from fxopt.outputs import cosine_similarity, relative_error, unlike
from fxopt.packing import Tune
from fxopt.passes.change_precision import ChangePrecision
from fxopt.passes.eliminate_common_subexpressions import EliminateCommonSubexpressions
from fxopt.passes.eliminate_dead_code import EliminateDeadCode
from fxopt.passes.fold_batch_norms import FoldBatchNorms
from fxopt.passes.fold_constants import FoldConstants
from fxopt.passes.fuse_attention import FuseAttention
from fxopt.passes.fuse_epilogues import FuseEpilogues
from fxopt.passes.make_layers import MakeLayers
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

SOMETHING_ELSE = 0.5
"""An error of the model itself, relative to an output, that no rounding makes."""

LEAST_SPEEDUP = 0.98
"""A graph that is slower than this is not used: less is within what measuring leaves open."""

_PASSES = {"bfloat16": ChangePrecision.__name__, "int8": QuantizeLinears.__name__}
UNCAPTURED = "it cannot be captured"
"""How the reason begins where there is no graph."""


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of `optimize`."""

    precision: str
    tune: bool
    keep_model: bool = True
    max_graphs: int = 8
    wait: bool = True
    methods: tuple[str, ...] = ()


def prepare(
    model: nn.Module,
    inputs: Inputs,
    dynamic_shapes: Any,
    options: Options,
    ask: Callable[[], object] = bool,
    method: str = "forward",
) -> tuple[Lowered | None, GraphReport]:
    """Make a graph for these inputs.

    Args:
        ask: what is asked before each call of the graph, and so counts as its time.
        method: the method of the model to compute.

    Returns:
        The graph, None where the model itself is to run, and what was done, or why.
    """
    start, facts = time.perf_counter(), dict[str, Any]()
    made: Lowered | None = None
    try:
        traced = _captured(model, method, inputs, dynamic_shapes)
        facts["fixed"] = _fix_dtypes(traced)
        places = traced.meta.get(ASSIGNED, ())
        eager = getattr(model, method)
        trial = Trial(model, traced, inputs)
        own = trial.own(eager)
        facts["assigned"] = [*places, *trial.places]
        if places:
            if not options.keep_model:
                raise Unused(f"the forward assigns {places[0][1]!r} to the model, which is not kept")
            own = own, tuple(getattr(model.get_submodule(path), name) for path, name in places)
        exact = run_in_float64(traced, inputs.bound(traced))
        made = _rewritten(model, traced, options, facts)
        found = trial.run(made.function)
        _judge(exact, own, found, options.precision, facts)
        if options.tune:
            facts["speedup"] = _timed(trial.repeatable(eager), trial.repeatable(made), inputs, ask)
            if facts["speedup"] < LEAST_SPEEDUP:
                raise Unused("the graph is slower than eager")
    except Unused as unused:
        made, facts["reason"] = None, str(unused)
    return made, GraphReport(seconds=time.perf_counter() - start, **facts)


def _captured(model: nn.Module, method: str, inputs: Inputs, dynamic_shapes: Any) -> TracedModule:
    """The model's graph, if it can be tried out."""
    try:
        return trace_method(model, method, inputs.args, inputs.kwargs, dynamic_shapes)
    except FxoptError as error:
        raise Unused(f"{UNCAPTURED}: {_without_options(str(error))}") from error


def _rewritten(
    model: nn.Module,
    traced: TracedModule,
    options: Options,
    facts: dict[str, Any],
) -> Lowered:
    """The graph after all passes, as a function; `facts` takes what the report says of it."""
    facts["explanations"] = explanations = [pass_.commit(traced) for pass_ in pipeline(options)]
    traced.recompile()
    made = lowered(traced, model, options.keep_model)
    for each in explanations:
        if each.name == _PASSES.get(options.precision) and not each.sites:
            reasons = [reason for _, _, reason in each.refusals] or ["no layer can compute in it"]
            facts["unused"] = f"{options.precision} is not used: {reasons[0]}"
    packed = [module for module in traced.modules() if isinstance(module, tuple(PACKED.values()))]
    facts["kernels"] = dict(collections.Counter(str(layer.kernel) for layer in packed))
    facts["memory"] = _memory(model, made, options)
    return made


def _timed(
    model: Callable[..., Any],
    made: Callable[..., Any],
    inputs: Inputs,
    ask: Callable[[], object],
) -> float:
    """The model's time by the graph's, measured twice where the graph seems slower: perhaps something else was busy."""

    def asked(*args: Any, **kwargs: Any) -> Any:
        ask()
        return made(*args, **kwargs)

    found = speedup(model, asked, inputs)
    return found if found >= LEAST_SPEEDUP else max(found, speedup(model, asked, inputs))


def pipeline(options: Options) -> list[Rewrite[Any]]:
    """The passes of `optimize`, in order."""
    # Without measuring, a kernel that was found slower is still not taken.
    tune: Tune = options.tune or "known"
    return [
        RemoveIdentity(),
        EliminateCommonSubexpressions(),
        FoldConstants(),
        MakeLayers(),
        FoldBatchNorms(reversible=False),
        FoldScaleAndShift(reversible=False),
        *([ChangePrecision(torch.bfloat16)] if options.precision == "bfloat16" else []),
        FuseAttention(),
        RemoveRepeatedHeads(),
        RemoveCopies(),
        EliminateDeadCode(),
        *([QuantizeLinears(tune)] if options.precision == "int8" else []),
        PackConvs(tune),
        PackLinears(tune, alone=not options.keep_model),
        FuseEpilogues(),
    ]


def _fix_dtypes(traced: TracedModule) -> dict[tuple[int, int], str]:
    """Let a graph take the dtypes that it was made for alone: a cast that changes nothing in these goes.

    Returns:
        The sizes that the forward fixes, as in the report.
    """
    guard = next(module for module in traced.modules() if isinstance(module, InputGuard))
    guard.inputs = tuple(
        dataclasses.replace(each, strict_dtype=True, any_dtype=False)
        if isinstance(each, TensorSpec)
        else each
        for each in guard.inputs
    )
    tensors = [each for each in guard.inputs if isinstance(each, TensorSpec)]
    return {(number, dim): line for number, each in enumerate(tensors) for dim, line in each.fixed_by}


def _judge(exact: Any, own: Any, found: Any, precision: str, facts: dict[str, Any]) -> None:
    """Raise Unused if `found` is farther from `exact` than the eager model's `own` outputs allow; fill in the errors."""
    where, least = unlike(own, found), PRECISIONS[precision]
    if where:
        raise Unused(f"the outputs of the graph differ from eager's in {where}")
    theirs, mine = relative_error(exact, own), relative_error(exact, found)
    facts["error"] = mine / max(theirs, torch.finfo(torch.float32).eps)
    if SOMETHING_ELSE < theirs < float("inf"):
        raise Unused("its graph in float64 computes something else than the model")
    if least is None:
        if not mine <= MOST_ERROR * max(min(theirs, MOST_ROUNDING), ROUNDING):
            raise Unused("the outputs of the graph are less exact than eager's, measured against float64")
        return
    facts["cosine"] = cosine_similarity(exact, found)
    if not facts["cosine"] >= least:
        raise Unused(f"the outputs in {precision} have a cosine below {least} with those in float64")


def _without_options(text: str) -> str:
    """Leave out advice of `fxopt.trace` that names options which `optimize` does not have."""
    leaf = r"(,? or|[,.:]) [mM]ake [^.;]* a leaf( \(leaf_modules=\.\.\.\))?"
    specialize = r"[Cc]apture with specialize=True[^.;]*(; or (\w))?"
    return re.sub(specialize, lambda match: (match[2] or "").upper(), re.sub(leaf, "", text))


def _memory(model: nn.Module, computed: Lowered, options: Options) -> float | None:
    """The memory of the weights, the graph's and, where it is kept, the model's, by what the model's alone take."""
    own: list[Any] = [*model.parameters()]
    used = [each for each in computed.traced.parameters() if not each.is_meta] + own * options.keep_model
    total, least = (
        sum({id(each): each.nbytes for each in held}.values())
        for held in ([*used, *computed.packed.values()], own)
    )
    return total / least if least else None
