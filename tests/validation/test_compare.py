from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import nn

from fxopt.testing import Grade, Verdict
from validation import store
from validation.judging import comparison
from validation.records import FAILING, WORST_FIRST, Case, Check, Outcome, Record
from validation.regressions import compare
from validation.regressions.metric import UNKNOWN, metric_of

ROOT = Path(__file__).resolve().parents[2]
CASE = Case("bert", ("MergeLinears",), "cpu", Check.EQUIVALENCE)
OTHER = dataclasses.replace(CASE, check=Check.PARITY, pipeline=())


@pytest.fixture
def changes(run, tmp_path):
    def changes(before, after, after_run=None):
        tables = []
        for number, (records, made) in enumerate([(before, run), (after, after_run or run)]):
            directory = tmp_path / f"{number}-{len(list(tmp_path.iterdir()))}"
            store.write_table(store.table_of(records, made), directory)
            tables.append(store.read_run(directory))
        return compare.compare(*tables)

    return changes


def measured(**measurements):
    return [Record(CASE, Outcome.PASS, measurements=measurements)]


def kinds(table):
    return list(zip(table["kind"], table["regression"], strict=True))


def test_every_outcome_has_a_rank():
    assert set(WORST_FIRST) == set(Outcome)
    fine = {Outcome.PASS, Outcome.NO_OP, Outcome.SKIP, Outcome.EXPECTED, Outcome.REFUSED, Outcome.UNJUDGED}
    assert set(Outcome) - fine == FAILING


@pytest.mark.parametrize("seed", range(1, 6))
def test_noise_is_not_a_regression(seed, make_records, changes):
    table = changes(make_records(0), make_records(seed))
    assert not table["regression"].any(), table[table["regression"]].to_string()


@pytest.mark.parametrize(
    ("was", "now", "worse"),
    [
        (Outcome.PASS, Outcome.FAIL, True),
        (Outcome.PASS, Outcome.NO_OP, True),
        (Outcome.PASS, Outcome.SKIP, True),
        (Outcome.PASS, Outcome.EXPECTED, True),
        (Outcome.SKIP, Outcome.CRASH, True),
        (Outcome.NO_OP, Outcome.ERROR, True),
        (Outcome.EXPECTED, Outcome.FAIL, True),
        (Outcome.FAIL, Outcome.CRASH, False),
        (Outcome.FAIL, Outcome.PASS, False),
        (Outcome.SKIP, Outcome.PASS, False),
        (Outcome.NO_OP, Outcome.SKIP, False),
    ],
)
def test_outcomes(was, now, worse, changes):
    table = changes([Record(CASE, was)], [Record(CASE, now, "compare", "it broke")])
    assert kinds(table) == [("outcome", worse)]
    assert table.loc[0, ["before", "after"]].tolist() == [was, now]
    assert "it broke" in table.loc[0, "explanation"]


@pytest.mark.parametrize(("was", "now", "worse"), [("compare", "capture", True), ("load", "compare", False)])
def test_a_case_that_ends_in_an_earlier_stage_is_worse(was, now, worse, changes):
    before, after = ([Record(CASE, Outcome.FAIL, stage, "it broke")] for stage in (was, now))
    assert kinds(changes(before, after)) == [("stage", worse)]


def test_a_vanished_model_is_a_regression_and_a_new_one_is_none(make_records, changes):
    records = make_records(0)
    gone = [record for record in records if record.case.model == "groupvit"]
    left = [record for record in records if record not in gone]
    table = changes(records, left)
    counted = [record for record in gone if record.outcome != Outcome.NO_OP]
    assert kinds(table) == [("vanished", True)] * len(counted) + [("vanished", False)]
    assert set(table["id"]) == {record.case.id for record in counted} | {"groupvit"}
    table = changes(left, records)
    assert kinds(table) == [("added", False)]
    assert table.loc[0, ["id", "after"]].tolist() == ["groupvit", f"{len(gone)} cases"]


def test_a_vanished_no_op_is_no_regression(changes):
    both = [Record(CASE, Outcome.PASS), Record(OTHER, Outcome.NO_OP)]
    table = changes(both, both[:1])
    assert kinds(table) == [("vanished", False)]
    assert table.loc[0, ["id", "before"]].tolist() == [OTHER.model, "1 no-op case"]


@pytest.mark.parametrize("outcome", sorted(FAILING))
def test_a_new_case_or_model_that_fails_is_a_regression(outcome, changes):
    found = Record(OTHER, outcome, reason="it broke")
    assert kinds(changes([Record(CASE, Outcome.PASS)], [Record(CASE, Outcome.PASS), found])) == [
        ("new failure", True)
    ]
    model = dataclasses.replace(found, case=dataclasses.replace(OTHER, model="gpt"))
    assert set(changes(measured(sites=1), [*measured(sites=1), model])["regression"]) == {True}


def test_what_a_run_of_a_part_lacks_has_not_vanished(run, changes):
    both = [Record(CASE, Outcome.PASS), Record(OTHER, Outcome.PASS)]
    assert changes(both, both[:1], dataclasses.replace(run, plan=store.plan_of(["a", "b"]))).empty
    whole = dataclasses.replace(run, plan=store.plan_of([CASE.id]))
    assert kinds(changes(both, both[:1], whole)) == [("vanished", True)]


def test_measurements_of_a_case_that_was_defined_anew_are_not_compared(changes):
    before, after = (
        [Record(CASE, Outcome.PASS, measurements={"sites": sites}, content=content)]
        for sites, content in ((9, "a"), (1, "b"))
    )
    assert kinds(changes(before, after)) == [("definition", False)]
    same = [dataclasses.replace(after[0], content="a")]
    assert kinds(changes(before, same)) == [("sites", True)]
    assert kinds(changes(before, [dataclasses.replace(after[0], content="")])) == [("sites", True)]


def test_a_new_case_is_no_regression(changes):
    both = [Record(CASE, Outcome.PASS), Record(OTHER, Outcome.PASS)]
    assert kinds(changes(both[:1], both)) == [("added", False)]


def test_refusals_are_told_but_are_no_regression(changes):
    assert kinds(changes(measured(refused=1), measured(refused=2))) == [("refused", False)]


@pytest.mark.parametrize(
    ("was", "now", "expected"),
    [
        (1e-7, 1.1e-6, [("error", True)]),
        (1e-7, 9e-7, []),
        (1e-6, 1e-8, [("error", False)]),
        (0.0, 1e-9, [("error", True)]),
        (0.0, 5e-12, []),  # rounding of float64
        (1e-16, 1e-13, []),
    ],
)
def test_errors(was, now, expected, changes):
    assert kinds(changes(measured(max_abs_error=was), measured(max_abs_error=now))) == expected


def test_the_error_of_an_architecture_is_the_machines(changes):
    case = Case("bert", (), "cpu", Check.PARITY)
    before, after = (
        [Record(case, Outcome.PASS, measurements={"relative_error": e}, facts={"source": "sweep"})]
        for e in (0.0, 1e-7)
    )
    assert kinds(changes(before, after)) == []


@pytest.mark.parametrize("broken", [math.inf, math.nan])
def test_an_error_that_is_no_number_any_more_is_worse(broken, changes):
    both = [{"relative_error": 1e-8}, {"relative_error": broken}]
    assert kinds(changes(*(measured(**values) for values in both))) == [("error", True)]
    assert kinds(changes(*(measured(**values) for values in [both[1], both[1]]))) == []


def test_a_measurement_that_a_case_has_no_more_is_worse_unless_it_ended_in_another_way(changes, tmp_path):
    other = Record(OTHER, Outcome.PASS, measurements={"agreement": 1.0})
    before = [*measured(agreement=1.0), other]
    assert kinds(changes(before, [Record(CASE, Outcome.PASS), other])) == [("accuracy", True)]


def test_an_outcome_explains_the_measurements_that_are_gone(changes):
    assert kinds(changes(measured(agreement=1.0), [Record(CASE, Outcome.CRASH)])) == [
        ("outcome", True),
        ("metric vanished", False),
    ]


def test_a_metric_that_is_gone_altogether_is_told_once(changes):
    assert kinds(changes(measured(agreement=1.0), measured(sites=1))) == [("metric vanished", False)]


def test_a_metric_that_nobody_declared_is_told(changes):
    table = changes(measured(wobble=1.0), measured(wobble=2.0))
    assert kinds(table) == [("undeclared", False)]
    assert "declare" in table.loc[0, "explanation"]


def test_every_measurement_of_the_baselines_is_declared():
    for name in ("records", "architectures"):
        table = store.read_run(ROOT / f"reports/baseline/{name}.parquet")
        assert [name for name in store.measurements_of(table) if metric_of(name) is UNKNOWN] == []


@pytest.mark.parametrize(
    ("name", "now", "expected"),
    [
        ("agreement", 0.97, [("accuracy", True)]),
        ("cosine", 0.995, [("accuracy", True)]),
        ("cosine", 0.9995, []),
        ("tensors_compared", 0.0, [("compared", True)]),
        ("agreement", 1.03, [("accuracy", False)]),
        ("nodes_after", 0.97, []),
    ],
)
def test_shares(name, now, expected, changes):
    assert kinds(changes(measured(**{name: 1.0}), measured(**{name: now}))) == expected


def timed(ratio, half):
    return measured(latency_ratio=ratio, latency_ratio_low=ratio - half, latency_ratio_high=ratio + half)


def test_two_runs_say_nothing_of_latencies(changes):
    assert changes(timed(0.8, 0.02), timed(1.6, 0.02)).empty


@pytest.mark.parametrize(
    ("name", "was", "now", "worse"),
    [
        ("trace_seconds", 1.0, 3.0, True),
        ("trace_seconds", 1.0, 1.9, False),
        ("apply_seconds", 0.01, 0.19, False),
        ("apply_seconds", 0.05, 0.45, True),
        ("apply_memory_mb", 1.0, 17.0, True),
        ("memory_peak_mb", 10.0, 12.0, False),
        ("values_compared", 10.0, 9.0, True),
    ],
)
@pytest.mark.parametrize("difference", [{}, {"devices": {"cpu": "Another CPU"}}, {"threads": 8}])
def test_costs_are_compared_on_the_same_machine(name, was, now, worse, difference, run, changes):
    table = changes(measured(**{name: was}), measured(**{name: now}), dataclasses.replace(run, **difference))
    assert table["regression"].any() == (worse and not difference)
    assert "environment" in set(table["kind"]) or not difference


@pytest.mark.parametrize(("busy", "worse"), [(1.0, True), (60.0, False)])
def test_times_of_a_busy_machine_are_not_judged(busy, worse, changes):
    timed = Record(
        dataclasses.replace(CASE, check=Check.LATENCY), Outcome.PASS, measurements={"busy_percent": busy}
    )
    before, after = ([timed, *measured(apply_seconds=seconds)] for seconds in (0.1, 1.0))
    assert changes(before, after)["regression"].any() == worse


@pytest.mark.parametrize(("kernels", "worse"), [("", True), ("onednn", False)])
def test_sites_of_passes_that_pick_kernels_are_those_of_a_machine(kernels, worse, run, changes):
    before, after = (
        [Record(CASE, Outcome.PASS, measurements={"sites": sites}, facts={"kernels": kernels})]
        for sites in (4.0, 2.0)
    )
    assert changes(before, after)["regression"].any()
    other = dataclasses.replace(run, devices={"cpu": "Another CPU"})
    assert changes(before, after, other)["regression"].any() == worse


@pytest.mark.parametrize(("reason", "worse"), [("", True), ("the graph is slower than eager", False)])
def test_the_error_of_an_optimized_model_counts_where_graphs_were_used(reason, worse, changes):
    facts = {"eager": reason} if reason else {}
    before = [Record(CASE, Outcome.PASS, measurements={"relative_error": 0.0}, facts=facts)]
    after = [Record(CASE, Outcome.PASS, measurements={"relative_error": 0.01})]
    assert changes(before, after)["regression"].any() == worse


def test_regressions_come_first(changes):
    before = [Record(CASE, Outcome.PASS), Record(OTHER, Outcome.FAIL)]
    after = [Record(CASE, Outcome.FAIL), Record(OTHER, Outcome.PASS)]
    assert changes(before, after)["regression"].tolist() == [True, False]


def test_each_number_of_a_verdict_is_declared():
    subject: Any = mock.MagicMock(rtol=1e-9)
    subject.entry.tolerance.return_value = 1e-4
    subject.oracle.return_value.unproved = ""
    subject.oracle.return_value.judge.return_value = Verdict(Grade.ULP, 0.0, 0.0)
    names = comparison.judge_graph(subject, lambda dtype: nn.Identity()).measurements
    assert "relative_error" in names
    assert [name for name in names if metric_of(name) is UNKNOWN] == []
