"""The page of a benchmark, which names the machine that it ran on."""

from __future__ import annotations

from pathlib import Path

import torch
import typer

from .. import store
from ..report.markdown import page

BUSY = 0.1
"""A machine is idle while all other processes together use less than this part of one core."""


def write(name: str, out: Path, title: str, *blocks: str) -> None:
    """Write `<name>.md` into a folder and print it: the title, on what it was made, and these blocks."""
    run = store.Run.now(threads=torch.get_num_threads())
    made = (
        f"Written by `python -m validation.bench {name}`: {run.threads} threads, {run.devices['cpu']}, "
        f"torch {torch.__version__}, commit {run.commit}, {run.started:%Y-%m-%d}."
    )
    text = page(f"# {title}", made, *blocks)
    out.mkdir(parents=True, exist_ok=True)
    store.replace(out / f"{name}.md", text.encode())
    typer.echo(text)
