"""What each pass of a full pipeline adds: its sites, and the error of the graph after it."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterator

import torch
from torch.fx import GraphModule

from .plan import ALL, EXACT
from .subject import Subject, sites_of

FACT = "steps"
"""The fact in which a row has them."""


@dataclasses.dataclass(frozen=True)
class Step:
    """The graph after a pass.

    Attributes:
        name: the pass; empty for the captured graph.
        sites: how many it rewrote.
        error: how far the graph is from the float64 output of the model, relative to the largest value of a tensor.
    """

    name: str
    sites: int
    error: float


def note(subject: Subject, pipeline: tuple[str, ...]) -> None:
    """Make the steps of a full pipeline, in the first dtype of the model, a fact of its row."""
    if pipeline in ((ALL,), (EXACT,)):
        dtype = subject.dtypes[0]
        oracle = subject.oracle(dtype)
        with subject.entering("steps"):
            found = [
                Step(name, sites, oracle.error(graph).max_rel)
                for name, sites, graph in graphs(subject, pipeline, dtype)
            ]
        subject.facts[FACT] = json.dumps([dataclasses.astuple(step) for step in found])


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
