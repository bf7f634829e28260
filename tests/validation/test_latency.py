"""Latency: all arms of a model in the same rounds, and what a row says of them."""

from __future__ import annotations

import dataclasses
import itertools
import time

import pytest
import torch
from torch.fx import GraphModule

from tests.validation.planted import Idle, Inverse, Raise, entry
from validation.checks import latency
from validation.judging.subject import Subject
from validation.records import Outcome


class Slow(Inverse):
    """Takes ten milliseconds more in each run."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        graph_module = super().transform(graph_module)
        node = graph_module.graph.output_node()
        with graph_module.graph.inserting_before(node):
            graph_module.graph.call_function(time.sleep, (0.01,))
        return graph_module


PASSES = {"Inverse": Inverse, "Slow": Slow, "Idle": Idle, "Raise": Raise}


@pytest.fixture
def subject() -> Subject:
    passes = {name: make() for name, make in PASSES.items()}
    return Subject(entry(), "cpu", passes, timing=0.3)


def test_all_arms_are_in_the_same_rounds_once(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = itertools.count()
    measure = latency.measure
    monkeypatch.setattr(latency, "measure", lambda subject: (next(calls), measure(subject))[1])
    rows = {
        name: latency.check(subject, pipeline) for name, pipeline in (("", ()), ("Inverse", ("Inverse",)))
    }
    rows["Slow"] = latency.check(subject, ("Slow",))
    assert next(calls) == 1
    assert len({row.measurements["latency_pairs"] for row in rows.values()}) == 1
    assert len({row.measurements["latency_ratio_floor"] for row in rows.values()}) == 1
    assert (
        rows["Inverse"].measurements["latency_baseline_ms"] == rows[""].measurements["latency_transformed_ms"]
    )


def test_what_is_slower_is_measured_so(subject: Subject) -> None:
    slow = latency.check(subject, ("Slow",)).measurements
    assert 1 < slow["latency_ratio_low"] <= slow["latency_ratio"] <= slow["latency_ratio_high"]
    assert slow["latency_transformed_ms"] >= 10
    assert slow["latency_ratio_eager"] > 1


def test_the_a_a_floor_is_what_two_arms_of_the_same_graph_seem_apart(subject: Subject) -> None:
    measured = latency.measure(subject)
    graph = [1.0, 1.1] * 10
    times = {
        "eager": graph,
        "captured": graph,
        "captured, again": [1.2 * t for t in graph],
        "Slow": [1.1 * t for t in graph],
    }
    subject.timed = dataclasses.replace(measured, times=times)
    finding = latency.check(subject, ("Slow",))
    assert finding.measurements["latency_ratio_floor"] == pytest.approx(0.2)


def test_a_pass_without_a_site_or_with_an_error_costs_its_own_arm_alone(subject: Subject) -> None:
    assert latency.check(subject, ("Idle",)).outcome is Outcome.NO_OP
    failed = latency.check(subject, ("Raise",))
    assert (failed.outcome, failed.reason) == (Outcome.ERROR, "ValueError: no such thing")
    assert subject.stage == "transform"
    assert latency.check(subject, ("Inverse",)).outcome is Outcome.PASS


def test_a_model_that_is_trained_when_it_is_made_is_timed(subject: Subject) -> None:
    trained = Subject(entry("Trained"), "cpu", subject.passes, timing=0.3)
    assert latency.check(trained, ("Inverse",)).outcome is Outcome.PASS


def test_rounds_end_when_intervals_are_narrow() -> None:
    same = {name: [1.0, 2.0, 3.0] * 5 for name in ("eager", "captured", "Slow")}
    assert latency.narrow(same)
    wide = same | {"Slow": [1.0, 2.1, 2.9, 3.0, 0.9] * 3}
    assert not latency.narrow(wide)


def test_the_peak_of_memory_is_what_lives_at_once() -> None:
    def run() -> torch.Tensor:
        first = torch.empty(250_000)  # a megabyte each
        second = first + 1
        del first
        return second + 1

    assert latency.peak_mb(run, "cpu") == pytest.approx(2.0, rel=0.01)
