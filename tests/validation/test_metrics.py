"""The metrics, on outputs whose answer is known."""

from __future__ import annotations

import math

import pytest
import torch

from validation.checks.accuracy import agreement
from validation.regressions import metric


@pytest.mark.parametrize(
    ("name", "was", "now", "change"),
    [
        ("relative_error", 1e-8, math.inf, 1),
        ("relative_error", math.inf, 1e-8, -1),
        ("relative_error", math.inf, math.inf, 0),
        ("relative_error", 0.0, 1e-13, 0),
        ("agreement", 1.0, 0.9, 1),
        ("nodes_after", 10, 20, -1),
        ("memory_peak_mb", 10, 20, 1),
        ("relative_error_original", 1e-8, 1.0, 0),
    ],
)
def test_a_change_is_worse_better_or_noise(name: str, was: float, now: float, change: int) -> None:
    assert metric.metric_of(name).changed(was, now) == change


def test_agreement_counts_predictions_of_logits_alone() -> None:
    reference = {"logits": torch.eye(4), "state": torch.eye(2)}
    candidate = {"logits": torch.eye(4)[[0, 1, 3, 2]], "state": -torch.eye(2)}
    assert agreement(reference, candidate) == 0.5


def test_outputs_without_vectors_have_no_predictions() -> None:
    assert agreement({"loss": torch.tensor(1.0)}, {"loss": torch.tensor(1.0)}) is None
