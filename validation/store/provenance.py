"""The run that cases belong to: time, commit, versions and machine."""

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

    `devices` maps a device of the cases (`cpu`, `cuda`) to the text that identifies its speed and kernels. `threads` is the
    number of threads of timed cases. `options` are those with which `fxopt validate` finds the zoo and passes. `Run.now`
    describes the running process.
    """

    started: datetime.datetime
    commit: str
    python: str
    torch: str
    transformers: str
    devices: Mapping[str, str]
    threads: int
    plan: str = ""
    left_out: str = ""
    fxopt: str = ""
    options: str = ""

    @property
    def id(self) -> str:
        """A name that sorts by time and distinguishes runs of the same second: `20260102T030405.678Z-acf9a7c1`."""
        utc = self.started.astimezone(datetime.UTC)
        stamp = f"{utc:%Y%m%dT%H%M%S}.{utc.microsecond // 1000:03d}Z"
        return "-".join(filter(None, [stamp, self.commit]))

    @classmethod
    def now(
        cls,
        *,
        threads: int,
        devices: Iterable[str] = ("cpu",),
        plan: str = "",
        left_out: str = "",
        options: str = "",
        root: Path = Path(),
    ) -> Run:
        """The run that starts now, on this machine, with the installed versions and the current commit of `root`."""
        return cls(
            started=datetime.datetime.now(datetime.UTC),
            commit=_commit(root),
            python=platform.python_version(),
            torch=version("torch"),
            transformers=version("transformers"),
            devices={device: _device_name(device) for device in devices},
            threads=threads,
            plan=plan,
            left_out=left_out,
            fxopt=version("fxopt"),
            options=options,
        )


def version(distribution: str) -> str:
    """The installed version of a distribution; empty if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _commit(root: Path) -> str:
    """The commit of the repository that contains `root`, `-dirty` if tracked files differ; empty without a repository."""

    def git(*arguments: str) -> str:
        try:
            command = ["git", "-C", str(root), *arguments]
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = git("rev-parse", "--short=8", "HEAD")
    return commit + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")


_INSTRUCTIONS = "avx2 avx512f avx512_vnni avx512_bf16 avx512_fp16 amx_bf16 amx_int8 asimd sve"
"""Instruction sets, as Linux names them, for which torch has separate kernels."""


def processor() -> tuple[str, str]:
    """The name of the processor; its vector and matrix instructions, and which of them torch uses."""
    import torch

    said = dict[str, str]()
    with contextlib.suppress(OSError):  # only Linux has this file
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        said = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = said.get("flags", said.get("Features", "")).split()
    found = " ".join(name for name in _INSTRUCTIONS.split() if name in flags) or "unknown instructions"
    name = said.get("model name") or platform.processor() or platform.machine()
    return name, f"{found}, of which torch uses {torch.backends.cpu.get_cpu_capability()}"


def _device_name(device: str) -> str:
    """The processor with instructions and cores, the BLAS and the build of torch: all that determines speed and kernels."""
    import torch  # reading a report must not wait for torch to load

    build = f"CUDA {torch.version.cuda} build" if torch.version.cuda else "CPU build"
    if device.partition(":")[0] == "cuda":
        return f"{torch.cuda.get_device_name(device)}, {build}" if torch.cuda.is_available() else ""
    if device != "cpu":
        return ""
    blas = "MKL" if torch.backends.mkl.is_available() else "no MKL"
    return "; ".join([*processor(), f"{os.cpu_count()} cores", blas, build])
