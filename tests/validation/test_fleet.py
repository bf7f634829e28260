"""The fleet, on a Ray cluster of several nodes on this machine, with cases that say by their name what they do."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from validation.records import Case, Check, Outcome, Record
from validation.running import fleet
from validation.running.fleet import Fleet, FleetError
from validation.running.pool import Pool

ray = pytest.importorskip("ray", reason="the extra `fleet` is not installed")
from ray.cluster_utils import Cluster  # noqa: E402

pytestmark = pytest.mark.long


def case(model: str, number: int = 0, does: str = "pass", check: Check = Check.EFFECT) -> Case:
    return Case(model, (does, str(number)), "cpu", check)


def made(entered: Callable[[Case, str], None], notes: str = "") -> Callable[[Case], Record]:
    def run(case: Case) -> Record:
        entered(case, "capture")
        began = time.time()
        match case.pipeline[0]:
            case "hang":
                time.sleep(600)
            case "exit":
                os._exit(3)
            case "end Ray's process":
                next(
                    parent for parent in psutil.Process().parents() if parent.name().startswith("ray::")
                ).kill()
                time.sleep(600)
            case "slow":
                time.sleep(0.1)
        if notes:
            with open(notes, "a") as file:
                file.write(f"{case.id} {began} {time.time()}\n")
        return Record(case, Outcome.PASS)

    return run


def limit(case: Case) -> float:
    return 1.0 if case.pipeline[0] == "hang" else 60.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        environment.setenv("RAY_USAGE_STATS_ENABLED", "0")
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 2**27})
        cluster.add_node(num_cpus=1, object_store_memory=2**27)
        yield cluster
        with contextlib.suppress(Exception):
            ray.shutdown()
        cluster.shutdown()


@pytest.fixture
def noted(cluster: Any, tmp_path: Path) -> tuple[Fleet, Callable[[], dict[str, list[tuple[float, float]]]]]:
    """A fleet whose cases note when they ran, and what they noted, by case."""
    notes = tmp_path / "notes"
    notes.touch()

    def read() -> dict[str, list[tuple[float, float]]]:
        found: dict[str, list[tuple[float, float]]] = {}
        for line in notes.read_text().splitlines():
            name, began, ended = line.rsplit(" ", 2)
            found.setdefault(name, []).append((float(began), float(ended)))
        return found

    return Fleet(
        functools.partial(made, notes=str(notes)), limit, preload=[__name__], address=cluster.address
    ), read


def outcomes(records: Iterator[Record]) -> dict[Case, tuple[Outcome, str, str]]:
    return {record.case: (record.outcome, record.stage, record.reason) for record in records}


def test_a_cluster_finds_what_one_machine_finds(cluster: Any) -> None:
    cases = [case("a", does="hang"), case("b", does="exit"), *(case("c", number) for number in range(9))]
    there = outcomes(Fleet(made, limit, preload=[__name__], address=cluster.address).run(cases))
    assert there == outcomes(Pool(made, limit).run(cases, 1))
    assert len(there) == len(cases)


def test_a_node_that_is_lost_loses_nothing_and_nothing_that_arrived_runs_again(
    cluster: Any, noted: Any
) -> None:
    engine, read = noted
    lost = cluster.add_node(num_cpus=1, object_store_memory=2**27)
    cases = [case(f"model-{number % 6}", number, "slow") for number in range(60)]
    arrived: list[Case] = []
    found: list[Record] = []
    before: set[str] = set()
    for record in engine.run(cases):
        arrived.append(record.case)
        found.append(record)
        if len(arrived) == 15:
            before = {case.id for case in arrived}
            cluster.remove_node(lost, allow_graceful=False)
    assert sorted(arrived) == sorted(cases)
    assert outcomes(iter(found)) == outcomes(Pool(made, limit).run(cases, 2)), "the table of one machine"
    assert {name: len(runs) for name, runs in read().items() if name in before} == dict.fromkeys(before, 1)


@pytest.mark.nightly
def test_a_case_that_ends_its_node_is_given_up_and_the_others_run(cluster: Any) -> None:
    bad = case("bad", does="end Ray's process")
    cases = [bad, *(case("bad", number) for number in range(1, 4)), case("good")]
    found = outcomes(Fleet(made, limit, preload=[__name__], address=cluster.address).run(cases))
    assert found.keys() == set(cases)
    assert found.pop(bad)[0] is Outcome.CRASH
    assert {outcome for outcome, _, _ in found.values()} == {Outcome.PASS}


def test_a_timed_case_has_its_node_to_itself(noted: Any) -> None:
    engine, read = noted
    timed = [case(f"model-{number}", number, "slow", Check.LATENCY) for number in range(6)]
    others = [case(f"model-{number}", number, "slow") for number in range(6)]
    assert len([*engine.run(others), *engine.run(timed)]) == 12
    spans = sorted(span for name, (span,) in read().items() if name.endswith("latency"))
    at_once = [sum(began <= start < ended for began, ended in spans) for start, _ in spans]
    assert max(at_once) <= 2  # the cluster has two nodes
    rest = [span for name, (span,) in read().items() if not name.endswith("latency")]
    assert not any(began < end and start < ended for start, end in rest for began, ended in spans)


def test_without_ray_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(FleetError, match=r"pip install 'ray>="):
        Fleet(made, limit)


def test_nodes_with_other_versions_are_refused(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = fleet.versions()["torch"]
    monkeypatch.setattr(fleet, "version", lambda name: "1.0")  # in this process alone
    with pytest.raises(FleetError, match=rf"'torch': '1\.0'.* has .*'torch': '{re.escape(theirs)}'"):
        Fleet(made, limit, preload=[__name__], address=cluster.address)
