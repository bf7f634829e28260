"""`python -m validation.bench capture`: how long a capture takes, beside `torch.export`, in one interleaved run."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch.export import Dim
from transformers import (
    BertConfig,
    BertModel,
    GroupViTConfig,
    GroupViTModel,
    ResNetConfig,
    ResNetForImageClassification,
)

import fxopt

app = typer.Typer(add_completion=False)


@app.callback()
def main() -> None:
    """Measure what fxopt takes, with its peers beside it."""


@app.command()
def capture(
    rounds: Annotated[
        int, typer.Option(help="Counted captures of each kind, after one that is not counted.")
    ] = 5,
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = 2,
) -> None:
    """Time `fxopt.trace` and `torch.export.export(strict=False)` on the models at their published sizes."""
    torch.set_num_threads(threads)
    table = Table(
        title=f"capture, median of {rounds} (minimum to maximum), seconds, torch {torch.__version__}"
    )
    for heading in ("model", "sizes", "fxopt", "torch.export", "ratio"):
        table.add_column(heading, justify="left" if heading in ("model", "sizes") else "right")
    for name, model, inputs, free in _models():
        for sizes, shapes in (("fixed", None), ("dynamic", free)):
            ours = functools.partial(fxopt.trace, model, (), inputs, dynamic_shapes=shapes)
            theirs = functools.partial(
                torch.export.export, model, (), inputs, dynamic_shapes=shapes, strict=False
            )
            times = _interleaved([ours, theirs], rounds)
            ratio = statistics.median(a / b for a, b in zip(*times, strict=True))
            table.add_row(name, sizes, *map(_text, times), f"{ratio:.2f}")
    Console().print(table)


def _models() -> Sequence[tuple[str, torch.nn.Module, dict[str, Any], dict[str, Any]]]:
    """Name, model, inputs by name, and the free dimensions of each."""
    ids = torch.randint(0, 1000, (3, 7))
    text = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    image = {"pixel_values": torch.randn(3, 3, 224, 224)}
    text_free = {name: {0: Dim.AUTO, 1: Dim.AUTO} for name in text}
    image_free = {"pixel_values": {0: Dim.AUTO}}
    return [
        ("BERT-base", BertModel(BertConfig()).eval(), text, text_free),
        ("ResNet-50", ResNetForImageClassification(ResNetConfig()).eval(), image, image_free),
        ("GroupViT", GroupViTModel(GroupViTConfig()).eval(), text | image, text_free | image_free),
    ]


def _interleaved(runs: Sequence[Callable[[], Any]], rounds: int) -> list[list[float]]:
    """Seconds of each run in turn, round after round; the first round, which imports and warms up, is left out."""
    times: list[list[float]] = [[] for _ in runs]
    for turn in range(rounds + 1):
        for run, seconds in zip(runs, times, strict=True):
            start = time.perf_counter()
            run()
            if turn:
                seconds.append(time.perf_counter() - start)
    return times


def _text(times: list[float]) -> str:
    return f"{statistics.median(times):.2f} ({min(times):.2f} to {max(times):.2f})"


if __name__ == "__main__":
    app()
