"""The run that cases belong to: when, with which commit and versions, and on which machine."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Run:
    """The facts that all records of one run share.

    `devices` maps a device of the cases (`cpu`, `cuda`) to the name of the hardware, `threads` is the
    number of threads that timed cases ran with. `Run.now` fills it in for the running process.
    """

    started: datetime.datetime
    commit: str
    python: str
    torch: str
    transformers: str
    devices: Mapping[str, str]
    threads: int
    plan: str = ""
    fxopt: str = ""

    @property
    def id(self) -> str:
        """Sorts by time, and tells two runs of the same second apart: `20260102T030405.678Z-acf9a7c1`."""
        utc = self.started.astimezone(datetime.UTC)
        stamp = f"{utc:%Y%m%dT%H%M%S}.{utc.microsecond // 1000:03d}Z"
        return "-".join(filter(None, [stamp, self.commit]))

    @classmethod
    def now(
        cls, *, threads: int, devices: Iterable[str] = ("cpu",), plan: str = "", root: Path = Path()
    ) -> Run:
        """The run that starts now, on this machine, with the installed versions and the commit that `root` is at."""
        return cls(
            started=datetime.datetime.now(datetime.UTC),
            commit=_commit(root),
            python=platform.python_version(),
            torch=version("torch"),
            transformers=version("transformers"),
            devices={device: _device_name(device) for device in devices},
            threads=threads,
            plan=plan,
            fxopt=version("fxopt"),
        )


def version(distribution: str) -> str:
    """The installed version of a distribution; empty where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _commit(root: Path) -> str:
    """The commit of the repository that `root` is in, `-dirty` if tracked files differ; empty where it is in none."""

    def git(*arguments: str) -> str:
        try:
            command = ["git", "-C", str(root), *arguments]
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = git("rev-parse", "--short=8", "HEAD")
    return commit + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")


def _device_name(device: str) -> str:
    if device.partition(":")[0] == "cuda":
        import torch  # reading a report must not wait for torch to load

        return torch.cuda.get_device_name(device) if torch.cuda.is_available() else ""
    if device == "cpu":
        with contextlib.suppress(OSError):  # Linux alone has this file
            for line in Path("/proc/cpuinfo").read_text().splitlines():
                if line.startswith("model name"):
                    return f"{line.partition(':')[2].strip()}, {os.cpu_count()} cores"
        return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    return ""
