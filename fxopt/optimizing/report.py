"""The report of `optimize`: for each graph its passes, kernels, error and speed, or why there is none."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence

from fxopt.rewriting.explanation import Explanation


@dataclasses.dataclass(frozen=True)
class GraphReport:
    """The graph for one structure of inputs, or why there is none.

    Attributes:
        inputs: the inputs, with their shapes; free sizes are written as `?`.
        explanations: what each pass rewrote, and what it refused and why.
        kernels: how many layers compute with each kernel.
        seconds: how long capture, passes, tuning and checks took together.
        error: how far the outputs are from those in float64, by how far the model's own are; None if not known.
        speedup: the model's time by the graph's, measured on the example inputs; None if it was not measured.
        memory: what the weights take in memory, those of the graph included, by what the model's take; None if not known.
        reason: why the model itself runs for these inputs; None where the graph does.
        assigned: the attributes that the forward assigns, each as a module and a name, and the graph, too; None if not known.
    """

    inputs: str
    explanations: Sequence[Explanation] = ()
    kernels: Mapping[str, int] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    error: float | None = None
    speedup: float | None = None
    memory: float | None = None
    reason: str | None = None
    assigned: Sequence[tuple[str, str]] | None = None

    def __str__(self) -> str:
        if self.reason is not None:
            return f"{self.inputs}\n  the model itself runs: {self.reason}"
        lines = [self.inputs]
        if self.speedup is not None:
            lines.append(f"  {self.speedup:.2f} times as fast as the model on these inputs")
        if self.error is not None:
            lines.append(f"  {self.error:.2f} times as far from float64 as the model")
        if self.memory is not None:
            lines.append(f"  memory: {self.memory:.2f} times the model's weights")
        lines.append(f"  ready in {self.seconds:.1f} s")
        for explanation in self.explanations:
            if explanation.sites or explanation.refusals:
                lines.append(f"  {explanation.name}: {len(explanation.sites)} sites{_refused(explanation)}")
        if self.kernels:
            lines.append(f"  kernels: {', '.join(f'{n} {name}' for name, n in self.kernels.items())}")
        return "\n".join(lines)


class Report(tuple[GraphReport, ...]):
    """The graphs for each structure of inputs so far: a tuple whose `str()` is a text to read."""

    __slots__ = ()

    def __str__(self) -> str:
        if not self:
            return "nothing was captured so far: call the module, or give optimize example inputs"
        return "\n".join(map(str, self))

    __repr__ = __str__


def _refused(explanation: Explanation) -> str:
    """How often each reason was given, the most frequent one first."""
    reasons = collections.Counter(reason for _, _, reason in explanation.refusals)
    if not reasons:
        return ""
    (reason, count), *others = reasons.most_common()
    more = f", and {sum(n for _, n in others)} for other reasons" if others else ""
    return f", {sum(reasons.values())} refused ({count}: {reason}{more})"
