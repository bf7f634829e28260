"""A made-up run, in the shape of a real one: three models, passes and pairs, two devices, every outcome."""

from __future__ import annotations

import dataclasses
import datetime
import gc
import itertools
import math
import random
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from tests.validation.written import table_of
from validation.records import Case, Check, Outcome, Record
from validation.store import Run

SITES = {
    "bert-base": {"MergeLinears": 12, "FuseBiasInLinear": 74, "ReplaceActivation": 12, "ChangePrecision": 1},
    "resnet-50": {"FuseBatchNorm2dInConv2d": 53, "FuseBiasInLinear": 1, "ChangePrecision": 1},
    "groupvit": {"MergeLinears": 24, "FuseBatchNorm1dInLinear": 2, "ChangePrecision": 1},
}
PASSES = sorted({name for sites in SITES.values() for name in sites} | {"ChangeTrueDivToMulByInverse"})
INEXACT = {"ReplaceActivation", "ChangePrecision"}


@pytest.fixture(autouse=True)
def _collectable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep frozen what the suite has frozen, so that a `Runner` collects in no time; what a test leaves can be collected."""
    monkeypatch.setattr(gc, "freeze", lambda: None)
    monkeypatch.setattr(gc, "unfreeze", lambda: None)


@pytest.fixture
def run() -> Run:
    return Run(
        started=datetime.datetime(2026, 1, 2, 3, 4, 5, 678_000, tzinfo=datetime.UTC),
        commit="acf9a7c1",
        python="3.11.7",
        torch="2.13.0",
        transformers="5.24.0",
        devices={"cpu": "Example CPU, 2 cores", "cuda": "Example GPU"},
        threads=2,
    )


@pytest.fixture
def later(run: Run) -> Run:
    """The same on the next day."""
    return dataclasses.replace(run, started=run.started + datetime.timedelta(days=1))


@pytest.fixture
def table(records: list[Record], run: Run, tmp_path: Path) -> pd.DataFrame:
    """The table of the run, read back."""
    return table_of(records, run, tmp_path)


@pytest.fixture
def make_records() -> Callable[[int], list[Record]]:
    """`make_records(seed)`: a run that found everything right; the seed moves only the noise."""
    return _records


@pytest.fixture
def records() -> list[Record]:
    """A run with every outcome, among them reasons with markup in them and an error that is not a number."""
    records = _records(0)
    ends = [
        (Outcome.FAIL, "compare", "logits differ by 3.2e-01, more than 1e-09 | see <b>node</b> `mul_3`"),
        (Outcome.CRASH, "", "the worker died and sent nothing back"),
        (Outcome.TIMEOUT, "transform", "took more than 120 s"),
        (Outcome.MEMORY, "transform", "DefaultCPUAllocator: can't allocate memory\nTraceback: ..."),
        (Outcome.ERROR, "transform", "ValueError: <script>alert(1)</script> is not a node"),
        (Outcome.EXPECTED, "compare", "rounding of float16, see model_zoo.yaml"),
    ]
    chosen = [i for i, record in enumerate(records) if record.case.check is Check.EQUIVALENCE]
    for index, (outcome, stage, reason) in zip(chosen[3:], ends, strict=False):
        measured = {"relative_error_float64": math.nan} if outcome is Outcome.FAIL else {}
        records[index] = Record(records[index].case, outcome, stage, reason, 1.5, "float32", measured)
    for index, record in enumerate(records):
        if record.case.device == "cuda" and record.case.model == "groupvit":
            records[index] = Record(record.case, Outcome.SKIP, "load", "no CUDA device on this machine")
    return records


def _records(seed: int) -> list[Record]:
    rng = random.Random(seed)
    records = []
    for device, (model, sites) in itertools.product(["cpu", "cuda"], SITES.items()):
        records.append(_record(rng, Case(model, (), device, Check.PARITY), sites))
        pairs = itertools.permutations(sorted(sites), 2)
        pipelines = [(name,) for name in PASSES] + list(pairs) + [tuple(sorted(sites))]
        for pipeline in dict.fromkeys(pipelines):
            exact = [Check.EQUIVALENCE, Check.ROUND_TRIP]
            checks = [Check.ACCURACY] if INEXACT & set(pipeline) else exact
            for check in [*checks, Check.EFFECT, Check.LATENCY]:
                records.append(_record(rng, Case(model, pipeline, device, check), sites))
    return records


def _record(rng: random.Random, case: Case, sites: dict[str, int]) -> Record:
    rewritten = sum(sites.get(name, 0) for name in case.pipeline)
    if case.pipeline and not rewritten and case.check is not Check.EFFECT:
        return Record(case, Outcome.NO_OP, "transform", "nothing to rewrite", rng.uniform(0.1, 1), "float32")
    refused = tuple(
        (name, f"linear_{i}", "its input is used elsewhere") for name in case.pipeline for i in (1, 2)
    )
    ratio = rng.gauss(0.9, 0.005)
    error = 10 ** random.Random(case.id).uniform(-16, -14) * rng.uniform(0.7, 1.4)
    measured: dict[Check, dict[str, float | int]] = {
        Check.PARITY: {"relative_error": 0.0, "relative_error_float64": 0.0, "tensors_compared": 2},
        Check.EQUIVALENCE: {
            "max_abs_error": error * 1e9,
            "relative_error": error * 1e8,
            "relative_error_original": error * 0.9e8,
            "tolerance": 2e-6,
            "relative_error_float64": error,
            "tolerance_float64": 1e-9,
            "tensors_compared": 2,
        },
        Check.ROUND_TRIP: {"tensors_compared": 199},
        Check.EFFECT: {
            "sites": rewritten,
            "refused": len(refused),
            "nodes_before": 500,
            "nodes_after": 500 - rewritten,
            "parameters_before": 109_482_240,
            "parameters_after": 109_482_240,
            "parameters_mb_after": 437.92896,
        },
        Check.ACCURACY: {"agreement": 1 - rng.uniform(0, 0.004), "cosine": 0.9999, "relative_error": 3e-3},
        Check.LATENCY: {
            "latency_baseline_ms": 100.0,
            "latency_transformed_ms": 100 * ratio,
            "latency_ratio": ratio,
            "latency_ratio_low": ratio - 0.01,
            "latency_ratio_high": ratio + 0.012,
        },
    }
    return Record(
        case,
        Outcome.PASS if rewritten or not case.pipeline else Outcome.NO_OP,
        "compare",
        "",
        rng.uniform(0.2, 3),
        "float32",
        measured[case.check],
        refused if case.check is Check.EFFECT else (),
    )
