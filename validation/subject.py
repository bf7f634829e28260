"""The subject of cases: a model on a device, its graph, and the graph that a pipeline makes of it.

Everything is made when a check first asks for it and kept for the next cases of the same model; the
rewritten graphs for those of the same pipeline.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt import capture
from fxopt.errors import VerificationWarning
from fxopt.rewriting.composition import compose
from fxopt.rewriting.history import history, undo
from fxopt.rewriting.transformation import ReversibleTransformation, Transformation
from fxopt.testing import Oracle

from . import build, plan
from .zoo import Entry

E = TypeVar("E")

FLOOR = 8.0
"""In its own dtype, a graph may be twice as far from float64 as the model, and this many units in the last place
farther: the model may be exact by chance.
"""
Refusals = tuple[tuple[str, str, str], ...]


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """A copy of the graph after a pipeline.

    Attributes:
        module: the rewritten graph module.
        sites: for each pass of the pipeline in order, how many sites it rewrote (`sites_of`).
        refusals: what the passes left alone, as (pass, node, reason).
        tampered: the tensors and modules of the graph it was made from that a pass changed in place.
    """

    module: GraphModule
    sites: tuple[int, ...]
    refusals: Refusals
    tampered: tuple[str, ...]


class Staged(Generic[E]):
    """An entry of a zoo on a device; `entered` is told the name of each stage that begins.

    What a check has found so far it may keep in `measurements` and `facts`: the record has it even if the case
    is thrown out, for example by a time-out.
    """

    def __init__(
        self,
        entry: E,
        device: str,
        passes: Mapping[str, Transformation],
        entered: Callable[[str], None] = lambda stage: None,
    ) -> None:
        self.entry = entry
        self.device = device
        self.passes = passes
        self.dtype = ""
        self.stage = ""
        self.measurements: dict[str, float | int] = {}
        self.facts: dict[str, str] = {}
        self._entered = entered

    @contextlib.contextmanager
    def entering(self, stage: str) -> Iterator[None]:
        """Marks what happens in the block as a stage; after an error, the stage stays."""
        before = self.stage
        self.enter(stage)
        yield
        self.enter(before)

    def enter(self, stage: str) -> None:
        """Begin `stage`: all that happens from here on belongs to it."""
        self.stage = stage
        self._entered(stage)


class Subject(Staged[Entry]):
    """A model of the zoo file on a device."""

    def __init__(
        self,
        entry: Entry,
        device: str,
        passes: Mapping[str, Transformation],
        entered: Callable[[str], None] = lambda stage: None,
    ) -> None:
        super().__init__(entry, device, passes, entered)
        self.dtype = "+".join(entry.dtypes)
        self._models: dict[torch.dtype, nn.Module] = {}
        self._oracles: dict[torch.dtype, Oracle] = {}
        self._traced: dict[torch.dtype, GraphModule] = {}
        self._rewritten: dict[tuple[tuple[str, ...], torch.dtype], Rewritten] = {}

    @property
    def dtypes(self) -> list[torch.dtype]:
        """The dtypes of the entry: its own first."""
        return [getattr(torch, name) for name in self.entry.dtypes]

    def model(self, dtype: torch.dtype) -> nn.Module:
        """The model, in `dtype`."""
        if dtype not in self._models:
            with self.entering("load"):
                if not self._models:
                    self._models[torch.float32] = build.build_model(self.entry).to(self.device)
                if dtype not in self._models:
                    self._models[dtype] = copy.deepcopy(self._models[torch.float32]).to(dtype)
        return self._models[dtype]

    def inputs(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Fresh inputs, floating ones in `dtype`."""
        return build.cast(build.make_inputs(self.entry), dtype, self.device)

    def oracle(self, dtype: torch.dtype) -> Oracle:
        """What judges graphs against the model itself, run eagerly."""
        if dtype not in self._oracles:
            model, wide, captured = self.model(dtype), self.model(torch.float64), self.traced(dtype)
            with self.entering("run the model"):
                self._oracles[dtype] = Oracle(
                    model, kwargs=self.inputs(dtype), float64=wide, captured=captured, floor=FLOOR
                )
        return self._oracles[dtype]

    def traced(self, dtype: torch.dtype) -> GraphModule:
        """The captured graph of the model; it shares its leaves with the model, so rewrite a copy."""
        if dtype not in self._traced:
            model = self.model(dtype)
            with self.entering("capture"), torch.no_grad():  # as it is run: some forwards read the mode
                if self.entry.sizes == "dynamic":
                    traced = capture.symbolic_trace(model, list(self.entry.inputs))
                else:
                    traced = capture.trace(model, kwargs=self.inputs(dtype))
            self._traced[dtype] = traced
        return self._traced[dtype]

    def run(self, module: nn.Module, dtype: torch.dtype, inputs: dict[str, Tensor] | None = None) -> Any:
        """Run `module` on `inputs` (those of the entry by default), always under the same seed."""
        return run_seeded(module, self.inputs(dtype) if inputs is None else inputs)

    def rewritten(self, pipeline: tuple[str, ...], dtype: torch.dtype) -> Rewritten:
        """A copy of the graph with the pipeline applied."""
        if (pipeline, dtype) not in self._rewritten:
            if any(name != pipeline for name, _ in self._rewritten):
                self._rewritten.clear()
                gc.collect()  # a graph and its module refer to each other, and hold a copy of the model
            traced = self.traced(dtype)
            with self.entering("transform"):
                self._rewritten[pipeline, dtype] = _rewrite(traced, self.members(pipeline))
        return self._rewritten[pipeline, dtype]

    def wrong_sites(self, pipeline: tuple[str, ...], dtype: torch.dtype) -> list[str]:
        """What running each site by itself says against the pass of a pipeline of one."""
        members = self.members(pipeline)
        if len(members) != 1:
            return []
        module = copy.deepcopy(self.traced(dtype))
        with self.entering("verify"), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            members[0][1](module, verify=True)
        return [str(each.message) for each in caught if each.category is VerificationWarning]

    def restored(self, pipeline: tuple[str, ...], dtype: torch.dtype) -> Iterator[tuple[str, GraphModule]]:
        """Copies of the graph with the pipeline applied and undone, in the ways that users have, and their names."""
        passes = [pass_ for _, pass_ in self.members(pipeline)]
        whole = passes[0] if len(passes) == 1 else compose(*passes)
        assert isinstance(whole, ReversibleTransformation)
        one_by_one = self.rewritten(pipeline, dtype).module
        if len(passes) == 1:
            module = copy.deepcopy(one_by_one)
        else:
            with self.entering("transform"):
                module = whole(copy.deepcopy(self.traced(dtype)))
            with self.entering("compare"):
                if module.code != one_by_one.code:
                    raise AssertionError("composed, the passes make another graph than one after the other")
        with self.entering("reverse"):
            restored = whole(module, reverse=True)
        yield "its reverse", restored
        if len(pipeline) == 1:  # of a pair, this says no more than of its passes
            module = copy.deepcopy(one_by_one)
            with self.entering("reverse"):
                restored = undo(module, len(history(module)))
            yield "`undo`", restored

    def members(self, pipeline: tuple[str, ...]) -> list[tuple[str, Transformation]]:
        """The passes of a pipeline with their names, in order."""
        return [(name, self.passes[name]) for name in plan.members(self.entry, pipeline, self.passes)]


def run_seeded(module: nn.Module, inputs: Mapping[str, Tensor]) -> Any:
    """Run `module`, without gradients and always under the same seed."""
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        return module(**inputs)


def _rewrite(traced: GraphModule, passes: list[tuple[str, Transformation]]) -> Rewritten:
    module = copy.deepcopy(traced)
    # Keeps the objects of the copy, as the model of a user would: a pass may replace them, not change them.
    kept, kept_tensors = dict(module.named_modules()), tensors(module)
    sites: list[int] = []
    refusals: list[tuple[str, str, str]] = []
    for name, pass_ in passes:
        explain = getattr(pass_, "explain", None)  # a pass that only has `transform` explains nothing
        if explain is not None:
            refusals += [(name, node, reason) for node, _, reason in explain(module).refusals]
        before = copy.deepcopy(module) if sites else traced
        module = pass_(module)
        sites.append(sites_of(pass_, before, module))
    return Rewritten(module, tuple(sites), tuple(refusals), tuple(_tampered(traced, kept, kept_tensors)))


def sites_of(pass_: Transformation, before: GraphModule, after: GraphModule) -> int:
    """How many nodes a pass marked as transformed; 1 if it marked none, but changed the graph module."""
    return len(pass_.get_transformed_nodes(after)) or int(differ(before, after))


def differ(before: GraphModule, after: GraphModule) -> bool:
    """True if two graph modules differ in code, called modules, or parameters and buffers, be it in one value."""
    if before.code != after.code or _called(before) != _called(after):
        return True
    mine, its = tensors(before), tensors(after)
    return mine.keys() != its.keys() or any(not _same(tensor, its[name]) for name, tensor in mine.items())


def _called(module: GraphModule) -> list[tuple[str, bool]]:
    calls = [module.get_submodule(str(n.target)) for n in module.graph.nodes if n.op == "call_module"]
    return [(repr(call), call.training) for call in calls]


def tensors(module: nn.Module, recurse: bool = True) -> dict[str, Tensor]:
    """The parameters and buffers of a module by name, tied ones under each of their names."""
    found = (module.named_parameters, module.named_buffers)
    return {name: tensor for named in found for name, tensor in named("", recurse, remove_duplicate=False)}


def _same(left: Tensor, right: Tensor) -> bool:
    facts, other = ((type(t), t.dtype, t.device, t.shape, t.requires_grad) for t in (left, right))
    raw = (tensor.detach().reshape(-1).view(torch.uint8) for tensor in (left, right))  # so that NaN is itself
    return facts == other and torch.equal(*raw)


def _tampered(
    traced: GraphModule, kept: Mapping[str, nn.Module], kept_tensors: Mapping[str, Tensor]
) -> Iterator[str]:
    """Name what differs between the modules and tensors of the graph and those of its copy, which a pipeline has had."""
    yield from (name for name, tensor in tensors(traced).items() if not _same(tensor, kept_tensors[name]))
    for name, module in traced.named_modules():
        if name not in kept or isinstance(module, GraphModule) or type(module) is nn.Module:
            continue  # the containers are the graph module's own
        other = kept[name]
        mine, its = (tensors(m, recurse=False) for m in (module, other))
        if (repr(module), module.training, [*mine]) != (repr(other), other.training, [*its]):
            yield name
        yield from (
            f"{name}.{key}" for key in mine if key in its and its[key] is not kept_tensors[f"{name}.{key}"]
        )
