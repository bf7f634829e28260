"""The metrics, on outputs whose answer is known."""

from __future__ import annotations

import doctest
import math
from types import ModuleType

import pytest
import torch

from validation.judging import metrics
from validation.judging.metrics import METRICS, agreement, cosine, relative_error
from validation.regressions import metric

ONES = {"a": torch.ones(2, 3, dtype=torch.float64)}


@pytest.mark.parametrize(("module", "examples"), [(metric, 3), (metrics, 3)])
def test_the_examples_run(module: ModuleType, examples: int) -> None:
    assert doctest.testmod(module) == (0, examples)


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


@pytest.mark.parametrize(("name", "best"), [("agreement", 1), ("cosine", 1), ("relative_error", 0)])
def test_equal_outputs_have_the_best_value(name: str, best: float) -> None:
    output = {"logits": torch.randn(4, 5, dtype=torch.float64), "state": torch.randn(3, dtype=torch.float64)}
    assert METRICS[name](output, dict(output)) == pytest.approx(best)


def test_agreement_counts_predictions_of_logits_alone() -> None:
    reference = {"logits": torch.eye(4), "state": torch.eye(2)}
    candidate = {"logits": torch.eye(4)[[0, 1, 3, 2]], "state": -torch.eye(2)}
    assert agreement(reference, candidate) == 0.5


def test_agreement_needs_something_to_compare() -> None:
    with pytest.raises(AssertionError, match="no vectors"):
        agreement({"loss": torch.tensor(1.0)}, {"loss": torch.tensor(1.0)})


def test_cosine_is_that_of_the_worst_tensor() -> None:
    assert cosine({**ONES, "b": torch.tensor([1.0])}, {**ONES, "b": torch.tensor([-1.0])}) == -1


def test_errors_are_those_of_the_worst_tensor() -> None:
    candidate = {"a": ONES["a"] * 1.5, "b": torch.tensor([8.0])}
    reference = {**ONES, "b": torch.tensor([10.0])}
    assert relative_error(reference, candidate) == pytest.approx(0.5)


def test_the_relative_error_of_a_zero_reference() -> None:
    zero = {"a": torch.zeros(2, 3)}
    assert relative_error(zero, zero) == 0
    assert math.isinf(relative_error(zero, {"a": torch.ones(2, 3)}))
