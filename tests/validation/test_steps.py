"""Of a full pipeline, each pass has its sites and the error of the graph after it."""

from __future__ import annotations

import dataclasses
import json

from fxopt import FuseBiasInLinear, MergeLinears, ReplaceActivation
from validation import store
from validation.judging.steps import FACT, LATENCY, noted
from validation.records import Case, Check, Outcome, Record
from validation.report import markdown
from validation.report.pipelines import steps
from validation.running.run import Runner
from validation.zoo.entry import Entry
from validation.zoo.plan import ALL


def test_the_pass_that_adds_an_error_shows_it(run: store.Run) -> None:
    entry = Entry.model_validate(
        {
            "name": "layers",
            "model": "tests.validation.faulty_models.Activated",
            "sizes": "fixed",
            "inputs": {"x": {"shape": [2, 4]}},
            "engines": [],
            "sites": dict.fromkeys(["MergeLinears", "FuseBiasInLinear", "ReplaceActivation"]),
        }
    )
    passes = {each.__name__: each() for each in (FuseBiasInLinear, MergeLinears, ReplaceActivation)}
    runner = Runner([entry], passes, timing=0.1)
    record = runner.run(Case("layers", (ALL,), "cpu", Check.ACCURACY))
    assert record.outcome is Outcome.PASS, record.reason
    captured, fused, replaced = noted(record.facts[FACT])  # MergeLinears finds nothing
    assert [step.name for step in (captured, fused, replaced)] == [
        "",
        "FuseBiasInLinear",
        "ReplaceActivation",
    ]
    assert (captured.sites, fused.sites, replaced.sites) == (0, 2, 1)
    assert captured.error < 1e-6
    assert fused.error < 1e-6
    assert 1e-5 < replaced.error < 1e-2
    timed = runner.run(dataclasses.replace(record.case, check=Check.LATENCY))
    assert timed.outcome is Outcome.PASS, timed.reason
    changes = json.loads(timed.facts[LATENCY])
    assert [name for name, *_ in changes] == ["FuseBiasInLinear", "ReplaceActivation"]
    assert all(0 < low <= middle <= high for _, middle, low, high in changes)
    other = Record(dataclasses.replace(record.case, pipeline=()), Outcome.PASS)
    frame = store.table_of([record, timed, other], run).to_pandas()
    shown = steps(frame)
    assert shown["after"].tolist() == ["capture", "FuseBiasInLinear", "ReplaceActivation"]
    assert shown["latency, after / before"].str.contains(r"\[").tolist() == [False, True, True]
    assert "| ReplaceActivation | 1 |" in markdown.compatibility(frame, "layers")


def test_a_run_without_steps_has_no_rows(run: store.Run, records: list) -> None:
    assert steps(store.table_of(records, run).to_pandas()).empty
