"""Tells which versions are installed here, and whether fxopt works with them."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable
from typing import Any

import torch

import fxopt.passes
from fxopt import torch_internals
from fxopt.capture import trace
from fxopt.errors import PassError
from fxopt.passes.merge_linears import MergeLinears
from fxopt.rewriting.history import undo

OF_INTEREST = ("fxopt", "torch", "safetensors", "transformers", "onnxruntime", "pytest")


def examine(harness: Callable[[], str]) -> tuple[dict[str, Any], list[str]]:
    """Facts by name, and the names of those that are faults; `harness` tells of the harness, or raises."""
    facts: dict[str, Any] = {
        "python": sys.version.split()[0],
        **{name: _version(name) for name in OF_INTEREST},
    }
    facts["this torch is"] = torch_internals.how_tested()
    absent = list(torch_internals.missing())
    facts["private names of torch"] = (
        "; ".join(map(str, absent)) or f"this torch has all {len(torch_internals.ROWS)} that fxopt uses"
    )
    cuda = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    facts |= {"CUDA devices": ", ".join(cuda) or "none", "threads": torch.get_num_threads()}
    problems: list[str] = []
    for name, check in (("passes", _count_passes), ("capture, pass and undo", _try_it), ("harness", harness)):
        try:
            facts[name] = check()
        except Exception as error:  # whatever it is, this is for telling
            facts[name] = f"{type(error).__name__}: {error}"
            problems.append(name)
    return facts, problems


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _count_passes() -> str:
    found = fxopt.passes.ready()
    own = [name for name, pass_ in found.items() if not type(pass_).__module__.startswith("fxopt.")]
    return f"{len(found)}" + (f", of other packages {', '.join(own)}" if own else "")


class _Two(torch.nn.Module):
    """Two layers that take the same input."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.left(x) + self.right(x)


def _try_it() -> str:
    traced = trace(_Two().eval(), (torch.ones(1, 2),))
    code = traced.code
    merged = MergeLinears()(traced)
    if merged.code == code or undo(merged).code != code:
        raise PassError("two layers are not merged and parted again")
    return "work"
