"""The pool, with cases that say by their name what they do."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from validation.records import UNTRIED, Case, Check, Outcome, Record
from validation.running.pool import Pool, PoolError


def case(model: str, number: int = 0, does: str = "pass") -> Case:
    return Case(model, (does, str(number)), "cpu", Check.EFFECT)


def made(entered: Callable[[Case, str], None], broken: bool = False) -> Callable[[Case], Record]:
    if broken:
        raise ValueError("no such zoo")

    def run(case: Case) -> Record:
        entered(case, "capture")
        match case.pipeline[0]:
            case "hang":
                time.sleep(600)
            case "exit":
                os._exit(3)
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "raise":
                raise RuntimeError("CUDA error: device-side assert triggered\nsee above")
            case "slow":
                time.sleep(0.1)
        return Record(case, Outcome.PASS, facts={"process": str(os.getpid())})

    return run


def pool(**options: Any) -> Pool:
    """With what is preloaded by default: the first pool of a process decides that for all after it, such as those of a run."""
    return Pool(made, **{"limit": lambda case: 0.5, **options})


def test_what_dies_or_hangs_is_a_row_with_its_stage_and_the_others_go_on() -> None:
    cases = [case("a", does="hang"), case("b", does="exit"), case("c", does="killed"), case("d")]
    found = {record.case.model: record for record in pool().run(cases, 2)}
    assert {model: record.outcome for model, record in found.items()} == {
        "a": Outcome.TIMEOUT,
        "b": Outcome.CRASH,
        "c": Outcome.MEMORY,
        "d": Outcome.PASS,
    }
    assert {found[model].stage for model in "abc"} == {"capture"}
    assert found["a"].reason == "took more than 0.5 s, so its process was ended, in run (test_pool.py:34)"
    assert found["b"].reason == "the process ended itself with status 3"
    assert "SIGKILL" in found["c"].reason
    assert found["a"].seconds >= 0.5


def test_an_error_that_ends_a_process_is_the_reason() -> None:
    (found,) = pool(limit=lambda case: 30.0).run([case("a", does="raise")], 1)
    assert (found.outcome, found.stage) == (Outcome.CRASH, "capture")
    assert found.reason == (
        "the process ended itself with status 1: RuntimeError: CUDA error: device-side assert triggered"
    )


def test_a_model_that_died_twice_is_not_tried_again() -> None:
    cases = [*(case("bad", number, "exit") for number in range(20)), case("good")]
    begun: list[Case] = []
    run = pool()
    found = {record.case: record for record in run.run(cases, 1, begun.append)}
    assert found.keys() == set(begun) == set(cases)
    tried = [record for record in found.values() if not record.reason.startswith(UNTRIED)]
    assert [record.case.model for record in tried] == ["bad", "bad", "good"]
    assert {record.outcome for record in tried} == {Outcome.CRASH, Outcome.PASS}
    untried = [record for record in found.values() if record not in tried]
    assert {record.outcome for record in untried} == {Outcome.SKIP}
    assert {record.reason for record in untried} == {f"{UNTRIED} {', '.join(each.id for each in cases[:2])}"}
    (later,) = run.run([case("bad", 99)], 1)  # in the next phase as well
    assert later.reason == untried[0].reason


def test_a_worker_stays_with_a_model_and_the_largest_comes_first() -> None:
    sizes = {"small": 6, "large": 9}
    cases = [case(model, number, "slow") for model, count in sizes.items() for number in range(count)]
    begun: list[Case] = []
    found = list(pool().run(cases, 2, begun.append))
    assert [*dict.fromkeys(one.model for one in begun)] == ["large", "small"]
    of_model = {model: {r.facts["process"] for r in found if r.case.model == model} for model in sizes}
    assert len(of_model["small"]) == 1


def test_all_that_is_left_is_shared() -> None:
    found = list(pool().run([case("one", number, "slow") for number in range(10)], 2))
    assert len({record.facts["process"] for record in found}) == 2


def test_a_worker_that_cannot_start_is_an_error_with_what_it_said() -> None:
    broken = Pool(functools.partial(made, broken=True), limit=lambda case: 1.0)
    with pytest.raises(PoolError, match="no such zoo"):
        list(broken.run([case("a")], 1))


@pytest.mark.parametrize("end", ["sys.exit()", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_workers_end_with_the_process_that_they_work_for(end: str) -> None:
    hanging = f"""
from tests.validation.test_pool import *
if __name__ == "__main__":
    cases = [case("bad", does="hang"), case("good", does="slow")]
    records = pool(limit=lambda case: 600, preload=[]).run(cases, 2)
    next(records)
    time.sleep(0.5)
    {end}
"""
    run = subprocess.Popen([sys.executable, "-c", hanging], start_new_session=True)
    run.wait(60)
    deadline = time.monotonic() + 10
    while left := in_session(run.pid):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def in_session(session: int) -> list[psutil.Process]:
    """The processes of a session that still do something."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
