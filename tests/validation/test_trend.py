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


def test_noise_does_not_drift(history):
    assert trend.drift(history(lambda number, night: 0.9)).empty


def test_a_drift_is_found(history):
    table = trend.drift(history(lambda number, night: 0.97 if number == 3 and night >= 15 else 0.9))
    assert table["id"].tolist() == [CASES[3].id]
    assert table.loc[0, "change"] == pytest.approx(0.97 / 0.9 - 1, abs=0.02)
    assert table.loc[0, "since"].startswith("20260117")  # the first night was the 2nd


@pytest.mark.parametrize("nights", [3, 5, 8, 12])
def test_a_slowdown_of_two_is_found_after_few_nights(nights):
    rng = random.Random(nights)
    rows = [
        {
            "id": f"case-{case:03d}",
            "run": f"{night:02d}",
            "started": night,
            "device_name": "CPU",
            "threads": 1,
        }
        | {"latency_ratio": (2 if case == 7 and night >= nights else 1) * rng.gauss(1, 0.05)}
        for case in range(300)
        for night in range(nights + 3)
    ]
    table = trend.drift(pd.DataFrame(rows))
    assert table["id"].tolist() == ["case-007"]
    assert table["since"].tolist() == [f"{nights:02d}"]


def drifting(shift, noise, cases=300, level=0.9):
    """20 nights; the last 5 differ by `shift`."""
    rng = random.Random(0)
    rows = [
        {
            "id": f"case-{case:03d}",
            "run": f"{night:02d}",
            "started": night,
            "device_name": "CPU",
            "threads": 1,
        }
        | {"latency_ratio": level + shift * (night >= 15) + rng.gauss(0, noise)}
        for case in range(cases)
        for night in range(20)
    ]
    return trend.drift(pd.DataFrame(rows))


def test_of_many_noisy_cases_none_drifts_by_chance():
    assert drifting(0.0, noise=0.1).empty


def test_a_shift_too_small_to_matter_is_not_a_drift():
    assert drifting(0.01, noise=0.001).empty
    assert len(drifting(0.05, noise=0.001)) == 300


def test_what_was_zero_or_constant_can_drift():
    assert drifting(0.0, noise=0.0, level=0.0).empty
    assert drifting(1.0, noise=0.0, level=0.0, cases=3)["change"].tolist() == [float("inf")] * 3
    assert drifting(0.1, noise=0.0, level=-1.0, cases=3)["change"].tolist() == pytest.approx([0.1] * 3)


def test_other_hardware_is_not_a_drift(history, run):
    table = history(lambda number, night: 0.97 if night >= 15 else 0.9)
    table.loc[table["run"].isin(sorted(table["run"].unique())[15:]), "device_name"] = "Another CPU"
    assert trend.drift(table).empty


def test_one_case_is_followed(history):
    table = trend.follow(history(lambda number, night: 0.9), CASES[0].id, "latency_ratio")
    assert len(table) == 20
    assert table["outcome"].iloc[-1] == "fail"


@pytest.mark.parametrize(("case", "name"), [(CASES[0].id, "nothing"), ("no-such-case", "latency_ratio")])
def test_unknown_names_are_errors(case, name, history):
    with pytest.raises(store.ReportError, match=r"nothing|no-such-case"):
        trend.follow(history(lambda number, night: 0.9), case, name)
