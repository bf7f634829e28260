"""The pipelines that are `fxopt.optimize`: what they compare, and what they report."""

from __future__ import annotations

import pytest
import torch

from fxopt.optimizing import prepare
from validation.judging.subject import Subject
from validation.records import Case, Check, Outcome
from validation.report import tables
from validation.running.run import Runner
from validation.store.table import table_of
from validation.zoo.entry import Entry
from validation.zoo.plan import OPTIMIZED

ENTRY = Entry(
    name="net-small",
    model="validation.zoo.heads.projector",
    sizes="fixed",
    config={"width": 64},
    inputs={"input": {"shape": [4, 64]}},
)


def run_one(pipeline):
    return Runner([ENTRY], {}).run(Case(ENTRY.name, (pipeline,), "cpu", Check.OPTIMIZE))


@pytest.mark.parametrize("pipeline", OPTIMIZED)
def test_an_optimized_model_is_compared_and_its_speed_up_reported(pipeline):
    record = run_one(pipeline)
    assert record.outcome is Outcome.PASS, record.reason
    assert record.measurements["relative_error"] <= record.measurements["tolerance"]
    assert record.measurements["latency_ratio"] > 0


def test_a_wrong_graph_fails(monkeypatch):
    lowered = prepare.lowered

    def wrong(*args):
        made = lowered(*args)
        monkeypatch.setattr(prepare, "lowered", lowered)
        object.__setattr__(made, "function", lambda **inputs: torch.zeros(4, 64))
        return made

    monkeypatch.setattr(prepare, "lowered", wrong)
    monkeypatch.setattr(prepare, "_judge", lambda *args: None)
    record = run_one("optimize")
    assert (record.outcome, record.stage) == (Outcome.FAIL, "compare")
    assert "the outputs in float32 moved by 1 of their norm, the limit is 0.001" in record.reason


def test_a_model_without_a_graph_says_why(monkeypatch, run):
    def unused(*args):
        raise prepare.Unused("the graph is slower than eager")

    monkeypatch.setattr(prepare, "_judge", unused)
    record = run_one("optimize")
    assert record.outcome is Outcome.PASS
    assert record.facts["eager"] == "the graph is slower than eager"
    (row,) = tables.compatibility(table_of([record], run).to_pandas()).to_dict("records")
    assert row["latency, transformed / original (95 % interval)"] == "1.000"
    assert row["reason"] == "the graph is slower than eager"


def test_it_is_no_matter_which_subject_asks():
    assert Subject(ENTRY, "cpu", {}).members(("optimize",)) == []
