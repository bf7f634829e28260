"""The subject of cases: a model on a device, its graph, and its graph after a pipeline.

Each object is made when a check first requests it, and kept for the next cases of the same model. Rewritten graphs are kept
for the next cases of the same pipeline.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode

from fxopt.errors import VerificationWarning
from fxopt.rewriting.composition import compose
from fxopt.rewriting.history import history, undo
from fxopt.rewriting.transformation import ReversibleTransformation, Transformation
from fxopt.testing import RTOL_FLOAT64, Oracle
from fxopt.testing.probes import not_finite

from ..zoo import build, plan
from ..zoo.build import Captured, capture, capture_first, ways
from ..zoo.entry import Entry
from .rewritten import Explained, Rewritten, explained, rewrite

_MUCH = 2**25  # bytes of weights; larger copies must not wait for the garbage collector

P = ParamSpec("P")
T = TypeVar("T")

FLOOR = 8.0
"""In its own dtype, the error vs float64 of a graph may be twice that of the model, plus this many units in the last
place: the model may be exact by chance.
"""

UNSTATED = 0.01
"""The tolerance of a pass that neither preserves the computation nor states a tolerance."""

TIMING = 8.0
"""The seconds after which the timing of one model ends, even if intervals are not narrow."""

ROUNDED, RTOL_FLOAT32 = 1e-6, 1e-5
"""The tolerances for models of a sweep, in place of `RTOL_FLOAT64`. The first is for a float64 model that converts to float32
on the way: the last bit of float64 may decide one unit of float32. The second is for a model that only runs in float32.
"""


def _kept(make: Callable[Concatenate[Subject, P], T]) -> Callable[Concatenate[Subject, P], T]:
    """Cache the results of a method, by its arguments, until the subject forgets them."""

    @functools.wraps(make)
    def get(subject: Subject, /, *key: P.args, **named: P.kwargs) -> T:
        kept = subject._made.setdefault(make.__name__, {})
        if key not in kept:
            kept[key] = make(subject, *key, **named)
        return kept[key]  # type: ignore[no-any-return]

    return get


@dataclasses.dataclass(eq=False)
class Subject:
    """A model of a zoo on a device; `entered` is called with each stage that begins; for `timing`, see `TIMING`.

    A check may store intermediate findings in `measurements` and `facts`: they are recorded even if the case is aborted,
    for example by a time-out. `timed` has the measurements of all pipelines at once.
    """

    entry: Entry
    device: str
    passes: Mapping[str, Transformation]
    entered: Callable[[str], None] = lambda stage: None
    timing: float = TIMING

    def __post_init__(self) -> None:
        self.dtype: str = self.entry.dtype
        self.stage = ""
        self.measurements: dict[str, float | int] = {}
        self.facts: dict[str, str] = {}
        self.timed: Any = None
        self.forget()

    def forget(self) -> None:
        """Drop all cached objects: after a failure they may be incomplete, and their memory is needed."""
        self._made: dict[str, dict[Any, Any]] = {}

    @contextlib.contextmanager
    def entering(self, stage: str) -> Iterator[None]:
        """Mark the block as a stage; after an error, the stage stays."""
        before = self.stage
        self.enter(stage)
        yield
        self.enter(before)

    def enter(self, stage: str) -> None:
        """Begin `stage`: everything that follows belongs to it."""
        self.stage = stage
        self.entered(stage)

    @property
    def own(self) -> torch.dtype:
        """The dtype of the entry."""
        return getattr(torch, self.entry.dtype)  # type: ignore[no-any-return]

    def dtype_of(self, pipeline: tuple[str, ...]) -> torch.dtype:
        """The dtype in which the result of a pipeline is checked.

        In a sweep, with its hundreds of models, exact pipelines are checked only in the dtype `wide`.
        """
        exact = all(pass_.preserves_computation for pass_ in self.members(pipeline))
        return self.wide if exact and pipeline and not self.entry.given else self.own

    def most_error(self, pipeline: tuple[str, ...], dtype: torch.dtype) -> float:
        """The largest accepted change of an output by a pipeline that is not exact, relative to the norm of the output.

        The zoo states it for the pipeline in this model, or each pass states it; rounding in `dtype` is added.
        """
        passes = [pass_ for pass_ in self.members(pipeline) if not pass_.preserves_computation]
        stated = sum(UNSTATED if each.tolerance is None else each.tolerance for each in passes)
        return (self.entry.tolerance(pipeline) or stated) + FLOOR * torch.finfo(dtype).eps

    def without_tolerance(self, pipeline: tuple[str, ...]) -> str:
        """The first pass of a pipeline that may change the outputs without stating a tolerance; empty if there is none."""
        for name in plan.members(self.entry, pipeline, self.passes):
            pass_ = self.passes[name]
            if not pass_.preserves_computation and pass_.tolerance is None:
                return name
        return ""

    @property
    def wide(self) -> torch.dtype:
        """The dtype in which rewrites are proved right: float64 if the model runs in float64."""
        return self._judgement()[0]

    @property
    def rtol(self) -> float:
        """The tolerance of a right graph in the dtype `wide`, relative to the largest value of a tensor."""
        return self._judgement()[1]

    @_kept
    def model(self, dtype: torch.dtype) -> nn.Module:
        """The model, in `dtype`."""
        with self.entering("load"), torch.enable_grad():  # some models are trained in construction
            if dtype != torch.float32:
                return copy.deepcopy(self.model(torch.float32)).to(dtype)
            return build.build_model(self.entry).to(self.device)

    def inputs(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Fresh inputs, floating ones in `dtype`."""
        return {
            name: value.to(self.device, dtype if value.is_floating_point() else None, copy=True)
            for name, value in self._inputs().items()
        }

    @_kept
    def _inputs(self) -> dict[str, Tensor]:
        return build.make_inputs(self.entry, self.model(torch.float32))

    @_kept
    def oracle(self, dtype: torch.dtype) -> Oracle:
        """The oracle, which judges graphs against the eager model."""
        model, wide, captured = self.model(dtype), self.model(self.wide), self.traced(dtype)
        captured_wide = None if self.entry.given else self.traced(self.wide)
        # A model of a sweep has run before: later errors are not the model's.
        with self.entering("run the model" if self.entry.given else "run the graph"):
            return Oracle(
                model,
                kwargs=self.inputs(dtype),
                float64=wide,
                wide=self.wide,
                captured=captured,
                captured_wide=captured_wide,
                rtol=self.rtol,
                floor=FLOOR,
                strides=self.entry.given,
            )

    def traced(self, dtype: torch.dtype) -> GraphModule:
        """The captured graph of the model. It shares its leaves with the model, so rewrite only a copy."""
        return self.captured(dtype).graph

    @_kept
    def captured(self, dtype: torch.dtype) -> Captured:
        """The captured graph, and how it was captured."""
        model, given = self.model(dtype), self.entry.given
        # A model of a sweep is captured in each dtype in the way that worked in the dtype `wide`.
        first = None if given or dtype == self.wide else self.captured(self.wide).way
        # The same conditions as in a run: some forwards read the mode, and random numbers may decide with
        # `specialize=True`.
        with self.entering("capture"), torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(0)
            if given:
                try:
                    return capture(self.entry, model, self.inputs(dtype))
                except (Exception, SystemExit):  # perhaps an error of the model, which then raises here
                    with self.entering("run the model"):
                        self.run(model, dtype)
                    raise
            tried = [first] if first else ways(build.free_sizes(self.entry, self.model(torch.float32)))
            return capture_first(model, lambda: self.inputs(dtype), tried)

    def run(self, module: nn.Module, dtype: torch.dtype, inputs: dict[str, Tensor] | None = None) -> Any:
        """Run `module` on `inputs` (those of the entry by default), always under the same seed."""
        given = self.inputs(dtype) if inputs is None else inputs
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(0)
            return module(**given)

    @_kept
    def rewritten(self, pipeline: tuple[str, ...], dtype: torch.dtype) -> Rewritten:
        """A copy of the graph with the pipeline applied."""
        others = self._made["rewritten"]
        if any(name != pipeline for name, _ in others):
            others.clear()
            if sum(parameter.nbytes for parameter in self.model(dtype).parameters()) > _MUCH:
                gc.collect()  # graph and module refer to each other, and hold a model copy
        traced = self.traced(dtype)
        with self.entering("transform"):
            return rewrite(traced, self.members(pipeline))

    def explained(self, pipeline: tuple[str, ...], dtype: torch.dtype) -> Explained:
        """Explain the pass of a pipeline of one pass: its sites, its refusals, and the reasons."""
        (name,) = plan.members(self.entry, pipeline, self.passes)
        with self.entering("explain"):
            return explained(self.traced(dtype), name, self.passes[name])

    def wrong_sites(self, pipeline: tuple[str, ...], dtype: torch.dtype) -> list[str]:
        """The verification failures of the pass of a pipeline of one pass, found by running each site by itself."""
        members = self.members(pipeline)
        if len(members) != 1:
            return []
        module = copy.deepcopy(self.traced(dtype))
        with self.entering("verify"), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            members[0](module, verify=True)
        return [str(each.message) for each in caught if each.category is VerificationWarning]

    def restored(self, pipeline: tuple[str, ...], dtype: torch.dtype) -> Iterator[tuple[str, GraphModule]]:
        """Copies of the graph after the pipeline and its undo, for each way that users have to undo, with the name of the way."""
        passes = self.members(pipeline)
        whole = passes[0] if len(passes) == 1 else compose(*passes)
        assert isinstance(whole, ReversibleTransformation)
        rewritten = self.rewritten(pipeline, dtype).module
        module = copy.deepcopy(rewritten)
        with self.entering("reverse"):
            restored = whole(module, reverse=True)
        yield "its reverse", restored
        if len(pipeline) == 1:  # for a pair, this adds nothing to its single passes
            module = copy.deepcopy(rewritten)
            with self.entering("reverse"):
                restored = undo(module, len(history(module)))
            yield "`undo`", restored

    def members(self, pipeline: tuple[str, ...]) -> list[Transformation]:
        """The passes of a pipeline, in order."""
        return [self.passes[name] for name in plan.members(self.entry, pipeline, self.passes)]

    @_kept
    def _judgement(self) -> tuple[torch.dtype, float]:
        """The dtype in which graphs are judged, and how well they agree there.

        A model of a zoo file is known to run in float64; for a model of a sweep, this is tested.
        """
        if self.entry.given:
            return torch.float64, RTOL_FLOAT64
        own = self.own
        model, wide = self.model(own), self.model(torch.float64)
        with self.entering("run the model"):
            if where := not_finite(self.run(model, own)):
                raise ValueError(f"{where} is not finite everywhere, so that nothing would be proved")
            try:
                is_finite = not not_finite(self.run(wide, torch.float64))
                with _Roundings() as roundings:  # under a mode, torch layers may compute differently
                    self.run(wide, torch.float64)
            except Exception:  # the model mixes dtypes, which may raise anything
                is_finite = False
        if not is_finite:
            return own, RTOL_FLOAT32
        self.dtype = "float64"
        return torch.float64, ROUNDED if roundings.found else RTOL_FLOAT64


class _Roundings(TorchFunctionMode):
    """Detects whether a float64 model computes in a lower precision on the way."""

    found = False

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = function(*args, **kwargs or {})
        if isinstance(result, Tensor) and result.is_floating_point() and result.dtype != torch.float64:
            self.found = True
        return result
