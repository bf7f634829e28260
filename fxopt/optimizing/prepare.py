"""One graph for one structure of inputs: captured, rewritten, checked against float64 and timed."""

from __future__ import annotations

import collections
import dataclasses
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from fxopt import effects
from fxopt.capture import TracedModule, trace_method
from fxopt.capture.runtime.input_guard import guard_of
from fxopt.capture.runtime.traced_module import ASSIGNED
from fxopt.compare import cosine_similarity, norm_error, norm_errors, unlike
from fxopt.constants import Constant
from fxopt.engines import AUTO, TORCH, Unfit, engines_for, reason_of, with_engine
from fxopt.errors import FIRST_CALL, FxoptError, GuardError, raise_of_signal
from fxopt.float64 import run_in_float64
from fxopt.kernels import PackedLayer
from fxopt.obstacles.foldable import Fold
from fxopt.optimizing.inputs import Dims, Inputs, dynamic_shapes, text_of
from fxopt.optimizing.lowering import Lowered, function_of, lowered
from fxopt.optimizing.report import GraphReport
from fxopt.optimizing.trial import Failed, Trial, Unused, fastest, speedup
from fxopt.optimizing.watching import Reads, State
from fxopt.packing import Tune
from fxopt.passes import fold_scale_and_shift
from fxopt.passes.change_precision import ChangePrecision
from fxopt.passes.eliminate_common_subexpressions import EliminateCommonSubexpressions
from fxopt.passes.eliminate_dead_code import EliminateDeadCode
from fxopt.passes.fold_batch_norms import FoldBatchNorms
from fxopt.passes.fold_constants import FoldConstants
from fxopt.passes.fold_padding import FoldPadding
from fxopt.passes.fuse_activations import FuseActivations
from fxopt.passes.fuse_attention import FuseAttention
from fxopt.passes.fuse_epilogues import FuseEpilogues
from fxopt.passes.fuse_multiply_add import FuseMultiplyAdd
from fxopt.passes.make_layers import MakeLayers
from fxopt.passes.pack_convs import PackConvs
from fxopt.passes.pack_linears import PackLinears
from fxopt.passes.quantize_linears import QuantizeLinears
from fxopt.passes.remove_copies import RemoveCopies
from fxopt.passes.remove_identity import RemoveIdentity
from fxopt.passes.remove_repeated_heads import RemoveRepeatedHeads
from fxopt.rewriting.explanation import Refusal
from fxopt.rewriting.rewrite import Rewrite
from fxopt.submodules import sharing_copy
from fxopt.version import __version__

PRECISIONS: Mapping[str, float | None] = {"float32": None, "bfloat16": 0.999, "int8": 0.99}
"""The least cosine of outputs with those in float64, for each precision; None if they must be as exact as the model's."""

# All errors are against float64, and relative to the norm of the output.
MOST_ERROR = 2.0  # the largest error of a graph ÷ that of the eager model
ROUNDING = 5e-6  # any deep model in float32 has this error, so smaller errors are not compared
MOST_ROUNDING = (
    0.05  # the largest error of the eager model that counts; a model that overflows has a larger one
)
SOMETHING_ELSE = 0.5  # with a larger error of the eager model, the graph in float64 computes something else
# If one run of the eager model does not decide: the number of runs with other rounding errors, and the largest error that counts.
ROUNDINGS, MOST_ERROR_SEEN = 4, SOMETHING_ELSE / 2
MOST_LUCK = 100  # the largest ratio of two rounding errors of the same values
LEAST_SPEEDUP = 0.98  # a slower graph is not used; closer to 1, timings do not tell the two apart
MOST_TIMINGS = 4  # a graph is slower only if so many timings say so
LATER = ". If only the first call does so, a later call gets a graph"
_PASSES = {"bfloat16": ChangePrecision.__name__, "int8": QuantizeLinears.__name__}


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of `optimize`."""

    precision: str
    tune: bool
    keep_model: bool
    max_graphs: int
    wait: bool
    methods: tuple[str, ...]
    engine: str
    progress: bool
    dynamic_shapes: Any


@torch.no_grad()
def prepare(
    model: nn.Module,
    inputs: Inputs,
    named: Mapping[str, Any],
    free: Dims,
    options: Options,
    states: Sequence[State],
    enter: Callable[[str], object],
) -> tuple[Lowered | None, GraphReport]:
    """Make a graph for these inputs.

    Args:
        named: the inputs by the names of the parameters of the method.
        free: the sizes that differ from call to call; the user's `dynamic_shapes` go before.
        states: states of the model; each learns which attributes the graph reads. A call of the graph first asks whether the
            first state holds, so the measured time of the graph includes that.
        enter: takes the name of each stage when it begins.

    Returns:
        The graph, or None if the model itself is to run; and the report.

    Raises:
        Exception: what the model raises for these inputs.
    """
    start, made, known = time.perf_counter(), None, sys.exception()
    facts: dict[str, Any] = {}
    try:
        _check(model)
        enter("capture")
        traced = _captured(model, inputs, named, free, options, facts)
        reads = Reads(model, traced)
        made = _checked(model, traced, inputs, options, states[0].holds, enter, facts)
        for state in states:
            state.read |= reads.but_for(facts["assigned"])
    except Failed as error:
        raise error.__cause__ or error from None
    except Exception as error:  # the model can still run; the report says what failed
        raise_of_signal(error, known)
        facts["reason"], first = str(error), str(error).partition("\n")[0]
        if isinstance(error, GuardError):
            facts["reason"] = f"its graph refuses these inputs: {_without_options(first)}"
        elif isinstance(error, NotImplementedError):  # as of a precision that one operator does not know
            facts["reason"] = f"torch has no kernel for a part of it: {first}"
        elif not isinstance(error, Unused):
            facts["reason"] = (
                f"{type(error).__name__} while its graph was made. Please report this with the model, torch "
                f"{torch.__version__} and fxopt {__version__}: {first}"
            )
    text = text_of(named, free if made is None else guard_of(made.traced).free_sizes)
    title = text if inputs.method == "forward" else f"{inputs.method}({text})"
    return made, GraphReport(title, seconds=time.perf_counter() - start, **facts)


def _checked(
    model: nn.Module,
    traced: TracedModule,
    inputs: Inputs,
    options: Options,
    ask: Callable[[], object],
    enter: Callable[[str], object],
    facts: dict[str, Any],
) -> Lowered:
    """Apply all passes, and write the function of the graph; raises Unused if it is less exact than the model, or slower.

    `facts` takes what the report says of the graph.
    """
    trial = Trial(model, traced, inputs)
    own = trial.own()
    places = traced.meta[ASSIGNED]
    facts["assigned"] = [*places, *trial.places]
    if places and not options.keep_model:
        raise Unused(f"the forward assigns {places[0][1]!r} to the model, which is not kept")
    enter("reference in float64")
    exact = run_in_float64(traced, [*inputs.bound(traced).values()])
    _check_captured(exact, own, traced, trial)

    def judge(computed: Lowered, facts: dict[str, Any]) -> None:
        _judge(exact, own, trial.run(computed.function), options.precision, facts, trial.moved)

    enter("passes and kernels")
    made, portable = _rewritten(model, traced, options, facts)
    judge(made, facts)
    if portable is not None:
        enter(f"engine {options.engine}")
        made = _by_engine(made, portable, judge, trial, inputs, options, facts)
    if options.tune:
        enter("timing")
        runs = trial.repeatable(getattr(model, inputs.method)), trial.repeatable(made, ask), inputs
        for _ in range(MOST_TIMINGS):  # other processes may slow down one of the two
            facts["speedup"] = max(facts.get("speedup", 0.0), speedup(*runs))
            if facts["speedup"] >= LEAST_SPEEDUP:
                break
        else:
            raise Unused("the graph is slower than eager")
    return made


def _check(model: nn.Module) -> None:
    """Raise Unused for hooks, which a graph does not call, and for weights whose changes go unnoticed."""
    for path, module in model.named_modules():
        # Hooks of the model itself run outside of its forward.
        if path and effects.has_hooks_of_users(module):
            raise Unused(f"a layer has hooks on its forward, at {path}")
    if any(parameter.is_inference() for parameter in model.parameters()):
        raise Unused(
            "its weights were made under torch.inference_mode(), where torch does not count writes into them: load the model "
            "outside of it"
        )


def _captured(
    model: nn.Module,
    inputs: Inputs,
    named: Mapping[str, Any],
    free: Dims,
    options: Options,
    facts: dict[str, Any],
    untied: str = "",
) -> TracedModule:
    """Capture the model with free sizes for those that differ from call to call.

    If that fails, equal sizes are tied to each other; if that fails, too, all sizes are fixed. `untied` is the reason why equal
    sizes are tied.
    """
    dynamic = options.dynamic_shapes if inputs.method == "forward" else None
    guessed = free if dynamic is None else set()
    if guessed:
        dynamic = dynamic_shapes(named, guessed, bool(untied))
    try:
        traced = trace_method(model, inputs.method, inputs.args, inputs.kwargs, dynamic)
        guard = guard_of(traced)
        # A graph with free sizes may refuse a size of 1.
        guard(**inputs.bound(traced))
    except FxoptError as error:
        reason = f"it cannot be captured: {_without_options(str(error))}"
        if not guessed:
            raise Unused(reason) from error
        # Torch cannot know, for example, that two inputs always have the same batch size.
        fails = not untied and isinstance(error.__cause__, RuntimeError)
        if fails and dynamic_shapes(named, guessed, tied=True):
            return _captured(model, inputs, named, free, options, facts, reason)
        facts["fixed"] = f"because with free sizes {untied or reason}"
        return _captured(model, inputs, named, set(), options, facts)
    guard.fix_dtypes()
    for line in (line for each in guard.tensors for _, line in each.fixed_by):
        facts.setdefault("fixed", f"which the forward fixes at {line}")
    return traced


def _rewritten(
    model: nn.Module, traced: TracedModule, options: Options, facts: dict[str, Any]
) -> tuple[Lowered, TracedModule | None]:
    """Apply all passes, and write the function of the graph.

    Returns:
        The function; and for another engine a copy of the graph from before the passes for torch's kernels, else None.
    """
    explanations = [pass_.commit(traced) for pass_ in passes_for_all_engines(options)]
    portable: Any = None if options.engine == TORCH else sharing_copy(traced)
    explanations += [pass_.commit(traced) for pass_ in passes_for_torch(options)]
    facts["explanations"] = explanations
    own = {*map(id, model.parameters())}
    for parameter in () if traced.gradients_read else traced.parameters():
        # Parameters that passes made need no gradients: no gradients are recorded through this graph.
        parameter.requires_grad_(parameter.requires_grad and id(parameter) in own)
    traced.recompile()
    made = lowered(traced, model, options.keep_model)
    for each in explanations:
        if each.name == _PASSES.get(options.precision) and not each.sites:
            reasons = [reason for _, _, reason in each.refusals] or ["no layer can compute in it"]
            facts["unused"] = f"{options.precision} is not used: {reasons[0]}"
    packed = (module for module in traced.modules() if isinstance(module, PackedLayer))
    facts["kernels"] = collections.Counter(layer.kernel for layer in packed)
    facts["memory"] = _memory(model, made, options)
    return made, portable


def _by_engine(
    made: Lowered,
    portable: TracedModule,
    judge: Callable[[Lowered, dict[str, Any]], None],
    trial: Trial,
    inputs: Inputs,
    options: Options,
    facts: dict[str, Any],
) -> Lowered:
    """Compute the graph by the engine of the options, or by the fastest one for `auto`; by torch if that fails."""
    found, judged, refused = {TORCH: made}, {TORCH: dict[str, Any]()}, dict[str, str]()
    explanations = facts["explanations"][: len(passes_for_all_engines(options))]
    there, known = engines_for(portable.device.type), sys.exception()
    for name in there if options.engine == AUTO else [options.engine]:
        try:
            reason = there.get(name, f"it does not compute on {portable.device.type}")
            if options.precision == "int8" or reason:
                raise Unfit(reason or "it does not compute int8")
            whole, engine = with_engine(portable, name)
            computed = dataclasses.replace(
                made, traced=portable, function=function_of(whole, {}), packed={}, given_up=()
            )
            judged[name] = {"explanations": explanations, "kernels": {}, "memory": None}
            judge(computed, judged[name])
            found[name], engine.in_use = computed, True
        except Exception as error:  # an engine may fail in any way
            raise_of_signal(error, known)
            refused[name] = reason_of(error)
    best = options.engine if options.engine in found else TORCH
    if options.engine == AUTO:
        best = fastest({name: trial.repeatable(each) for name, each in found.items()}, inputs)
    facts |= judged[best] | {"engine": best, "engines": refused}
    return found[best]


class FoldScaleAndShift(fold_scale_and_shift.FoldScaleAndShift):
    """Folds a scale and shift into the layer before it, not into layers behind it, whose weights would all be copied.

    Reports show this pass under the name of its base class.
    """

    def match(self, graph_module: GraphModule) -> Iterator[Fold | Refusal]:
        """Yield scales and shifts behind a layer."""
        for found in super().match(graph_module):
            before = isinstance(found, Fold) and not found.behind
            yield Refusal(found.node, "it would copy the weights of the layers behind") if before else found


def passes_for_all_engines(options: Options) -> list[Rewrite[Any]]:
    """The passes of `optimize` for every engine, in order."""
    return [
        RemoveIdentity(),
        EliminateCommonSubexpressions(),
        FoldConstants(freeze=True),
        FuseActivations(),
        MakeLayers(),
        FoldBatchNorms(reversible=False),
        FoldScaleAndShift(reversible=False),
        *([ChangePrecision(torch.bfloat16)] if options.precision == "bfloat16" else []),
        FuseAttention(inference=True),
    ]


def passes_for_torch(options: Options) -> list[Rewrite[Any]]:
    """The passes for torch's own kernels, which run after `passes_for_all_engines`."""
    # Even without tuning, kernels that an earlier measurement found slower are not used.
    tune: Tune = options.tune or "known"
    return [
        RemoveRepeatedHeads(),
        RemoveCopies(),
        EliminateDeadCode(),
        FuseMultiplyAdd(),  # other engines fuse more than that
        FoldPadding(),  # other engines pad opposite sides unlike
        *([QuantizeLinears(tune)] if options.precision == "int8" else []),
        PackConvs(tune),
        PackLinears(tune, alone=not options.keep_model),
        FuseEpilogues(),
    ]


def _judge(
    exact: Any, own: Any, found: Any, precision: str, facts: dict[str, Any], moved: Callable[[], Any]
) -> None:
    """Raise Unused if the outputs `found` are less exact than the eager model's `own` outputs; `facts` takes the errors.

    `moved` computes eager outputs with other rounding errors. The error of a single run says little where terms of an output
    nearly cancel, as in a cosine of two vectors: it may be small by chance.
    """
    least = PRECISIONS[precision]
    # The cosine of two scalars is only their sign, so these are compared as numbers.
    where = unlike(own, found, floats=least is not None)
    if where:
        raise Unused(f"the outputs of the graph differ from eager's: {where}")
    theirs, mine = norm_error(exact, own), norm_error(exact, found)
    facts["error"] = mine / max(theirs, torch.finfo(torch.float32).eps)
    if SOMETHING_ELSE < theirs < float("inf"):
        raise Unused(
            "its graph in float64 computes something else than the model. Perhaps rounding makes the outputs jump, for example if the "
            "forward selects the largest of nearly equal numbers"
        )
    if least is None:
        if not _is_rounding(mine, min(theirs, MOST_ROUNDING)):
            runs = [norm_errors(exact, value) for value in (own, *(moved() for _ in range(ROUNDINGS)))]
            most = (min(max(errors), MOST_ERROR_SEEN) for errors in zip(*runs, strict=True))
            if not all(map(_is_rounding, norm_errors(exact, found), most)):
                raise Unused("the outputs of the graph are less exact than eager's, measured against float64")
        return
    facts["cosine"] = cosine_similarity(exact, found)
    if not facts["cosine"] >= least:
        raise Unused(f"the outputs in {precision} have a cosine below {least} with those in float64")


def _check_captured(exact: Any, own: Any, traced: TracedModule, trial: Trial) -> None:
    """Raise Unused if eager's `own` outputs differ by more than rounding from those of the captured graph in float64.

    If the difference is rounding, the captured graph in the model's dtype differs about as much. A graph that computes something
    else is close to its own outputs in float64.
    """
    theirs = norm_error(exact, own)
    if theirs > ROUNDING:
        found = trial.run(traced)
        if unlike(own, found) or theirs > MOST_LUCK * norm_error(exact, found):
            raise Unused(
                "its graph computes something else than the model, perhaps because the forward calls torch.compiler.is_compiling(). "
                "Make an nn.TransformerEncoder with enable_nested_tensor=False"
            )


def _is_rounding(mine: float, theirs: float) -> bool:
    """Tell whether the error of a graph may be rounding, given the error of the eager model."""
    return mine <= MOST_ERROR * max(theirs, ROUNDING)


def _without_options(text: str) -> str:
    """Remove advice from an error text of `fxopt.trace` that names options which `optimize` does not have."""
    leaf = r"(,? or|[,.:]) [mM]ake [^.;]* a leaf( \(leaf_modules=\.\.\.\))?"
    text = text.replace(FIRST_CALL, LATER)
    specialize = r"[Cc]apture with specialize=True[^.;]*(; or (\w)|\.)?"
    return re.sub(specialize, lambda match: (match[2] or "").upper(), re.sub(leaf, "", text)).rstrip()


def _memory(model: nn.Module, computed: Lowered, options: Options) -> float | None:
    """The bytes of the weights of the graph, and of the model if it is kept, ÷ the bytes of the model's weights."""
    own = [*model.parameters()]
    held: list[Any] = [each for each in computed.traced.parameters() if not each.is_meta]
    held += [module.value for module in computed.traced.modules() if isinstance(module, Constant)]
    held += [*computed.packed.values(), *(own if options.keep_model else ())]
    total, models = (sum({id(each): each.nbytes for each in some}.values()) for some in (held, own))
    return total / models if models else None
