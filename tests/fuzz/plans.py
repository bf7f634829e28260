"""Plans say what is done to a program: which passes are applied, in which compositions, and how they are undone."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

import fxopt
from fxopt.passes import available
from fxopt.rewriting.transformation import Transformation
from tests.fuzz.changes import BETWEEN, VARIANTS
from tests.fuzz.program import Program


class SameReLU(nn.Module):
    """Computes what ReLU does, so that replacing one by the other keeps the outputs."""

    def forward(self, values: Tensor) -> Tensor:
        return values.masked_fill(values <= 0, 0)


class SameGELU(nn.Module):
    """Computes what exact GELU does."""

    def forward(self, values: Tensor) -> Tensor:
        return 0.5 * values * (1 + torch.erf(values / 2**0.5))


_SAME: dict[str, Callable[[], Transformation]] = {
    "ReplaceActivation('relu', SameReLU)": lambda: fxopt.ReplaceActivation("relu", SameReLU),
    "ReplaceActivation('gelu', SameGELU)": lambda: fxopt.ReplaceActivation("gelu", SameGELU),
}

PASSES: dict[str, Callable[[], Transformation]] = {
    f"{name}()": cls for name, cls in available().items()
} | _SAME
"""All passes by the text that makes them."""

KEEPING = [text for text, make in PASSES.items() if text in _SAME or make().preserves_computation]
"""The passes after which the outputs are the same."""

_FLOAT32 = "ChangePrecision()"

Pipeline = str | tuple["Pipeline", ...]
"""A pass, by its text, or a composition."""

Action = int | Pipeline
"""A number of applications for `fxopt.undo`, or what is called with `reverse=True`."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """A plan for one program.

    Attributes:
        own_trace: captured by `fxopt.trace`, else by `torch.fx.symbolic_trace`.
        applied: the passes and compositions that are applied, in order.
        within: whether the last of them is applied for the length of a `with fxopt.applied` block.
        undone: how they are undone, in order; one that is refused comes later again.
        verify: whether they are applied with `verify=True`.
        between: what the user does to the graph module before undoing: a key of `BETWEEN`.
        variant: a rewriting of the graph that keeps its meaning, applied first: a key of `VARIANTS`.
        gradients: whether gradients are compared, too.
    """

    own_trace: bool
    applied: tuple[Pipeline, ...]
    undone: tuple[Action, ...] = ()
    within: bool = False
    verify: bool = False
    between: str = "nothing"
    variant: str = "as it is"
    gradients: bool = False

    @property
    def passes(self) -> tuple[str, ...]:
        """The texts of the passes, each once."""
        return tuple(dict.fromkeys(text for pipeline in self.applied for text, _ in parts(pipeline)))

    @property
    def reversible(self) -> bool:
        """True where all passes can be undone."""
        return all(PASSES[text]().reversible for text in self.passes)

    def smaller(self) -> Iterator[Plan]:
        """Plans with one thing less."""
        for number, pipeline in enumerate(self.applied):
            rest = self.applied[:number], self.applied[number + 1 :]
            if len(self.applied) > 1:
                yield dataclasses.replace(self, applied=(*rest[0], *rest[1]))
            if isinstance(pipeline, tuple):
                yield dataclasses.replace(self, applied=(*rest[0], *pipeline, *rest[1]))
                for cut in _cut(pipeline):
                    yield dataclasses.replace(self, applied=(*rest[0], cut, *rest[1]))
        for number in range(len(self.undone)):
            yield dataclasses.replace(self, undone=self.undone[:number] + self.undone[number + 1 :])
        simpler = {"between": "nothing", "variant": "as it is"}
        for field in ("gradients", "verify", "within", "own_trace"):
            simpler[field] = False
        for field, value in simpler.items():
            if getattr(self, field) != value:
                plan = dataclasses.replace(self, **{field: value})
                yield dataclasses.replace(plan, verify=plan.verify and plan.own_trace)


def make_plan(draw: random.Random, program: Program) -> Plan:
    """A random plan: passes in any order and composition, some of them more than once."""
    dtype, needs_own_trace = program.dtype, "] = " in "".join(program.body)  # fx cannot trace an assignment
    passes = draw.sample(KEEPING, draw.choice((1, 2, 3, 4)))
    others = [text for text in PASSES if text not in (*KEEPING, _FLOAT32)]
    if others and draw.random() < 0.08:
        passes.insert(draw.randint(0, len(passes)), draw.choice(others))
    if draw.random() < 0.15:
        passes.append(passes[-1])
    if dtype == "float32":
        passes.insert(draw.randint(0, len(passes)), _FLOAT32)
    own_trace = dtype == "float32" or draw.random() < 0.35 or needs_own_trace
    applied, within = _pipelines(draw, passes), draw.random() < 0.1
    return Plan(
        own_trace=own_trace,
        applied=applied,
        within=within,
        undone=_actions(draw, applied),
        verify=own_trace and draw.random() < 0.3,
        between=draw.choices(list(BETWEEN), (14, 3, 1, 1, 1))[0],
        variant=draw.choices(list(VARIANTS), (9, 1, 1, 2))[0],
        # What is written through `.data` is hidden from autograd: gradients are then wrong in any graph.
        gradients=draw.random() < 0.3 and dtype != "float32" and ".data." not in "".join(program.body),
    )


def made(pipeline: Pipeline) -> Transformation:
    """The pass or composition."""
    return PASSES[pipeline]() if isinstance(pipeline, str) else fxopt.compose(*map(made, pipeline))


def parts(pipeline: Pipeline) -> Iterator[tuple[str, frozenset[Pipeline]]]:
    """The passes in a pipeline, in order, each with all that it is a part of, itself among them."""
    if isinstance(pipeline, str):
        yield pipeline, frozenset([pipeline])
        return
    for part in pipeline:
        for text, around in parts(part):
            yield text, around | {pipeline}


def _pipelines(draw: random.Random, passes: Sequence[str]) -> tuple[Pipeline, ...]:
    kind = draw.choices(("each", "one", "nested", "around"), (5, 2, 3, 3))[0]
    if kind == "each":
        return tuple(passes)
    inside: list[Pipeline] = list(passes)
    if draw.random() < 0.3:
        inside.insert(draw.randint(0, len(inside)), draw.choice(passes))
    if kind == "one":
        return (tuple(inside),)
    before = after = ()
    if kind == "around":
        before, after = (draw.sample(passes, draw.randint(0, min(2, len(passes)))) for _ in range(2))
    return (*before, _nested(draw, inside), *after)


def _nested(draw: random.Random, pipelines: Sequence[Pipeline]) -> Pipeline:
    start = draw.randint(0, len(pipelines))
    stop = draw.randint(start, len(pipelines))
    if stop - start in (0, len(pipelines)):
        return tuple(pipelines)
    return (*pipelines[:start], _nested(draw, pipelines[start:stop]), *pipelines[stop:])


def _actions(draw: random.Random, applied: Sequence[Pipeline]) -> tuple[Action, ...]:
    calls: list[Action] = list(dict.fromkeys(reversed(applied)))
    single = list(dict.fromkeys(text for pipeline in applied for text, _ in parts(pipeline)))
    portions = [draw.choice((1, 1, 2, 3)) for _ in range(4)]
    kind = draw.choices(("reverse", "portions", "passes", "mixed"), (4, 3, 2, 3))[0]
    if kind == "reverse":
        return tuple(calls)
    if kind == "portions":
        return tuple(portions)
    actions = [*single] if kind == "passes" else [*calls, *single, *portions]
    draw.shuffle(actions)
    return tuple(actions)


def _cut(pipeline: tuple[Pipeline, ...]) -> Iterator[tuple[Pipeline, ...]]:
    """Compositions with one part less, or with one that is no composition any more."""
    for number, part in enumerate(pipeline):
        if len(pipeline) > 1:
            yield pipeline[:number] + pipeline[number + 1 :]
        if isinstance(part, tuple):
            yield pipeline[:number] + part + pipeline[number + 1 :]
            for cut in _cut(part):
                yield (*pipeline[:number], cut, *pipeline[number + 1 :])
