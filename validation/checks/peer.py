"""Peer: what `torch.export` makes of the same model and inputs, for comparison; nothing here is a failure."""

from __future__ import annotations

import time

import torch

from fxopt.errors import error_text

from ..judging.comparison import difference
from ..judging.subject import Subject
from ..records import Finding, one_line
from ..zoo.build import free_sizes


@torch.no_grad()
def check(subject: Subject, pipeline: tuple[str, ...]) -> Finding:
    """Export with dynamic sizes, otherwise with static ones: `right`, `wrong` or `failed` at the sizes of the inputs."""
    dtype, reason = subject.wide, ""
    model = subject.model(dtype)
    expected = subject.run(model, dtype)
    free = free_sizes(subject.entry, subject.model(torch.float32))
    for shapes in (free, None) if free else (None,):
        inputs, began = subject.inputs(dtype), time.process_time()
        try:
            exported = torch.export.export(model, (), inputs, dynamic_shapes=shapes, strict=False).module()
            seconds = time.process_time() - began
            actual = subject.run(exported, dtype)
        except Exception as error:  # after any error, the model is not captured
            reason = reason or one_line(error_text(error))
            continue
        found = difference(expected, actual, subject.rtol)
        subject.facts |= {"peer": "wrong" if found else "right", "peer_reason": found or reason}
        return Finding(measurements={"peer_seconds": seconds})
    subject.facts |= {"peer": "failed", "peer_reason": reason}
    return Finding()
