"""Rounds in a random order, and the interval around a ratio of paired times."""

from __future__ import annotations

import doctest
import math

import numpy as np
import pytest

from validation import timing
from validation.timing import Ratio, in_random_order, ratio


def test_rounds_take_every_turn_once_in_another_order():
    taken = []
    turns = {name: lambda name=name: taken.append(name) or 1.0 for name in "abcd"}
    times = in_random_order(turns, 5, 0.0, np.random.default_rng(0))
    assert {name: len(seconds) for name, seconds in times.items()} == dict.fromkeys("abcd", 5)
    rounds = [taken[start : start + 4] for start in range(0, 20, 4)]
    assert all(sorted(order) == list("abcd") for order in rounds)
    assert len({tuple(order) for order in rounds}) > 1


def test_a_ratio_is_paired():
    baseline = np.array([1.0, 10.0, 100.0] * 5)  # a machine that slows down does so for both
    found = ratio(baseline, baseline / 2)
    assert (found.median, found.low, found.high) == (2, 2, 2)
    rng = np.random.default_rng(0)
    found = ratio(rng.uniform(0.9, 1.1, 200), rng.uniform(0.9, 1.1, 200))
    assert found.low < 1 < found.high
    assert found.high - found.low < 0.1
    assert math.isnan(ratio([1.0], [2.0]).low)


def test_there_are_at_most_so_many_rounds():
    times = in_random_order({"a": lambda: 1.0}, 2, 1e9, np.random.default_rng(0), most=5)
    assert len(times["a"]) == 5


def test_rounds_end_when_it_is_enough():
    asked = []

    def enough(times):
        asked.append(len(times["a"]))
        return asked[-1] >= 9

    times = in_random_order({"a": lambda: 1.0}, 4, 1e9, np.random.default_rng(0), enough=enough)
    assert asked == [4, 7, 11]
    assert len(times["a"]) == 11


@pytest.mark.parametrize(
    ("found", "floor", "effect"),
    [
        (Ratio(0.90, 0.88, 0.92), 0.05, -1),
        (Ratio(1.10, 1.08, 1.12), 0.05, 1),
        (Ratio(0.90, 0.88, 0.92), 0.12, 0),  # two arms that are the same seem as far apart
        (Ratio(0.90, 0.78, 1.02), 0.05, 0),  # the interval holds 1
        (Ratio(math.nan, math.nan, math.nan), 0.05, 0),
    ],
)
def test_nothing_below_the_floor_is_an_effect(found, floor, effect):
    assert found.effect(floor) == effect


def test_the_floor_is_the_far_end_of_the_interval():
    assert timing.floor_of(Ratio(1.01, 0.98, 1.05)) == pytest.approx(0.05)


def test_examples():
    assert doctest.testmod(timing).failed == 0
