"""Rounds in a random order, and the interval around a ratio of paired times."""

from __future__ import annotations

import math

import numpy as np

from validation.timing import in_random_order, ratio


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
