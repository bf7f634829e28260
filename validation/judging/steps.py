"""The steps of a full pipeline: of each pass its sites, and the error and the latency of the graph after it."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import json
from collections.abc import Iterator

import numpy as np
import torch
from torch.fx import GraphModule

from fxopt.submodules import sharing_copy

from ..timing import in_random_order, ratio, seconds_of, synchronise
from ..zoo.plan import EXACT
from .rewritten import sites_of
from .subject import Subject

FACT, LATENCY = "steps", "latency_steps"
"""The facts in which rows have them: those that compare outputs, and those that are timed."""

FEWEST, SHARE = 5, 0.25
"""Rounds go on for this share of the seconds in which pipelines are timed, but there are at least so many: they tell which
pass it is, not by how much to a percent.
"""


@dataclasses.dataclass(frozen=True)
class Step:
    """The graph after a pass; without a name, the captured one."""

    name: str
    sites: int  # that the pass rewrote
    error: float  # to the float64 output of the model, relative to the largest value of a tensor


def note(subject: Subject, pipeline: tuple[str, ...]) -> None:
    """Make the steps of a full pipeline, in the first dtype of the model, a fact of its row."""
    if _is_named(subject, pipeline):
        dtype = subject.dtypes[0]
        oracle = subject.oracle(dtype)
        with subject.entering("steps"):
            found = [
                Step(name, sites, oracle.error(graph).max_rel)
                for name, sites, graph in graphs(subject, pipeline, dtype)
            ]
        subject.facts[FACT] = json.dumps([dataclasses.astuple(step) for step in found])


def note_latency(subject: Subject, pipeline: tuple[str, ...], threads: int) -> None:
    """Make it a fact by what each pass of a full pipeline changes the time of the graph: name, ratio, 95 % interval."""
    if not _is_named(subject, pipeline):
        return
    dtype, before = subject.dtypes[0], torch.get_num_threads()
    inputs = subject.inputs(dtype)
    wait = synchronise(subject.device)
    torch.set_num_threads(threads)
    try:
        with subject.entering("steps"), torch.no_grad():
            runs = {
                name: functools.partial(sharing_copy(graph), **inputs)
                for name, _, graph in graphs(subject, pipeline, dtype)
            }
            for run in runs.values():
                run()
            turns = {name: functools.partial(seconds_of, run, wait) for name, run in runs.items()}
            times = in_random_order(turns, FEWEST, SHARE * subject.timing, np.random.default_rng(0))
    finally:
        torch.set_num_threads(before)
    found = [
        (name, *dataclasses.astuple(ratio(times[name], times[earlier])))
        for earlier, name in itertools.pairwise(times)
    ]
    subject.facts[LATENCY] = json.dumps(found)


def _is_named(subject: Subject, pipeline: tuple[str, ...]) -> bool:
    """True of one name for several passes: a full pipeline, or one that the zoo names; of a large model, `all` has the steps of `exact`."""
    several = len(pipeline) == 1 < len(subject.members(pipeline))
    return several and not (subject.entry.large and pipeline == (EXACT,))


def noted(text: str) -> list[Step]:
    """The steps out of a fact."""
    return [Step(*each) for each in json.loads(text)]


def graphs(
    subject: Subject, pipeline: tuple[str, ...], dtype: torch.dtype
) -> Iterator[tuple[str, int, GraphModule]]:
    """The captured graph, and a graph after each pass that finds something to rewrite, with name and sites.

    It is one graph that changes: use each before asking for the next.
    """
    traced = subject.traced(dtype)
    graph = copy.deepcopy(traced)
    yield "", 0, graph
    for name, pass_ in subject.members(pipeline):
        before = copy.deepcopy(graph)
        graph = pass_(graph)
        if sites := sites_of(pass_, before, graph):
            yield name, sites, graph
