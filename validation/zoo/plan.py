"""The plan: zoo × passes × devices as a sorted list of cases. All functions are pure."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from fxopt.rewriting.transformation import Transformation

from ..records import Case, Check
from .entry import Entry
from .sources import Architecture

ALL = "all"
"""The pipeline of all passes that have sites in the model, or for which no sites are recorded."""

EXACT = "exact"
"""The pipeline of those passes in `all` that preserve the computation."""


OPTIMIZED: Mapping[str, Mapping[str, Any]] = {
    "optimize": {},
    "optimize_bfloat16": {"precision": "bfloat16"},
    "optimize_int8": {"precision": "int8"},
    "optimize_inductor": {"engine": "inductor"},
    "optimize_openvino": {"engine": "openvino"},
}
"""The pipelines that call `fxopt.optimize` with these options, on the CPU: in each precision, and with each engine."""


def plan(zoo: Sequence[Entry], passes: Mapping[str, Transformation], devices: Sequence[str]) -> list[Case]:
    """List every case of a zoo, on each device.

    A model is paired with: no pass; each pass; each ordered pair of passes with sites (except in a large model); the full
    pipelines `all` and `exact`, and those of the zoo; and `fxopt.optimize` in each precision and with each engine. The
    hundreds of models of a sweep are only paired with no pass and with single passes, and are not timed.

    A pass recorded with no sites is planned only for its effect: that it finds nothing. A pass without a record is planned
    in full, but not in pairs.
    """
    return sorted(
        Case(entry.name, pipeline, device, check)
        for entry in zoo
        for pipeline in [(), *pipelines(entry, passes)]
        for check in checks(entry, pipeline, passes)
        for device in devices
        if check is not Check.OPTIMIZE or device == "cpu"
    )


def unmet(zoo: Sequence[Entry], passes: Mapping[str, Transformation], devices: Sequence[str]) -> list[str]:
    """The known failures and tolerances without a planned case, one line each: they excuse nothing, and hide a mistake."""
    found = []
    for entry in zoo:
        cases = plan([entry], passes, devices) if entry.known_failures or entry.tolerances else []
        for failure in entry.known_failures:
            if not any(map(failure.covers, cases)):
                where = f" on {failure.device}" if failure.device else ""
                what = f"{failure.check} of {failure.pipeline or 'no pass'!r}{where}"
                found.append(f"{entry.name}: known_failures: no planned case is {what}")
        unknown = {each.pipeline for each in entry.tolerances} - {"+".join(case.pipeline) for case in cases}
        found += [f"{entry.name}: tolerances: no planned case is of {name!r}" for name in sorted(unknown)]
    return found


def content(case: Case, entry: Entry, passes: Mapping[str, Transformation]) -> str:
    """A digest of the definition of a case: of its model, and of its passes with their options."""
    fields = {"model", "config", "weights", "inputs", "sizes", "dynamic_shapes", "dtype"}
    made = entry.model_dump_json(include=fields)
    parts = [passes[name] for name in members(entry, case.pipeline, passes)]
    made += "".join(
        repr(part) if dataclasses.is_dataclass(part) else type(part).__qualname__ for part in parts
    )
    return hashlib.sha256(made.encode()).hexdigest()[:12]


def pipelines(entry: Entry, passes: Mapping[str, Transformation]) -> list[tuple[str, ...]]:
    """The pipelines that are applied to a model; `all`, `exact` and those of the zoo are given by name."""
    if not entry.given:
        return [(name,) for name in passes]
    with_sites = [name for name, count in entry.sites.items() if count and name in passes]
    named = [(name,) for name in (ALL, EXACT) if len(members(entry, (name,), passes)) > 1]
    named += [(name,) for name in (*entry.pipelines, *OPTIMIZED)]
    pairs = () if entry.large else itertools.permutations(with_sites, 2)
    return [*((name,) for name in passes), *pairs, *named]


def members(entry: Entry, pipeline: tuple[str, ...], passes: Mapping[str, Transformation]) -> tuple[str, ...]:
    """The passes of a pipeline, in order; none for `fxopt.optimize`, which picks its own.

    `all` and `exact` leave out passes recorded with no sites.
    """
    if pipeline and pipeline[0] in OPTIMIZED:
        return ()
    if pipeline not in ((ALL,), (EXACT,)):
        return entry.pipelines.get(pipeline[0], pipeline) if len(pipeline) == 1 else pipeline
    ordered = dict.fromkeys([*(name for name in entry.sites if name in passes), *passes])
    have_sites = [name for name in ordered if entry.sites.get(name) != 0]
    return tuple(n for n in have_sites if pipeline == (ALL,) or passes[n].preserves_computation)


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
