"""Which items a worker gets, without workers."""

from __future__ import annotations

from typing import Any

import pytest

from validation.scheduling import PhasedScheduling


class Worker:
    shutting_down = False

    def __init__(self) -> None:
        self.ran: list[int] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.ran += indices


def test_the_longest_models_come_first_and_unknown_ones_last(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pytestconfig.option, "tx", ["2*popen"])
    seconds = {"short": 1.0, "long": 100.0, "middle": 10.0}
    items = ["short 0", "unknown 0", "long 0", "long 1", "middle 0"]
    scheduling: Any = PhasedScheduling(
        pytestconfig,
        None,
        group_of=lambda item: item.split()[0],
        seconds_of=lambda group: seconds.get(group, 0.0),
        is_timed=lambda item: False,
    )
    one, other = Worker(), Worker()
    scheduling.collection, scheduling.pending = items, [*range(len(items))]
    scheduling.node2pending = {one: [], other: []}
    for worker in (one, other, one, other, one):
        assert scheduling._deal(worker)
    assert [items[index] for index in one.ran] == ["long 0", "long 1", "unknown 0"]
    assert [items[index] for index in other.ran] == ["middle 0", "short 0"]
