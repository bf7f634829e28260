"""Reports at a URL: what runs write, cut and resume there is as in a folder."""

from __future__ import annotations

import functools
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pandas as pd
import pytest
from typer.testing import CliRunner

from tests.validation.test_harness import ONE_PASS, Harness, harness
from tests.validation.test_resume import RESUMABLE, table
from validation.commands.cli import app
from validation.records import Record
from validation.store import Place, ReportError, Run, place, table_of, write_table

__all__ = ["harness"]

FAR = ["-p", "tests.validation.far_storage"]


@pytest.fixture(autouse=True)
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which folders stand in for URLs; it goes with the test."""
    folder = tmp_path / "copies"
    folder.mkdir()
    made = functools.partial(tempfile.mkdtemp, dir=folder)
    monkeypatch.setattr(place, "tempfile", types.SimpleNamespace(mkdtemp=made))
    return folder


@pytest.fixture
def memory() -> Any:
    files = fsspec.filesystem("memory")
    yield files
    files.rm("/", recursive=True)


def test_a_run_writes_to_a_url_what_it_writes_to_a_folder(
    harness: Harness, memory: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert harness.run("-n", "1", *ONE_PASS, "-k", "effect or equivalence") == pytest.ExitCode.OK
    here = {file.relative_to(harness.folder / "reports") for file in harness.folder.rglob("latest/**/*.*")}
    memory.pipe("/there/reports/latest/compatibility/gone.md", b"the page of a model that is there no more")
    capsys.readouterr()
    options = [
        "-n",
        "1",
        *ONE_PASS,
        "-k",
        "effect or equivalence",
        "--fx-report-dir",
        "memory://there/reports",
    ]
    assert harness.run(*options) == pytest.ExitCode.OK
    assert {Path(file).relative_to("/there/reports") for file in memory.find("/there/reports")} == here
    rows = pd.read_parquet("memory://there/reports/latest/records.parquet").set_index("id")
    assert list(rows.outcome) == list(harness.records().outcome)
    assert "\nmemory://there/reports/latest/report.html\n" in capsys.readouterr().out


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder for temporary files: in that of a test, the path of a pool's socket is too long."""
    with tempfile.TemporaryDirectory(prefix="fx") as folder:
        yield Path(folder)


def test_what_a_killed_run_has_found_is_at_the_url_and_another_machine_goes_on_with_it(
    harness: Harness, short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.zoo("Good", "Hang")
    options = [*FAR, *RESUMABLE, *ONE_PASS, "-k", "effect or equivalence"]
    assert harness.run(*options, "-n", "1") == pytest.ExitCode.TESTS_FAILED
    here = table(harness)
    there, temporary = harness.folder / "there", short
    monkeypatch.setenv("TMPDIR", str(temporary))
    options += ["--fx-resume", "--fx-report-dir", f"far://{there}"]
    command = [sys.executable, "-m", "pytest", *harness.arguments(), *options]
    log = harness.folder / "log"
    with log.open("w") as out:
        driver = subprocess.Popen(command, stdout=out, stderr=out)
        deadline = time.monotonic() + 200
        while not any(len(file.read_text().splitlines()) > 2 for file in there.glob("running/*.jsonl")):
            assert driver.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        driver.kill()
        driver.wait()
        (cut,) = there.glob("running/*.jsonl")
        (kept,) = temporary.glob("fxopt-reports-*")
        again = subprocess.run(command, stdout=out, stderr=out, timeout=300, check=False)
    assert again.returncode == pytest.ExitCode.TESTS_FAILED, log.read_text()
    (harness.folder / "reports").rename(harness.folder / "reports of a folder")
    there.rename(harness.folder / "reports")
    pd.testing.assert_frame_equal(table(harness), here)
    assert set(harness.records()["run"]) == {cut.stem}, "it went on with the run that was killed"
    assert not list((harness.folder / "reports/running").iterdir())
    assert list(temporary.glob("fxopt-reports-*")) == [kept], "the copy of a run that ended is removed"


def test_commands_read_runs_at_urls(harness: Harness, memory: Any) -> None:
    options = ["-n", "1", *ONE_PASS, "-k", "effect", "--fx-report-dir", "memory://there"]
    assert harness.run(*options) == pytest.ExitCode.OK
    there = "memory://there/latest"
    for run in (there, f"{there}/records.parquet"):
        assert CliRunner().invoke(app, ["compare", run, run]).exit_code == 0
    merged = CliRunner().invoke(app, ["merge", there, "--output", str(harness.folder / "merged")])
    assert merged.exit_code == 0, merged.output
    assert (harness.folder / "merged/latest/records.parquet").is_file()
    lacking = CliRunner().invoke(app, ["history", "memory://nowhere"])
    assert lacking.exit_code == 2
    assert "memory://nowhere: no such file or folder" in lacking.output


def test_a_url_that_cannot_be_read_or_written_is_one_sentence_before_any_work(
    harness: Harness, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.setattr(fsspec.implementations.memory.MemoryFileSystem, "put", refused)
    for url, what in {
        "nonsense://there": "read (ValueError: Protocol not known: nonsense)",
        "s3://bucket/there": "read (ImportError: Install s3fs to access S3)",
        "memory://there": "written",
    }.items():
        assert harness.run(*ONE_PASS, "--fx-report-dir", url) == pytest.ExitCode.USAGE_ERROR
        assert f"{url}: cannot be {what}" in capfd.readouterr().err
        assert not (harness.folder / "stamps").exists()


def refused(*arguments: object) -> None:
    raise PermissionError("access denied")


def test_what_could_not_be_sent_is_kept_and_sent_later(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reports = Place("memory://there")
    (reports.path / "running").mkdir()
    journal = reports.path / "running/run.jsonl"
    journal.write_text("a record\n")
    with monkeypatch.context() as patched:
        patched.setattr(memory.__class__, "put", refused)
        with pytest.raises(
            ReportError, match=rf"memory://there: cannot be written, so that {reports.path} keeps"
        ):
            reports.send()
        reports._remove()
    assert journal.exists()
    reports.send_soon()
    assert not memory.exists("/there/running/run.jsonl"), "it was tried a moment ago"
    monkeypatch.setattr(place, "PAUSE", 0.0)
    monkeypatch.setattr(place, "SHARE", math.inf)
    reports.send()
    with journal.open("a") as file:
        file.write("another\n")
    reports.send_soon()
    assert memory.cat("/there/running/run.jsonl") == b"a record\nanother\n"
    reports._remove()
    assert not journal.exists()


def test_a_run_removes_what_it_fetched_or_sent_and_nothing_that_is_kept(memory: Any) -> None:
    names = ["running/gone.jsonl", "history/run.parquet", "baseline/records.parquet"]
    for name in names:
        memory.pipe(f"/there/{name}", b"as it was fetched")
    reports = Place("memory://there")
    own = reports.path / "running/own.jsonl"
    own.write_text("as it was sent")
    reports.send()
    for name in [*names, "running/own.jsonl"]:
        (reports.path / name).unlink()
    reports.send()
    assert set(memory.find("/there")) == {f"/there/{name}" for name in names[1:]}


def test_a_copy_that_is_gone_takes_nothing_with_it(memory: Any) -> None:
    memory.pipe("/there/running/cut.jsonl", b"a run that was cut")
    reports = Place("memory://there")
    shutil.rmtree(reports.path)
    for _ in range(2):
        with pytest.raises(
            ReportError, match=f"{reports.path}: is gone, so that nothing more can be sent to mem"
        ):
            reports.send()
        (reports.path / "latest").mkdir(parents=True, exist_ok=True)  # as a run makes it anew
    assert memory.find("/there") == ["/there/running/cut.jsonl"]


def test_of_what_cannot_be_fetched_no_copy_is_left(
    memory: Any, copies: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.pipe("/there/running/cut.jsonl", b"a run that was cut")
    at_exit: list[Any] = []
    monkeypatch.setattr(place.atexit, "register", at_exit.append)
    monkeypatch.setattr(memory.__class__, "get_file", refused)
    with pytest.raises(ReportError, match="memory://there: cannot be read"):
        Place("memory://there")
    for remove in at_exit:
        remove()
    assert not list(copies.iterdir())


@pytest.mark.parametrize(
    "command",
    [
        "report memory://there/latest",
        "report HERE --output memory://there",
        "merge HERE --output memory://there",
        "baseline HERE --directory memory://there",
        "accept case --reason why --current HERE --baseline memory://there",
    ],
)
def test_commands_write_to_no_url_and_say_so(
    command: str,
    memory: Any,
    tmp_path: Path,
    run: Run,
    records: list[Record],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_table(table_of(records, run), tmp_path / "here")
    memory.put(f"{tmp_path}/here/", "/there/latest/", recursive=True)
    before = sorted(tmp_path.iterdir())
    found = CliRunner().invoke(app, command.replace("HERE", "here").split())
    assert found.exit_code == 2
    assert "memory://there" in found.stderr
    assert "folder of this machine" in found.stderr
    assert len(memory.find("/there")) == 1
    assert sorted(tmp_path.iterdir()) == before


def test_a_file_url_is_a_folder_with_its_locks(tmp_path: Path) -> None:
    reports = Place(f"file://{tmp_path}/reports")
    assert (reports.path, reports.far) == (tmp_path / "reports", False)
    assert reports.named(reports.path) == os.fspath(reports.path)
