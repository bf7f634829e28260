"""Latency: all arms of a model in the same rounds, and what a row says of them."""

from __future__ import annotations

import dataclasses
import itertools
import time

import pytest
import torch
from torch.fx import GraphModule

from tests.validation.planted import Idle, Inverse, Raise, entry
from validation import timing
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
    return Subject(entry(engines=[]), "cpu", passes, timing=0.3)


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
    assert len({row.measurements["latency_eager_ms"] for row in rows.values()}) == 1
    assert (
        rows["Inverse"].measurements["latency_baseline_ms"] == rows[""].measurements["latency_transformed_ms"]
    )


def test_what_is_slower_is_called_so_and_what_is_the_same_is_not(subject: Subject) -> None:
    slow = latency.check(subject, ("Slow",)).measurements
    assert subject.facts["latency_effect"] == "slower"
    assert slow["latency_ratio_low"] <= slow["latency_ratio"] <= slow["latency_ratio_high"]
    assert slow["latency_transformed_ms"] >= 10
    assert slow["latency_transformed_p90_ms"] >= slow["latency_transformed_ms"]
    assert slow["latency_ratio_eager"] == pytest.approx(
        slow["latency_transformed_ms"] / slow["latency_eager_ms"], rel=0.5
    )


def test_the_a_a_floor_hides_what_is_smaller(subject: Subject) -> None:
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
    assert subject.facts["latency_effect"] == latency.EFFECTS[0]


def test_a_pass_without_a_site_or_with_an_error_costs_its_own_arm_alone(subject: Subject) -> None:
    assert latency.check(subject, ("Idle",)).outcome is Outcome.NO_OP
    failed = latency.check(subject, ("Raise",))
    assert (failed.outcome, failed.reason) == (Outcome.ERROR, "ValueError: no such thing")
    assert subject.stage == "transform"
    assert latency.check(subject, ("Inverse",)).outcome is Outcome.PASS


def test_a_model_that_is_trained_when_it_is_made_is_timed(subject: Subject) -> None:
    trained = Subject(entry("Trained", engines=[]), "cpu", subject.passes, timing=0.3)
    assert latency.check(trained, ("Inverse",)).outcome is Outcome.PASS


def test_rounds_end_when_intervals_are_narrow_or_the_budget_is_spent() -> None:
    same = {name: [1.0, 2.0, 3.0] * 5 for name in ("eager", "captured", "Slow")}
    assert latency.narrow(same)
    assert latency.Measured(same, 1, {}, {}).stopped == "intervals below 2%"
    wide = same | {"Slow": [1.0, 2.1, 2.9, 3.0, 0.9] * 3}
    assert not latency.narrow(wide)
    assert latency.Measured(wide, 1, {}, {}).stopped == "budget spent: 8 s, or 200 rounds"


def test_threads_are_those_of_timing_and_come_back(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "timing_threads", lambda: 2)
    torch.set_num_threads(1)
    assert latency.check(subject, ("Inverse",)).measurements["timing_threads"] == 2
    assert torch.get_num_threads() == 1


def test_a_gpu_is_waited_for_before_and_after_each_run() -> None:
    assert timing.synchronise("cuda") is torch.cuda.synchronize
    waits: list[int] = []
    turn = latency._turn(lambda: None, lambda: waits.append(1))
    before = len(waits)
    turn()
    assert len(waits) == before + 2


def test_the_peak_of_memory_is_what_lives_at_once() -> None:
    def run() -> torch.Tensor:
        first = torch.empty(250_000)  # a megabyte each
        second = first + 1
        del first
        return second + 1

    assert latency.peak_mb(run, "cpu") == pytest.approx(2.0, rel=0.01)


def test_other_engines_are_beside_the_model_or_left_out_with_the_reason(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled(model, inputs, threads):
        return latency.engines.eager(model, inputs, threads)

    def onnxruntime(model, inputs, threads):
        raise ModuleNotFoundError("no onnxruntime", name="onnxruntime")

    monkeypatch.setattr(latency.engines, "compiled", compiled)
    monkeypatch.setattr(latency.engines, "onnxruntime", onnxruntime)
    both = Subject(entry(engines=["torch.compile", "onnxruntime"]), "cpu", subject.passes, timing=0.3)
    measured = latency.check(both, ()).measurements
    assert measured["latency_torch_compile_ms"] > 0
    assert measured["latency_ratio_torch_compile_low"] <= measured["latency_ratio_torch_compile_high"]
    assert not any("onnx" in name for name in measured)
    assert both.facts["engines_left_out"].startswith("onnxruntime: onnxruntime is not installed")
