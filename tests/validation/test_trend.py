from __future__ import annotations

import dataclasses
import datetime
import random

import pandas as pd
import pytest

from validation import store
from validation.records import Case, Check, Outcome, Record
from validation.regressions import trend

CASES = [Case(f"model-{number}", ("MergeLinears",), "cpu", Check.LATENCY) for number in range(20)]


@pytest.fixture
def history(run, tmp_path):
    """`history(ratio)`: 20 nights of 20 cases, `ratio(case number, night)` with 1 % of noise."""

    def history(ratio):
        rng = random.Random(0)
        for night in range(20):
            made = dataclasses.replace(run, started=run.started + datetime.timedelta(days=night))
            records = [
                Record(
                    case,
                    Outcome.FAIL if night == 19 and number == 0 else Outcome.PASS,
                    measurements={"latency_ratio": rng.gauss(ratio(number, night), 0.01)},
                )
                for number, case in enumerate(CASES)
            ]
            store.append_history(store.table_of(records, made), tmp_path)
        return store.history(tmp_path)

    return history


def test_one_row_a_run(history):
    table = trend.runs(history(lambda number, night: 0.9))
    assert len(table) == 20
    assert table["run"].is_monotonic_increasing
    assert table["failed"].tolist() == [0] * 19 + [1]
    assert table["cases"].unique().tolist() == [20]


NIGHTS = 12


def nights(ratio, *, noise=0.03, cases=60, count=NIGHTS, **columns):
    """Runs of cases whose latency is `ratio(case, night)`, each with its interval, and off by more than that."""
    rng = random.Random(0)

    def row(case, night):
        value = ratio(case, night) * rng.gauss(1, noise)
        interval = {"latency_ratio_low": 0.99 * value, "latency_ratio_high": 1.01 * value}
        own = {name: given(case, night) for name, given in columns.items()}
        alike = {"device_name": "CPU", "threads": 1, "content": "", "busy_percent": 1.0}
        named = {"id": f"case-{case:03d}", "run": f"{night:02d}", "started": night}
        return named | alike | {"latency_ratio": value} | interval | own

    return [pd.DataFrame([row(case, night) for case in range(cases)]) for night in range(count)]


@pytest.mark.parametrize("noise", [0.01, 0.03, 0.05])
def test_noise_is_not_a_change(noise):
    tables = nights(lambda case, night: 0.9, noise=noise)
    for number in (1, 4, 5, 7, NIGHTS):
        assert trend.latencies(tables[:number]).empty


@pytest.mark.parametrize(
    ("factor", "runs", "found"),
    [(1.3, 1, False), (1.3, 2, True), (1.1, 3, False), (1.1, 5, True), (1.02, 6, False)],
)
def test_a_slowdown_counts_after_some_nights(factor, runs, found):
    slow = lambda case, night: 0.9 * (factor if case == 7 and night >= NIGHTS - runs else 1)  # noqa: E731
    table = trend.latencies(nights(slow, noise=0.01))
    assert table["id"].tolist() == ["case-007"] * found
    if found:
        assert table.loc[0, "change"] == pytest.approx(factor - 1, abs=0.03)
        assert table.loc[0, "since"] == f"{NIGHTS - runs:02d}"


@pytest.mark.parametrize(("first", "outlier"), [(8, -1), (7, 3), (4, -1)])
def test_the_first_slow_night_is_named(first, outlier):
    """Also if the medians before and since would differ more with a slow night among those before."""
    ratio = lambda case, night: 2.2 if night == outlier else 1.17 if night >= first else 0.9  # noqa: E731
    table = trend.latencies(nights(ratio, cases=40, noise=0.005))
    assert set(table["since"]) == {f"{first:02d}"}
    assert len(table) == 40


def test_a_speed_up_is_no_slowdown():
    table = trend.latencies(nights(lambda case, night: 0.6 if case == 3 and night >= 8 else 0.9))
    assert table["id"].tolist() == ["case-003"]
    assert table.loc[0, "change"] < 0


@pytest.mark.parametrize(
    "column",
    [{"device_name": "Another CPU"}, {"threads": 8}, {"content": "defined anew"}, {"busy_percent": 80.0}],
)
def test_only_idle_runs_of_the_same_machine_and_case_count(column):
    ((name, other),) = column.items()
    alike = {"device_name": "CPU", "threads": 1, "content": "", "busy_percent": 1.0}[name]
    changed = nights(
        lambda case, night: 1.8 if night >= 8 else 0.9,
        **{name: lambda case, night: other if night >= 8 else alike},
    )
    assert trend.latencies(changed).empty


def test_one_outlier_before_hides_no_slowdown():
    ratio = lambda case, night: 1.8 if night >= 9 else 2.2 if night == 3 else 0.9  # noqa: E731
    assert len(trend.latencies(nights(ratio, cases=3))) == 3


def test_one_case_is_followed(history):
    table = trend.follow(history(lambda number, night: 0.9), CASES[0].id)
    assert len(table) == 20
    assert table["outcome"].iloc[-1] == "fail"
