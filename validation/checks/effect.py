"""Effect: what a pipeline did to the graph, and that it did what it says."""

from __future__ import annotations

import functools
import json
from collections import Counter

import torch
from torch.fx import GraphModule

from fxopt.kernels import PackedLayer
from fxopt.passes.quantize_linears import QuantizeLinears
from fxopt.submodules import sharing_copy

from ..judging.rewritten import Explained, Refusals, Rewritten, differ
from ..judging.subject import Subject
from ..records import Finding, Outcome
from ..regressions.metric import KERNELS
from ..timing import peak_mb, seconds_of

PLACES, MOST_PLACES = "places", 200
"""The fact that lists the sites of a pass with modules and lines, and the maximum number of listed sites."""


def check(subject: Subject, pipeline: tuple[str, ...]) -> Finding:
    """Count sites, refusals and nodes; compare the sites with the recorded number.

    A pipeline of several passes is not explained, because explaining takes longer than applying, and each single pass
    reports the same.
    """
    dtype = subject.dtype_of(pipeline)
    before, rewritten = subject.traced(dtype), subject.rewritten(pipeline, dtype)
    alone = len(pipeline) == 1 == len(subject.members(pipeline))
    found = subject.explained(pipeline, dtype) if alone else Explained()
    if found.places:
        subject.facts[PLACES] = json.dumps(found.places[:MOST_PLACES])
    packed = (part for part in rewritten.module.modules() if isinstance(part, PackedLayer))
    if kernels := sorted({part.kernel for part in packed}):
        subject.facts[KERNELS] = ", ".join(kernels)
    measurements: dict[str, float | int] = {
        "sites": rewritten.sites,
        **({"refused": len(found.refusals)} if alone else {}),
        "nodes_before": len(before.graph.nodes),
        "nodes_after": len(rewritten.module.graph.nodes),
    }
    if alone and subject.entry.given:
        measurements |= _cost(subject, pipeline, dtype)
    with subject.entering("compare"):
        reason = _wrong_count(subject, pipeline, rewritten.sites, found.refusals) or _wrong_effect(
            before, rewritten
        )
    outcome = Outcome.FAIL if reason else Outcome.PASS
    if not reason and not rewritten.sites:
        outcome, reason = Outcome.NO_OP, "nothing to rewrite"
    return Finding(outcome, reason, measurements, found.refusals)


def _cost(subject: Subject, pipeline: tuple[str, ...], dtype: torch.dtype) -> dict[str, float | int]:
    """The seconds to apply a pass (the faster of two runs), and the peak memory of the tensors that it creates."""
    (pass_,) = subject.members(pipeline)
    *timed, measured = (sharing_copy(subject.traced(dtype)) for _ in range(3))
    with subject.entering("transform"):
        seconds = min(seconds_of(functools.partial(pass_, graph)) for graph in timed)
        return {"apply_seconds": seconds, "apply_memory_mb": peak_mb(lambda: pass_(measured), subject.device)}


def _wrong_count(subject: Subject, pipeline: tuple[str, ...], sites: int, refusals: Refusals) -> str:
    """Describe a wrong number of sites: a single pass must rewrite the recorded number; in a pipeline it may differ."""
    recorded = subject.entry.sites.get(pipeline[0]) if len(pipeline) == 1 else None
    # A GPU has other kernels and refusals, and only some processors support int8 products of every size.
    elsewhere = subject.device != "cpu" or type(subject.members(pipeline)[0]) is QuantizeLinears
    if recorded is None or sites == recorded or elsewhere:
        return ""
    model = subject.entry.name
    why = Counter(reason for _, _, reason in refusals).most_common(1)
    refused = f"; refused {why[0][1]} times: {why[0][0]}" if why else ""
    return (
        f"{pipeline[0]} rewrites {sites} sites in {model}, {recorded} are recorded{refused}. If it is right now, "
        f"`fxopt zoo sites --model {model}` records it anew (for a zoo of your own: `fxopt zoo sites FILE --model {model}`)"
    )


def _wrong_effect(before: GraphModule, rewritten: Rewritten) -> str:
    if rewritten.tampered:
        names = ", ".join(rewritten.tampered[:3])
        return (
            f"changed {len(rewritten.tampered)} things that the graph shares with the user's model: {names}"
        )
    if rewritten.sites and not differ(before, rewritten.module):
        return f"tells of {rewritten.sites} sites, but the graph module is the same"
    return ""
