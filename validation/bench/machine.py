"""The machine that a benchmark runs on: its processor, how fast it multiplies, who else works on it; and a page that names it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import torch
from rich.console import Console

from .. import store
from ..report.markdown import page

BUSY = 0.1
"""A machine is idle while all other processes together use less than this part of one core."""

_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8")
_SETTINGS = ("OMP_", "KMP_", "GOMP_", "MKL_", "ONEDNN_", "DNNL_", "ATEN_CPU_", "LD_PRELOAD")


class Others:
    """Counts the cores that other processes use, from now on (Linux: this process and the whole machine)."""

    def __init__(self) -> None:
        self._begin = self._now()

    def cores(self) -> float:
        """How many cores they used on average since the beginning."""
        wall, busy, own = (now - then for now, then in zip(self._now(), self._begin, strict=True))
        return max(0.0, busy - own) / wall if wall else 0.0

    @staticmethod
    def _now() -> tuple[float, float, float]:
        """Seconds that passed, that all cores worked (or were taken by other virtual machines), and that we worked."""
        machine, own = psutil.cpu_times(), psutil.Process().cpu_times()
        working = ("user", "nice", "system", "irq", "softirq", "steal")
        busy = sum(getattr(machine, name, 0.0) for name in working)
        return time.perf_counter(), busy, own.user + own.system


def cores_of_others(seconds: float = 1.0) -> float:
    """How many cores other processes use while this one rests."""
    others = Others()
    time.sleep(seconds)
    return others.cores()


def gemm_peak(sizes: tuple[int, ...] = (1024, 2048), runs: int = 5) -> float:
    """The best of a few products of square float32 matrices, in operations per second, with torch's threads."""
    best = 0.0
    for size in sizes:
        left, right, product = (torch.rand(size, size) for _ in range(3))
        for _ in range(runs + 1):  # the first one only warms up, and is not the best
            start = time.perf_counter()
            torch.mm(left, right, out=product)
            best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return best


def instruction_sets() -> str:
    """The vector and matrix instructions that the processor has, and what torch makes of them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # Linux alone has this file
        lines = []
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    found = " ".join(flag for flag in _FLAGS if flag in flags) or "unknown"
    return f"{found}; torch uses {torch.backends.cpu.get_cpu_capability()}"


def settings() -> str:
    """The environment variables that change how fast torch computes."""
    chosen = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(_SETTINGS)]
    return " ".join(chosen) or "none"


def write(name: str, out: Path, title: str, *blocks: str, how: str = "") -> None:
    """Write `<name>.md` into a folder and print it: the title, `how` and on what it was made, and these blocks."""
    threads = torch.get_num_threads()
    run = store.Run.now(threads=threads)
    made = (
        f"Written by `python -m validation.bench {name}`: {how}{threads} threads, {run.devices['cpu']}, "
        f"torch {torch.__version__}, commit {run.commit}, {run.started:%Y-%m-%d}."
    )
    text = page(f"# {title}", made, *blocks)
    out.mkdir(parents=True, exist_ok=True)
    store.replace(out / f"{name}.md", text.encode())
    Console().print(text, markup=False)
