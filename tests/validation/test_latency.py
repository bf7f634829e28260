"""Latency: pairs timed turn by turn, and the interval around their ratio."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.validation.planted import (
    Inverse,
    run,
)
from validation.checks import latency
from validation.records import Check


def test_latency_measures_and_leaves_the_threads_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "SECONDS", 0.0)
    monkeypatch.setattr(latency, "timing_threads", lambda: 2)
    torch.set_num_threads(1)
    finding = run(Check.LATENCY, Inverse)
    measured = finding.measurements
    assert measured["timing_threads"] == 2
    assert measured["latency_pairs"] == latency.FEWEST
    assert measured["latency_ratio_low"] <= measured["latency_ratio"] <= measured["latency_ratio_high"]
    assert torch.get_num_threads() == 1


def test_a_gpu_is_waited_for_before_and_after_each_run() -> None:
    assert latency.synchronise("cuda") is torch.cuda.synchronize
    waits: list[int] = []
    latency.time_pairs(lambda: None, lambda: None, lambda: waits.append(1))
    assert len(waits) >= 4 * (latency.WARM_UP + latency.FEWEST)


def test_the_ratio_of_paired_times_has_an_interval_around_the_truth() -> None:
    noise = np.random.default_rng(0).lognormal(sigma=0.05, size=(200, 2))
    pairs = noise * [0.010, 0.008] * np.linspace(1, 3, 200)[:, None]  # the machine grows slower all the time
    measured = latency.summarise(pairs)
    assert measured["latency_ratio_low"] < 0.8 < measured["latency_ratio_high"]
    assert measured["latency_ratio_high"] - measured["latency_ratio_low"] < 0.04


def test_pairs_are_timed_turn_by_turn() -> None:
    calls: list[str] = []
    pairs = latency.time_pairs(lambda: calls.append("b"), lambda: calls.append("t"), lambda: None)
    timed = "".join(calls[2 * latency.WARM_UP :])
    assert len(timed) == 2 * len(pairs)
    assert timed.startswith("bttbbttb")
