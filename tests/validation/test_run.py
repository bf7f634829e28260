"""A case becomes a record, whatever happens in it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fxopt import Transformation
from tests.validation.planted import (
    AlmostInverse,
    BadReverse,
    Inverse,
    Raise,
    entry,
)
from validation.judging.subject import Subject
from validation.records import Case, Check, Outcome, Record
from validation.running.run import Runner
from validation.zoo import build
from validation.zoo.entry import Entry


def runner(pass_: type[Transformation], **fields: Any) -> Callable[[Check], Any]:
    passes = {pass_.__name__: pass_()}
    made = Runner([entry(**fields)], passes)
    return lambda check: made.run(Case("net", tuple(passes), "cpu", check))


def test_an_error_is_a_record_with_its_stage_place_and_pass() -> None:
    record = runner(Raise)(Check.EQUIVALENCE)
    assert (record.outcome, record.stage) == (Outcome.ERROR, "transform")
    assert "ValueError: no such thing" in record.reason
    assert "Raise" in record.reason
    assert "planted.py" in record.reason


@pytest.mark.parametrize("check", [Check.EQUIVALENCE, Check.LATENCY, Check.OPTIMIZE, Check.PARITY])
def test_a_model_that_raises_by_itself_ends_before_its_capture(check: Check) -> None:
    made = Runner([entry(inputs={"x": {"shape": [5, 3]}})], {"Inverse": Inverse()})
    pipeline = {Check.OPTIMIZE: ("optimize",), Check.PARITY: ()}.get(check, ("Inverse",))
    record = made.run(Case("net", pipeline, "cpu", check))
    assert (record.outcome, record.stage) == (Outcome.ERROR, "run the model")
    assert record.reason.startswith("RuntimeError: mat1 and mat2 shapes cannot be multiplied")


def test_a_reason_controls_no_terminal() -> None:
    record = Record(Case("planted", (), "cpu", Check.PARITY), Outcome.ERROR, reason="a\x1b[31m red\nline")
    assert record.reason == "a[31m red\nline"


def test_a_failed_comparison_is_a_failure_and_no_error() -> None:
    record = runner(BadReverse)(Check.ROUND_TRIP)
    assert (record.outcome, record.stage) == (Outcome.FAIL, "reverse")


def test_a_check_that_raises_in_its_comparison_fails_and_its_model_is_let_go() -> None:
    made, models = Runner([entry()], {}), []

    def differs(subject: Subject, pipeline: tuple[str, ...]) -> None:
        models.append(weakref.ref(subject.model(torch.float32)))
        subject.enter("compare")
        raise AssertionError("values differ")

    made._checks = {**made._checks, Check.EFFECT: differs}
    record = made.run(Case("net", (), "cpu", Check.EFFECT))
    assert (record.outcome, record.reason) == (Outcome.FAIL, "values differ")
    assert models[0]() is None


def test_running_out_of_memory_is_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_much(self: Inverse, divisor: float) -> float:
        return float(torch.empty(2**62, dtype=torch.uint8)[0])

    monkeypatch.setattr(Inverse, "factor", too_much)
    record = runner(Inverse)(Check.EQUIVALENCE)
    assert (record.outcome, record.stage) == (Outcome.MEMORY, "transform")


def test_after_a_failure_the_next_case_starts_afresh() -> None:
    run_check = runner(BadReverse)
    assert run_check(Check.ROUND_TRIP).outcome is Outcome.FAIL
    assert run_check(Check.EQUIVALENCE).outcome is Outcome.PASS


def test_the_last_model_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    layers: list[weakref.ref[torch.nn.Module]] = []  # which the graphs have, too
    built = build.build_model

    def remembered(entry: Entry) -> torch.nn.Module:
        model = built(entry)
        layers.append(weakref.ref(next(model.children())))
        return model

    monkeypatch.setattr(build, "build_model", remembered)
    made = Runner([entry(name="first"), entry(name="second")], {"Inverse": Inverse()})
    for name in ("first", "second"):
        assert made.run(Case(name, ("Inverse",), "cpu", Check.EQUIVALENCE)).outcome is Outcome.PASS
    gc.collect()
    assert [layer() is None for layer in layers] == [True, False]


def test_a_known_failure_is_expected_and_its_absence_a_failure() -> None:
    known = [
        {"check": check, "pipeline": "AlmostInverse", "reason": "too rough"}
        for check in ("equivalence", "effect")
    ]
    run_check = runner(AlmostInverse, known_failures=known)
    expected, missing = run_check(Check.EQUIVALENCE), run_check(Check.EFFECT)
    assert expected.outcome is Outcome.EXPECTED
    assert expected.reason.startswith("too rough (fail: in float64")
    assert missing.outcome is Outcome.FAIL
    assert "known_failures" in missing.reason
