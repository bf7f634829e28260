"""Peer: what `torch.export` makes of the same model and inputs, for comparison; nothing here is a failure."""

from __future__ import annotations

import time

import torch

from ..judging.comparison import difference
from ..judging.subject import Subject
from ..records import Finding
from ..zoo.build import free_sizes
from ..zoo.sources import FIXED, FREE
from .parity import OTHER_SIZES, fate_of


@torch.no_grad()
def check(subject: Subject, pipeline: tuple[str, ...]) -> Finding:
    """Export with free sizes, else with fixed ones; `right`, `wrong` or `failed` at the sizes of the inputs, and at another batch."""
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
        found, sizes = difference(expected, actual, subject.rtol), FIXED
        if shapes and not found:
            fate, why = fate_of(subject, exported, OTHER_SIZES["batch"][0], Exception)
            if fate != FIXED:
                found, sizes = why, FREE
            reason = reason or why
        subject.facts |= {
            "peer": "wrong" if found else "right",
            "peer_reason": found or reason,
            "peer_sizes": sizes,
        }
        break
    else:
        subject.facts |= {"peer": "failed", "peer_reason": reason}
    return Finding(measurements={"peer_work_seconds": time.perf_counter() - started})
