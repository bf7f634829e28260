"""The plan: the zoo × the passes × the devices as a sorted list of cases. Pure functions of their arguments."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence

from fxopt.rewriting.transformation import Transformation

from ..records import Case, Check
from .entry import Entry
from .sources import Architecture

ALL = "all"
"""The pipeline of every pass that has sites in the model, or may have: there is no record."""

EXACT = "exact"
"""The part of it that preserves the computation."""


OPTIMIZED = {"optimize": "float32", "optimize_bfloat16": "bfloat16", "optimize_int8": "int8"}
"""The pipelines that are `fxopt.optimize` in each precision, on the CPU."""


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """No garbage is looked for: among hundreds of thousands of new objects, none of them garbage, that takes most of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_without_collector()
def plan(zoo: Sequence[Entry], passes: Mapping[str, Transformation], devices: Sequence[str]) -> list[Case]:
    """Every case: each model alone, beside its graph, × each pass, × each ordered pair of passes that have sites in it (but in a
    large model), × the full pipelines `all` and `exact`, those that the zoo names, and `fxopt.optimize` in each precision; on each device. Those of a sweep, of which there are hundreds, go through each
    pass alone, and are not timed.

    A pass that is recorded with no sites is planned for its effect alone: that it finds nothing. A pass for
    which nothing is recorded is planned in full, but not in pairs.
    """
    cases: list[Case] = []
    known: dict[object, list[tuple[tuple[str, ...], list[Check]]]] = {}
    for entry in sorted(zoo, key=lambda entry: entry.name):
        # Many models have sites of the same passes, and so the same pipelines and checks, hundreds of them.
        sites = tuple((name, None if count is None else count > 0) for name, count in entry.sites.items())
        kind = (
            entry.given,
            entry.large,
            getattr(entry, "peer", False),
            sites,
            tuple(entry.pipelines.items()),
        )
        if kind not in known:
            known[kind] = sorted(
                (pipeline, sorted(checks(entry, pipeline, passes)))
                for pipeline in [(), *pipelines(entry, passes)]
            )
        cases += [
            Case(entry.name, pipeline, device, check)
            for pipeline, kinds in known[kind]
            for device in sorted(devices)
            for check in kinds
            if check is not Check.OPTIMIZE or device == "cpu"
        ]
    return cases


def unmet(zoo: Sequence[Entry], passes: Mapping[str, Transformation], devices: Sequence[str]) -> list[str]:
    """The known failures that no planned case can have, one line each: they would excuse nothing, and hide a mistake."""
    return [
        f"{entry.name}: known_failures: no planned case is {failure.check} of {failure.pipeline or 'no pass'!r}"
        + (f" on {failure.device}" if failure.device else "")
        for entry in zoo
        if entry.known_failures
        for failure in entry.known_failures
        if not any(map(failure.covers, plan([entry], passes, devices)))
    ]


def content(case: Case, entry: Entry, passes: Mapping[str, Transformation]) -> str:
    """A digest of what a case is made of: the definition of its model, and its passes with their options."""
    fields = {"model", "config", "weights", "inputs", "sizes", "dynamic_shapes", "dims", "dtypes"}
    made = entry.model_dump_json(include=fields)
    made += "".join(_options(passes[name]) for name in members(entry, case.pipeline, passes))
    return hashlib.sha256(made.encode()).hexdigest()[:12]


def _options(pass_: Transformation) -> str:
    return repr(pass_) if dataclasses.is_dataclass(pass_) else type(pass_).__qualname__


def pipelines(entry: Entry, passes: Mapping[str, Transformation]) -> list[tuple[str, ...]]:
    """The pipelines that are applied to a model; `all`, `exact` and those of the zoo by name."""
    if not entry.given:
        return [(name,) for name in passes]
    with_sites = [name for name, count in entry.sites.items() if count and name in passes]
    named = [(name,) for name in (ALL, EXACT) if len(members(entry, (name,), passes)) > 1]
    named += [(name,) for name in (*entry.pipelines, *OPTIMIZED)]
    pairs = () if entry.large else itertools.permutations(with_sites, 2)
    return [*((name,) for name in passes), *pairs, *named]


def members(entry: Entry, pipeline: tuple[str, ...], passes: Mapping[str, Transformation]) -> tuple[str, ...]:
    """The passes that a pipeline stands for, in order; none for `fxopt.optimize`, which picks its own.

    `all` and `exact` lack those recorded with no sites, and those with options: each pass is in them once.
    """
    if pipeline and pipeline[0] in OPTIMIZED:
        return ()
    if pipeline not in ((ALL,), (EXACT,)):
        return entry.pipelines.get(pipeline[0], pipeline) if len(pipeline) == 1 else pipeline
    ordered = dict.fromkeys([*(name for name in entry.sites if name in passes), *passes])
    have_sites = [name for name in ordered if entry.sites.get(name) != 0 and not _has_options(name, passes)]
    return tuple(n for n in have_sites if pipeline == (ALL,) or passes[n].preserves_computation)


def _has_options(name: str, passes: Mapping[str, Transformation]) -> bool:
    """True of a pass that a zoo file gives options: its name has one of them behind its class."""
    cls = type(passes[name])
    if name == cls.__name__:
        return False
    return name.startswith(tuple(f"{cls.__name__}_{option}_" for option in inspect.signature(cls).parameters))


def checks(entry: Entry, pipeline: tuple[str, ...], passes: Mapping[str, Transformation]) -> list[Check]:
    """Choose the checks that fit a pipeline. Pairs are not timed: the single passes and the full pipelines are."""
    if not pipeline:
        peer = isinstance(entry, Architecture) and entry.peer
        alone = [Check.PARITY, Check.USABLE, *([Check.PEER] if peer else [])]
        return [*alone, Check.LATENCY] if entry.given else alone
    if pipeline[0] in OPTIMIZED:
        return [Check.OPTIMIZE]
    parts = [passes[name] for name in members(entry, pipeline, passes)]
    if len(pipeline) == 1 and entry.sites.get(pipeline[0]) == 0:
        return [Check.EFFECT]
    exact = all(part.preserves_computation for part in parts)
    wanted = [Check.EFFECT, Check.EQUIVALENCE if exact else Check.ACCURACY]
    if all(part.reversible for part in parts):
        wanted.append(Check.ROUND_TRIP)
    if len(pipeline) == 1 and entry.given:
        single = pipeline[0] in passes
        wanted += [Check.LATENCY] if single and entry.large else [Check.USABLE, Check.LATENCY]
    return wanted
