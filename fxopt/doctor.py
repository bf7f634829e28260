"""Tells which versions are installed here, and whether fxopt works with them."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable

import torch
from torch import nn

from fxopt import torch_internals
from fxopt.capture import trace
from fxopt.engines import TORCH, engines_for
from fxopt.errors import PassError, error_text
from fxopt.passes import ready
from fxopt.passes.remove_identity import RemoveIdentity
from fxopt.rewriting.history import undo

OF_INTEREST = ("fxopt", "torch", "safetensors", "transformers", "openvino", "onnxruntime", "pytest")


def examine(harness: Callable[[], str]) -> tuple[dict[str, str], list[str]]:
    """Return facts by name, and the names of the failed checks; `harness` returns a fact about the harness, or raises."""
    absent = "; ".join(map(str, torch_internals.missing()))
    cuda = map(torch.cuda.get_device_name, range(torch.cuda.device_count()))
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    facts = {
        "python": sys.version.split()[0],
        **{name: _version(name) for name in OF_INTEREST},
        "this torch is": torch_internals.how_tested(),
        "private names of torch": absent or f"this torch has all {len(torch_internals.ROWS)} that fxopt uses",
        "CUDA devices": ", ".join(cuda) or "none",
        **{f"engines on {device}": _engines(device) for device in devices},
        "threads": str(torch.get_num_threads()),
    }
    problems: list[str] = []
    for name, check in {"passes": _passes, "capture, pass and undo": _try_it, "harness": harness}.items():
        try:
            facts[name] = check()
        except Exception as error:  # every failure is reported
            facts[name] = error_text(error)
            problems.append(name)
    return facts, problems


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _engines(device: str) -> str:
    """The engines that `engine="auto"` chooses from, and why the others cannot be used."""
    return "; ".join(
        [TORCH, *(f"{name}: {why}" if why else name for name, why in engines_for(device).items())]
    )


def _passes() -> str:
    return str(len(ready()))


def _try_it() -> str:
    traced = trace(nn.Sequential(nn.Linear(2, 2), nn.Identity()).eval(), (torch.ones(1, 2),))
    code = traced.code
    rewritten = RemoveIdentity()(traced)
    if rewritten.code == code or undo(rewritten).code != code:
        raise PassError("a layer is not removed and put back")
    return "work"
