"""Peer: what `torch.export` makes of the same model and inputs, for comparison; nothing here is a failure."""

from __future__ import annotations

import time

import torch

from fxopt.testing import compare

from ..build import free_sizes
from ..records import Finding
from ..subject import Subject
from ..sweep import FIXED, FREE


@torch.no_grad()
def check(subject: Subject, pipeline: tuple[str, ...]) -> Finding:
    """Export with free sizes, else with fixed ones; `right`, `wrong` or `failed` at the sizes of the inputs."""
    started, dtype = time.perf_counter(), subject.wide
    model = subject.model(dtype)
    expected, free, reason = subject.run(model, dtype), free_sizes(subject.entry, model), ""
    for shapes in (free, None) if free else (None,):
        inputs, began = subject.inputs(dtype), time.process_time()
        try:
            exported = torch.export.export(model, (), inputs, dynamic_shapes=shapes, strict=False).module()
            subject.measurements["peer_seconds"] = time.process_time() - began
            actual = subject.run(exported, dtype)
        except Exception as error:  # whatever it raises, it has not captured the model
            reason = reason or " ".join(f"{type(error).__name__}: {error}".split())
            continue
        found = _difference(expected, actual, subject.rtol)
        subject.facts |= {
            "peer": "wrong" if found else "right",
            "peer_reason": found or reason,
            "peer_sizes": FREE if shapes else FIXED,
        }
        break
    else:
        subject.facts |= {"peer": "failed", "peer_reason": reason}
    return Finding(measurements={"peer_work_seconds": time.perf_counter() - started})


def _difference(expected: object, actual: object, rtol: float) -> str:
    """How two outputs differ by more than a tolerance; empty where they do not."""
    try:
        difference = compare(expected, actual)
    except AssertionError as error:
        return " ".join(str(error).split())
    return (
        ""
        if difference.max_rel <= rtol
        else f"{difference.where} is {difference.max_rel:.3g} of its largest value off"
    )
