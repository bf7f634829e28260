"""The harness from outside: `pytest validation`, over models that die, hang and fail in its workers."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import filelock
import pandas as pd
import pytest
import yaml

import fxopt.passes
from tests.validation.test_pool import in_session
from validation import store
from validation.report import headline

ROOT = Path(__file__).resolve().parents[2]

SITES = {name: int(name == "FuseBiasInLinear") for name in fxopt.passes.available()}


@dataclasses.dataclass(frozen=True)
class Harness:
    """A folder with models, a zoo and reports, and how to run the harness on it."""

    folder: Path

    def run(self, *arguments: str) -> int:
        """`pytest validation` in this process, which is faster than one of its own; workers have theirs."""
        (self.folder / "stamps").unlink(missing_ok=True)
        return pytest.main([*self.arguments(), *arguments])

    def arguments(self) -> list[str]:
        return [
            # Workers start sooner without the plugin of hypothesis, which no case needs.
            *(
                "validation",
                "-p",
                "tests.validation.stamping",
                "-p",
                "no:hypothesispytest",
                "--fx-device",
                "cpu",
            ),
            *("-o", f"cache_dir={self.folder}/cache", "--fx-timing", "0.1"),
            *("--fx-zoo", f"{self.folder}/zoo.yaml", "--fx-report-dir", f"{self.folder}/reports"),
        ]

    def zoo(self, *models: str, recorded: Mapping[str, int] = SITES, **fields: Any) -> None:
        entries = [
            {
                "name": model.lower(),
                "model": f"tests.validation.faulty_models.{model}",
                "sizes": "fixed",
                "inputs": {"x": {"shape": [2, 4]}},
                "tags": ["tame" if model == "Good" else "wild"],
                "timeout": 2 if "Hang" in model else 300,
                **fields,
            }
            for model in models
        ]
        (self.folder / "zoo.yaml").write_text(yaml.safe_dump({"models": entries}, sort_keys=False))
        sites = {entry["name"]: dict(recorded) for entry in entries}
        (self.folder / "zoo.sites.yaml").write_text(yaml.safe_dump(sites))

    def records(self) -> pd.DataFrame:
        return pd.read_parquet(self.folder / "reports/latest/records.parquet").set_index("id", drop=False)

    def history(self) -> list[Path]:
        return sorted((self.folder / "reports/history").glob("*.parquet"))

    def stamps(self) -> pd.DataFrame:
        lines = (self.folder / "stamps").read_text().splitlines()
        return pd.DataFrame(map(json.loads, lines), columns=["id", "start", "stop"])


@pytest.fixture
def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Harness:
    monkeypatch.chdir(ROOT)
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        monkeypatch.delenv(name)  # of the run that this is a test of
    monkeypatch.setenv("STAMPS", f"{tmp_path}/stamps")
    made = Harness(tmp_path)
    made.zoo("Good")
    return made


ONE_PASS = ["--fx-pass", "FuseBiasInLinear"]


def test_what_dies_hangs_or_fails_is_a_row_and_the_run_goes_on(harness: Harness) -> None:
    harness.zoo("Segfault", "Exit", "SystemExits", "Hang", "HangInC", "Memory", "Error", "Good")
    assert harness.run("-n", "2", *ONE_PASS, "-k", "equivalence") == pytest.ExitCode.TESTS_FAILED
    rows = harness.records()
    compared = rows.set_index("model")
    assert dict(zip(compared.index, zip(compared.outcome, compared.stage, strict=True), strict=True)) == {
        "segfault": ("crash", "capture"),
        "exit": ("crash", "capture"),
        "systemexits": ("error", "run the model"),
        "hang": ("timeout", "capture"),
        "hanginc": ("timeout", "capture"),
        "memory": ("out-of-memory", "run the model"),
        "error": ("error", "run the model"),
        "good": ("pass", ""),
    }
    assert "was ended by SIGSEGV, in before (faulty_models.py" in compared.reason["segfault"]
    assert "ended itself with status 0" in compared.reason["exit"]
    for model in ("hang", "hanginc"):
        text = "took more than 2 s, so its process was ended, in before (faulty_models.py"
        assert text in compared.reason[model]
    assert "a model of its own mind" in compared.reason["error"]


def test_timed_cases_run_after_all_others_and_alone(harness: Harness) -> None:
    harness.zoo("Good", "Error", recorded=SITES | {"MergeLinears": 1})
    harness.run("-n", "2", "-k", "latency or effect")
    stamps = harness.stamps()
    timed = stamps[stamps.id.str.contains("latency")].sort_values("start")
    others = stamps[~stamps.id.str.contains("latency")]
    assert len(timed) >= 5
    assert timed.start.min() >= others.stop.max()
    assert (timed.start.to_numpy()[1:] >= timed.stop.to_numpy()[:-1]).all()


def test_a_zoo_whose_only_model_lacks_its_package_says_so(
    harness: Harness, capsys: pytest.CaptureFixture[str]
) -> None:
    harness.zoo("Good", requires="nowhere")
    assert harness.run() == pytest.ExitCode.USAGE_ERROR
    text = "the options leave 0 of 0 models. Left out for want of a package: good (nowhere)"
    assert text in capsys.readouterr().err


def test_a_model_that_lacks_its_package_is_named_wherever_the_run_is(
    harness: Harness, capsys: pytest.CaptureFixture[str]
) -> None:
    harness.zoo("Good", "Error")
    zoo = harness.folder / "zoo.yaml"
    zoo.write_text(zoo.read_text().replace("name: error", "name: error\n  requires: nowhere"))
    assert harness.run("-q", *ONE_PASS, "-k", "effect") == pytest.ExitCode.OK
    text = "Left out for want of a package: error (nowhere)"
    assert text in capsys.readouterr().out
    assert f"{text}." in (harness.folder / "reports/latest/summary.md").read_text()
    assert text not in (harness.folder / "reports/latest/compatibility/good.md").read_text()
    rows = harness.records()
    assert {*rows.left_out} == {"error (nowhere)"}
    assert text in headline.not_run(rows)
    for option in ("model=error", "tag=wild"):
        assert harness.run(f"--fx-{option}") == pytest.ExitCode.USAGE_ERROR
        assert f"the options leave 0 of 1 model. {text}" in capsys.readouterr().err


def test_a_known_failure_that_is_not_planned_is_one_message(
    harness: Harness, capsys: pytest.CaptureFixture[str]
) -> None:
    harness.zoo("Good", known_failures=[{"check": "parity", "pipeline": "FuseBiasInLinear", "reason": "why"}])
    assert harness.run() == pytest.ExitCode.USAGE_ERROR
    text = "good: known_failures: no planned case is parity of 'FuseBiasInLinear'"
    assert capsys.readouterr().err.split("\n\n")[0].strip() == f"ERROR: {text}"


@pytest.mark.long
def test_stopping_at_the_first_failure_keeps_what_ran_and_the_rest_of_the_last_report(
    harness: Harness,
) -> None:
    harness.zoo("Good", recorded={})
    assert harness.run() == pytest.ExitCode.OK
    before = harness.records()
    harness.zoo("Error", "Good", recorded={})
    assert harness.run("-n", "2", "-x") == pytest.ExitCode.TESTS_FAILED
    rows, ran = harness.records(), {id_.partition("[")[2].removesuffix("]") for id_ in harness.stamps().id}
    assert set(rows[rows.outcome == "error"].id) <= ran < set(rows.id)
    assert set(rows.id) == ran | set(before.id)
    assert rows.run.nunique() == 2
    assert len(harness.history()) == 1
    assert "Partial: " in (harness.folder / "reports/latest/summary.md").read_text()


@pytest.mark.long
@pytest.mark.parametrize("signals", [[signal.SIGINT] * 2, [signal.SIGTERM]], ids=["Ctrl-C twice", "timeout"])
def test_a_run_that_is_stopped_keeps_what_ran_and_ends_the_workers(
    harness: Harness, signals: list[signal.Signals]
) -> None:
    harness.zoo("Good", "Hang", recorded={}, timeout=300)
    log = harness.folder / "log"
    command = [sys.executable, "-m", "pytest", *harness.arguments(), "-n", "2", "-k", "effect"]
    with log.open("w") as out:
        run = subprocess.Popen(command, stdout=out, stderr=out, preexec_fn=_interruptible)
        journals = harness.folder / "reports/running"
        deadline = time.monotonic() + 120
        while not any(len(j.read_text().splitlines()) > 3 for j in journals.glob("*.jsonl")):
            assert run.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        for each in signals:
            run.send_signal(each) if each is signal.SIGTERM else os.killpg(run.pid, each)
            time.sleep(0.02)
        assert run.wait(60) == pytest.ExitCode.INTERRUPTED, log.read_text()
    rows = harness.records()
    assert set(rows.model) == {"good"}
    assert set(rows.outcome) <= {"pass", "no-op"}
    assert harness.history() == []
    assert len([*journals.glob("*.jsonl")]) == 1  # `--fx-resume` goes on with it
    deadline = time.monotonic() + 10
    while left := in_session(run.pid):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def _interruptible() -> None:
    """A session of its own, which Ctrl-C reaches even if whoever runs the tests has it ignored."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_other_tests_run_as_without_the_harness(harness: Harness) -> None:
    (harness.folder / "test_others.py").write_text("""
import pathlib, pytest
log = pathlib.Path(__file__).with_name("log")

@pytest.fixture(scope="module")
def made():
    log.write_text("made ")

@pytest.mark.parametrize("number", range(4))
def test_other(made, number):
    log.write_text(log.read_text() + str(number))
    assert number != 2
""")
    others = [str(harness.folder / "test_others.py"), "-k", "other"]
    assert harness.run(*others, "-x") == pytest.ExitCode.TESTS_FAILED
    assert (harness.folder / "log").read_text() == "made 012"


def test_two_runs_into_one_folder_do_not_race(harness: Harness, capsys: pytest.CaptureFixture[str]) -> None:
    (harness.folder / "reports").mkdir()
    with filelock.FileLock(harness.folder / "reports/.lock"):
        assert harness.run() == pytest.ExitCode.USAGE_ERROR
    assert "reports: another run writes here" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_told_before_anything_runs(
    harness: Harness, capsys: pytest.CaptureFixture[str]
) -> None:
    (harness.folder / "reports").touch()
    assert harness.run() == pytest.ExitCode.USAGE_ERROR
    assert "reports: cannot be written" in capsys.readouterr().err
    assert not (harness.folder / "stamps").exists()


def test_a_full_disk_ends_the_run_and_keeps_what_it_found(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    append, lines = store.Journal.append, []

    def full(journal: store.Journal, record: Any) -> None:
        lines.append(record)
        if len(lines) > 3:
            raise OSError("no space left on device")
        append(journal, record)

    monkeypatch.setattr(store.Journal, "append", full)
    assert harness.run("-k", "effect") == pytest.ExitCode.USAGE_ERROR
    assert "cannot be written: no space left on device" in capsys.readouterr().out
    assert len(harness.records()) == 4
    assert len(list(harness.folder.rglob("*.jsonl"))) == 1  # for --resume


@pytest.mark.parametrize("option", ["--fx-timeout", "--fx-timing"])
@pytest.mark.parametrize("seconds", ["0", "-1", "nan"])
def test_a_time_that_is_none_is_a_mistake(
    harness: Harness, capsys: pytest.CaptureFixture[str], option: str, seconds: str
) -> None:
    assert harness.run(f"{option}={seconds}", "--collect-only") == pytest.ExitCode.USAGE_ERROR
    assert "is not a number of seconds above 0" in capsys.readouterr().err


def test_options_select(harness: Harness, capsys: pytest.CaptureFixture[str]) -> None:
    harness.zoo("Error", "Good", recorded={})
    harness.run("--collect-only", "-q", "--fx-tag", "tame", "--fx-pass", "MergeLinears")
    cases = [line for line in capsys.readouterr().out.splitlines() if "test_case[" in line]
    assert cases
    assert all("[good-" in case and any(p in case for p in ("Merge", "-all-", "-exact-")) for case in cases)


@pytest.mark.parametrize(
    ("option", "value", "known"),
    [("--fx-tag", "tam", "tame"), ("--fx-pass", "Merge", "MergeLinears"), ("--fx-device", "tpu", "cpu")],
)
def test_an_option_says_what_it_does_not_know(
    harness: Harness, capsys: pytest.CaptureFixture[str], option: str, value: str, known: str
) -> None:
    assert harness.run(option, value) == pytest.ExitCode.USAGE_ERROR
    message = capsys.readouterr().err
    assert f"{option} {value}: not known" in message
    assert known in message


def test_a_mistake_in_the_zoo_is_one_message_without_a_traceback(
    harness: Harness, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (harness.folder / "zoo.yaml").read_text()
    (harness.folder / "zoo.yaml").write_text(text.replace("sizes: fixed", "sizes: huge"))
    assert harness.run("-n", "2") == pytest.ExitCode.USAGE_ERROR  # before there are workers
    messages = [line for line in capsys.readouterr().err.splitlines() if line]
    assert messages == [
        f"ERROR: {harness.folder}/zoo.yaml: good: sizes: Input should be 'dynamic' or 'fixed'"
    ]


def test_a_known_failure_does_not_fail_the_run(harness: Harness) -> None:
    known = {"check": "equivalence", "pipeline": "FuseBiasInLinear", "reason": "it has a mind of its own"}
    harness.zoo("Error", known_failures=[known])
    assert harness.run(*ONE_PASS, "-k", "equivalence") == pytest.ExitCode.OK
    (row,) = harness.records().itertuples()
    assert row.outcome == "expected"
    assert row.reason.startswith("it has a mind of its own")
