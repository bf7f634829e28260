"""Architecture: one model through every stage from being built to its graph being used; the first failure ends it.

The model is judged in float64, with its batch and sequence sizes free: a right graph agrees there to 1e-9, and to 1e-6
where the model converts to float32 on the way, which makes one unit of float32 of the last bit of float64. Where
a model mixes the two and does not run, it is judged in float32. In its own dtype, float32, it
is captured once more at fixed sizes, for the passes that approximate.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.overrides import TorchFunctionMode

import fxopt
from fxopt.errors import GuardError, TraceError, UndoError
from fxopt.rewriting.transformation import ReversibleTransformation, Transformation
from fxopt.testing import Difference, assert_round_trip, compare
from fxopt.testing.probes import not_finite

from ..records import Finding, Outcome
from ..subject import Staged, run_seeded, sites_of, tensors
from ..sweep import DEFAULT, FIXED, FREE, NONE, SPECIALIZE, Architecture, Source

ATTEMPTS: Mapping[str, dict[str, Any]] = {DEFAULT: {}, SPECIALIZE: {"specialize": True}}
"""How capture is tried, one after the other, until it does not raise `TraceError`."""

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
"""How well a right graph agrees, relative to the largest value of each tensor."""

ROUNDED = 1e-6
"""The same for a model in float64 that converts to float32 on the way."""

BATCH, SEQUENCE = 2, 16
OTHER_SIZES = {"batch": ((3, SEQUENCE), (1, SEQUENCE)), "sequence": ((BATCH, 21), (BATCH, 5))}
"""Where a graph is run besides the sizes it was captured at, as (batch, sequence)."""

Subject = Staged[Architecture]


@torch.no_grad()  # captured in the mode in which it is run: some forwards read it
def check(subject: Subject, pipeline: tuple[str, ...]) -> Finding:
    """Take the model through the stages, and torch.export beside it if the entry says so."""
    try:
        own, wide = _samples(subject)
        subject.dtype = str(wide.dtype).removeprefix("torch.")
        failure: Exception | None = None
        try:
            _capture_and_use(subject, own, wide)
        except Exception as error:  # raised again below: the peer has its turn whatever happened
            failure = error
        subject.measurements["relative_error"] = wide.worst
        if subject.entry.peer:
            started = time.perf_counter()
            with subject.entering("torch.export"):
                _export(subject, wide)
            subject.measurements["peer_work_seconds"] = time.perf_counter() - started
        if failure is not None:
            raise failure
    except _Verdict as verdict:
        return Finding(verdict.outcome, verdict.reason)
    return Finding()


class _Verdict(Exception):
    """A stage has come to an end that is no error of the harness."""

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome
        self.reason = reason


@dataclasses.dataclass
class _Sample:
    """A model in one dtype, with inputs that are fresh at every call.

    `expected` is what it returns at the sizes of the capture, `tolerance` how well a graph must agree with it, `worst` how
    well the graphs so far did.
    """

    model: nn.Module
    dtype: torch.dtype
    device: str
    source: Source
    tolerance: float
    expected: Any = None
    worst: float = 0.0

    def inputs(self, batch: int = BATCH, sequence: int = SEQUENCE) -> dict[str, Tensor]:
        made = self.source.example_inputs(self.model, batch, sequence)
        return {name: value.to(self.device, copy=True) for name, value in made.items()}

    def free(self) -> dict[str, dict[int, Any]] | None:
        """The dimensions that are free, if there are any."""
        free = self.source.free_dimensions(self.model)
        return free if any(free.values()) else None

    def run(self, module: nn.Module, batch: int = BATCH, sequence: int = SEQUENCE) -> Any:
        return run_seeded(module, self.inputs(batch, sequence))


def _samples(subject: Subject) -> tuple[_Sample, _Sample]:
    """The model in its own dtype and in the one in which it is judged; `skip` if it does not run eagerly."""
    entry = subject.entry
    with subject.entering("build"):
        try:
            model = entry.source.build(entry.name).to(subject.device)
        except Exception as error:  # a model that cannot be built says nothing about its capture
            raise _Verdict(Outcome.SKIP, _text(error)) from error
    with subject.entering("eager"):
        own = _Sample(model, torch.float32, subject.device, entry.source, TOLERANCE[torch.float32])
        try:
            own.expected = own.run(model)
        except Exception as error:  # nor does one that does not run
            raise _Verdict(Outcome.SKIP, _text(error)) from error
        if where := not_finite(own.expected):
            raise _Verdict(Outcome.SKIP, f"{where} is not finite everywhere, so that nothing would be proved")
        wide = dataclasses.replace(
            own, model=copy.deepcopy(model).double(), dtype=torch.float64, tolerance=TOLERANCE[torch.float64]
        )
        try:
            wide.expected = wide.run(wide.model)
            with _Roundings() as roundings:  # under a mode, layers of torch may compute in other ways
                wide.run(wide.model)
            if roundings.found:
                wide.tolerance = ROUNDED
        except Exception:  # it mixes dtypes: whatever that raises, it is judged in its own
            wide = own
    return own, wide


class _Roundings(TorchFunctionMode):
    """Finds out whether a model in float64 computes in less on the way."""

    found = False

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = function(*args, **kwargs or {})
        if isinstance(result, Tensor) and result.is_floating_point() and result.dtype != torch.float64:
            self.found = True
        return result


def _capture_and_use(subject: Subject, own: _Sample, wide: _Sample) -> None:
    with subject.entering("capture"):
        traced, options = _traced(subject, wide)
        traced_own = (
            traced if own is wide else fxopt.trace(own.model, kwargs=own.inputs(), verify=False, **options)
        )
    with subject.entering("parity"):
        for sample, graph in {own.dtype: (own, traced_own), wide.dtype: (wide, traced)}.values():
            _agree(sample, sample.expected, sample.run(graph))
    with subject.entering("other sizes"):
        for name, sizes in OTHER_SIZES.items():
            if name not in subject.facts:
                subject.facts[name] = _other_sizes(wide, traced, sizes)
    with subject.entering("passes"):
        unchanged: dict[GraphModule, GraphModule] = {}
        for name, pass_ in subject.passes.items():
            sample, graph = (wide, traced) if pass_.preserves_computation else (own, traced_own)
            subject.measurements[f"sites_{name}"] = _sites(subject, pass_, sample, graph, unchanged)
    with subject.entering("usable"):
        _use(wide, traced)


def _traced(subject: Subject, sample: _Sample) -> tuple[GraphModule, dict[str, Any]]:
    """The graph with free sizes, else with fixed ones, from the first attempt that succeeds, and how it was made."""
    free = sample.free()
    refusals: list[str] = []
    for attempt, options in ATTEMPTS.items():
        for dimensions in (free, None) if free else (None,):
            inputs, started = sample.inputs(), time.process_time()
            try:
                traced = fxopt.trace(
                    sample.model, kwargs=inputs, dynamic_shapes=dimensions, verify=False, **options
                )
            except TraceError as error:
                refusals.append(_text(error))
                continue
            subject.measurements |= {
                "trace_seconds": time.process_time() - started,
                "forward_runs": traced.meta["forward_runs"],
                "nodes": len(traced.graph.nodes),
                "modules": len({n.target for n in traced.graph.nodes if n.op == "call_module"}),
            }
            subject.facts |= {"captured": attempt, "refused": refusals[0] if refusals else ""}
            if free and not dimensions:
                subject.facts |= dict.fromkeys(OTHER_SIZES, FIXED)
            return traced, options
    raise _Verdict(Outcome.REFUSED, refusals[0])


def _other_sizes(sample: _Sample, graph: GraphModule, sizes: tuple[tuple[int, int], ...]) -> str:
    """Tell whether a dimension is free in the graph, or what forbids it; wrong results are a failure."""
    shapes = {name: value.shape for name, value in sample.inputs().items()}
    found = []
    for batch, sequence in sizes:
        try:
            inputs = sample.inputs(batch, sequence)
            if {name: value.shape for name, value in inputs.items()} == shapes:
                return NONE
            expected = run_seeded(sample.model, inputs)
        except Exception:  # whatever it raises, the model itself does not take this size
            found.append("fixed by the model")
            continue
        try:
            actual = sample.run(graph, batch, sequence)
        except GuardError as error:
            return f"guarded: {_text(error)}"
        _agree(sample, expected, actual, f"with batch {batch} and sequence {sequence}, ")
        found.append(FREE)
    return (
        FREE if FREE in found else found[0]
    )  # what is free at one size the model itself may forbid at the other


def _sites(
    subject: Subject,
    pass_: Transformation,
    sample: _Sample,
    graph: GraphModule,
    unchanged: dict[GraphModule, GraphModule],
) -> int:
    """How many sites the pass rewrites in a copy of the graph: rightly, and back again if it can be undone.

    A copy in which a pass found nothing is in `unchanged`, by its graph, for the next pass.
    """
    name = type(pass_).__name__
    module = pass_(unchanged.pop(graph) if graph in unchanged else copy.deepcopy(graph))
    sites = sites_of(pass_, graph, module)
    if not sites:
        unchanged[graph] = module
        return 0
    if pass_.preserves_computation:
        _agree(sample, sample.expected, sample.run(module), f"after {name}, ")
    else:
        try:
            actual = sample.run(module)
            if not _sizes_follow_values(graph):
                _difference(sample.expected, actual, f"after {name}, ")
            if hidden := not_finite(actual):
                raise _Verdict(Outcome.FAIL, f"after {name}, {hidden} is not finite everywhere")
        except GuardError as error:  # in other numbers, what the graph decides by may fall otherwise
            subject.facts[f"guarded_{name}"] = _text(error)
    if isinstance(pass_, ReversibleTransformation):
        try:
            try:
                restored = pass_(module, reverse=True)
            except UndoError as error:
                raise AssertionError(f"the round trip is not exact: {error}") from error
            assert_round_trip(graph, restored)
        except AssertionError as error:
            raise _Verdict(Outcome.FAIL, f"{name}: {_text(error)}") from error
    return sites


def _use(sample: _Sample, graph: GraphModule) -> None:
    """What people do with a module: copy, pickle, move, and exchange weights with the model."""
    copied = copy.deepcopy(graph)
    copies = {"deepcopy": copied}
    if _can_be_pickled(sample.model):
        copies["pickle"] = pickle.loads(pickle.dumps(graph))
    for way, module in copies.items():
        if module.code != graph.code:
            raise _Verdict(Outcome.FAIL, f"{way} changes the code of the graph")
        _agree(sample, sample.expected, sample.run(module), f"after {way}, ")
    copied.to("meta")
    if left := [name for name, tensor in tensors(copied).items() if tensor.device.type != "meta"]:
        raise _Verdict(Outcome.FAIL, f"after .to('meta'), {left[0]} is not on that device")
    if moved := [name for name, tensor in tensors(graph).items() if tensor.device.type == "meta"]:
        raise _Verdict(Outcome.FAIL, f".to('meta') of a copy moves {moved[0]} of the graph itself")
    graph.load_state_dict(sample.model.state_dict(), strict=True)
    sample.model.load_state_dict(graph.state_dict(), strict=True)


def _can_be_pickled(model: nn.Module) -> bool:
    """Not asked of a graph is what the model itself cannot: parametrized layers forbid it, for example."""
    try:
        pickle.dumps(model)
    except Exception:  # pickling runs the code of every object in it
        return False
    return True


def _export(subject: Subject, sample: _Sample) -> None:
    """What `torch.export` makes of the same model and inputs: `right`, `wrong` or `failed`."""
    free = sample.free()
    reason = ""
    for dimensions in (free, None) if free else (None,):
        inputs, started = sample.inputs(), time.process_time()
        try:
            exported = torch.export.export(
                sample.model, (), inputs, dynamic_shapes=dimensions, strict=False
            ).module()
            subject.measurements["peer_seconds"] = time.process_time() - started
            actual = sample.run(exported)
        except Exception as error:  # whatever it raises, it has not captured the model
            reason = reason or _text(error)
            continue
        subject.facts["peer_sizes"] = FREE if dimensions else FIXED
        try:
            _agree(dataclasses.replace(sample), sample.expected, actual)
        except _Verdict as verdict:
            subject.facts |= {"peer": "wrong", "peer_reason": verdict.reason}
        else:
            subject.facts |= {"peer": "right", "peer_reason": reason}
        return
    subject.facts |= {"peer": "failed", "peer_reason": reason}


def _agree(sample: _Sample, expected: Any, actual: Any, where: str = "") -> None:
    """Raise `fail` unless both have the same form and, to the tolerance of the sample, the same values."""
    difference = _difference(expected, actual, where)
    sample.worst = max(sample.worst, difference.max_rel)
    if not difference.max_rel <= sample.tolerance:
        raise _Verdict(
            Outcome.FAIL,
            f"{where}{difference.where} is {difference.max_rel:.3g} of its largest value off in "
            f"{str(sample.dtype).removeprefix('torch.')}, more than {sample.tolerance:.0e}",
        )


def _sizes_follow_values(graph: GraphModule) -> bool:
    """Tell whether there are sizes that only a run knows, such as the number of key points in an image."""
    values = (node.meta.get("val") for node in graph.graph.nodes)
    return any(isinstance(value, Tensor) and free_unbacked_symbols(value) for value in values)


def _difference(expected: Any, actual: Any, where: str) -> Difference:
    """How far two outputs of the same form are apart; raises `fail` if the forms differ."""
    try:
        return compare(expected, actual)
    except AssertionError as error:
        raise _Verdict(Outcome.FAIL, f"{where}{_text(error)}") from error


def _text(error: Exception) -> str:
    """An error of this package as it is, another with its type, on one line."""
    text = " ".join(str(error).split())
    return (
        text
        if isinstance(error, TraceError | GuardError | AssertionError)
        else f"{type(error).__name__}: {text}"
    )
