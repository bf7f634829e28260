"""Runs that were cut, and runs on a cluster: both come to the table that an undisturbed run on this machine gives."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time

import pandas as pd
import psutil
import pytest

from tests.validation.test_harness import ONE_PASS, Harness, harness

__all__ = ["harness"]

RESUMABLE = ["-p", "tests.validation.committed"]


def table(harness: Harness) -> pd.DataFrame:
    """The part of a record that must not depend on who ran the cases, where or when."""
    rows = harness.records()
    same = [
        name
        for name in rows.columns
        if name not in ("run", "started") and not any(word in name for word in ("seconds", "latency", "busy"))
    ]
    return rows[same].drop(columns=["memory_peak_mb"], errors="ignore").sort_index()


CUT = ["-p", "tests.validation.cutting"]


@pytest.mark.long
def test_a_run_that_was_cut_goes_on_where_it_ended(harness: Harness) -> None:
    assert harness.run(*RESUMABLE, "-n", "1", *ONE_PASS) == pytest.ExitCode.OK
    whole = table(harness)
    assert harness.run(*RESUMABLE, "-n", "1", *ONE_PASS, *CUT) == pytest.ExitCode.INTERRUPTED
    (journal,) = (harness.folder / "reports/running").glob("*.jsonl")
    done = [json.loads(line) for line in journal.read_text().splitlines()[1:]]
    assert 1 <= len(done) < len(whole)
    begun = time.time()
    assert harness.run(*RESUMABLE, "-n", "1", *ONE_PASS, "--fx-resume") == pytest.ExitCode.OK
    pd.testing.assert_frame_equal(table(harness), whole)
    assert {record["seconds"] for record in done} <= {*harness.records().seconds}  # they did not run again
    assert harness.records().run.nunique() == 1
    assert (harness.records().started.iloc[0].timestamp()) < begun  # the run that was cut
    assert not journal.exists()


@pytest.mark.long
def test_what_is_not_chosen_when_a_run_goes_on_is_not_lost(harness: Harness) -> None:
    options = [*RESUMABLE, "-n", "1", *ONE_PASS]
    assert harness.run(*options, *CUT) == pytest.ExitCode.INTERRUPTED
    (journal,) = (harness.folder / "reports/running").glob("*.jsonl")
    done = json.loads(journal.read_text().splitlines()[1])["case"]["check"]
    other = "equivalence" if done != "equivalence" else "effect"
    assert harness.run(*options, "--fx-resume", "-k", other) == pytest.ExitCode.OK
    assert f'"check": "{done}"' in journal.read_text()
    assert harness.run(*options, "--fx-resume") == pytest.ExitCode.OK
    assert not journal.exists()


@pytest.mark.long
def test_a_model_that_was_changed_since_is_not_resumed(harness: Harness) -> None:
    options = [*RESUMABLE, "-n", "1", *ONE_PASS]
    assert harness.run(*options, *CUT) == pytest.ExitCode.INTERRUPTED
    (before,) = harness.records()["started"].unique()
    done = harness.records()["seconds"]
    harness.zoo("Good", inputs={"x": {"shape": [3, 4]}})
    assert harness.run(*options, "--fx-resume") == pytest.ExitCode.OK
    after = harness.records()
    assert (after["started"] == before).all()
    assert (after["seconds"][done.index] != done).all()


@pytest.mark.long
def test_a_cluster_whose_driver_is_killed_and_restarted_gives_the_table_of_one_machine(
    harness: Harness,
) -> None:
    pytest.importorskip("ray", reason="the extra `fleet` is not installed")
    harness.zoo("Good", "Exit", "Error")
    # Two cases a model: after a restart nobody remembers that it died twice, and its others are tried.
    options = [*RESUMABLE, *ONE_PASS, "-k", "effect or equivalence"]
    assert harness.run(*options, "-n", "2") == pytest.ExitCode.TESTS_FAILED
    here = table(harness)
    log = harness.folder / "log"
    command = [
        sys.executable,
        "-m",
        "pytest",
        *harness.arguments(),
        *options,
        "--fx-engine",
        "ray",
        "--fx-resume",
    ]
    with log.open("w") as out:
        driver = subprocess.Popen(command, stdout=out, stderr=out)
        running = harness.folder / "reports/running"
        deadline = time.monotonic() + 200
        while not any(len(file.read_text().splitlines()) > 2 for file in running.glob("*.jsonl")):
            assert driver.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        started = psutil.Process(driver.pid).children(recursive=True)
        driver.kill()
        driver.wait()
        for process in started:  # the cluster that it has started goes with it
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        before = {file.name for file in running.glob("*.jsonl")}
        assert before
        again = subprocess.run(command, stdout=out, stderr=out, timeout=300, check=False)
    assert again.returncode == pytest.ExitCode.TESTS_FAILED, log.read_text()
    pd.testing.assert_frame_equal(table(harness), here)
    assert {file.name for file in running.glob("*.jsonl")} == set()


def test_bad_options_of_engines_are_one_sentence(harness: Harness, capfd: pytest.CaptureFixture[str]) -> None:
    assert harness.run("--fx-address", "localhost:1") == pytest.ExitCode.USAGE_ERROR
    assert "--fx-address: only with --fx-engine ray" in capfd.readouterr().err
    assert harness.run("--fx-engine", "ray", "--fx-address", "localhost:1") == pytest.ExitCode.USAGE_ERROR
    assert "no Ray cluster answers at localhost:1" in capfd.readouterr().err


def test_reports_are_written_to_no_url(harness: Harness, capfd: pytest.CaptureFixture[str]) -> None:
    assert harness.run("--fx-report-dir", "s3://bucket/reports") == pytest.ExitCode.USAGE_ERROR
    assert "'s3://bucket/reports' is not a folder of this machine" in capfd.readouterr().err
