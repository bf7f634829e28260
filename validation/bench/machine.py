"""The machine that a benchmark runs on: how fast it multiplies, and a page that names it."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from rich.console import Console

from .. import store
from ..report.markdown import page

BUSY = 0.1
"""A machine is idle while all other processes together use less than this part of one core."""


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
