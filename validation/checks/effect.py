"""Effect: what a pipeline did to the graph, and that it did what it says."""

from __future__ import annotations

from collections import Counter

from torch.fx import GraphModule

from ..records import Finding, Outcome
from ..rewritten import Refusals, Rewritten, differ
from ..subject import Subject


def check(subject: Subject, pipeline: tuple[str, ...]) -> Finding:
    """Count sites and refusals, nodes, modules and parameters; hold the sites against those recorded.

    A pair of passes is not explained, which takes longer than applying it: each pass by itself and `all` say the same.
    """
    dtype = subject.dtypes_of(pipeline)[0]
    before, rewritten = subject.traced(dtype), subject.rewritten(pipeline, dtype)
    refused = subject.refusals(pipeline, dtype) if len(pipeline) == 1 else None
    measurements: dict[str, float | int] = {
        "sites": sum(rewritten.sites),
        **({} if refused is None else {"refused": len(refused)}),
        **{f"{name}_before": value for name, value in _size(before).items()},
        **{f"{name}_after": value for name, value in _size(rewritten.module).items()},
    }
    with subject.entering("compare"):
        reason = _wrong_count(subject, pipeline, rewritten.sites, refused or ()) or _wrong_effect(
            before, rewritten
        )
    nothing = not sum(rewritten.sites)
    outcome = Outcome.FAIL if reason else Outcome.NO_OP if nothing else Outcome.PASS
    reason = reason or ("nothing to rewrite" if nothing else "")
    return Finding(outcome, reason, measurements, refused or ())


def _wrong_count(
    subject: Subject, pipeline: tuple[str, ...], sites: tuple[int, ...], refusals: Refusals
) -> str:
    """A pass alone must rewrite as many sites as are recorded; in company it may find more or fewer."""
    recorded = subject.entry.sites.get(pipeline[0]) if len(pipeline) == 1 else None
    if recorded is None or sites == (recorded,):
        return ""
    model, (found,) = subject.entry.name, sites
    why = Counter(reason for _, _, reason in refusals).most_common(1)
    refused = f"; refused {why[0][1]} times: {why[0][0]}" if why else ""
    return (
        f"{pipeline[0]} rewrites {found} sites in {model}, {recorded} are recorded{refused}. If it is right now, "
        f"`fxopt zoo sites --model {model}` records it anew (for a zoo of your own, with --zoo)"
    )


def _wrong_effect(before: GraphModule, rewritten: Rewritten) -> str:
    if rewritten.tampered:
        names = ", ".join(rewritten.tampered[:3])
        return (
            f"changed {len(rewritten.tampered)} things that the graph shares with the user's model: {names}"
        )
    if sum(rewritten.sites) and not differ(before, rewritten.module):
        return f"marked {sum(rewritten.sites)} nodes as transformed, but the graph module is the same"
    return ""


def _size(module: GraphModule) -> dict[str, int | float]:
    parameters = list(module.parameters())
    return {
        "nodes": len(module.graph.nodes),
        "modules": len({node.target for node in module.graph.nodes if node.op == "call_module"}),
        "parameters": sum(parameter.numel() for parameter in parameters),
        "parameters_mb": sum(p.numel() * p.element_size() for p in parameters) / 1e6,
    }
