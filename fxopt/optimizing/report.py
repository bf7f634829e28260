"""The report of `optimize`: for each graph its passes, kernels, error and speed, or why there is none."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from fxopt.rewriting.explanation import Explanation


@dataclasses.dataclass(frozen=True)
class GraphReport:
    """The graph for one input signature, or why there is none.

    Attributes:
        inputs: the inputs with their shapes; dynamic sizes are written as `?`.
        explanations: what each pass rewrote, and what it refused and why.
        kernels: the number of layers that compute with each kernel.
        seconds: how long capture, passes, tuning and checks took together.
        error: the error vs float64, as a ratio to the eager model's; None if not known.
        cosine: the cosine of the outputs with those in float64; None if the precision is float32.
        speedup: eager time ÷ graph time on the example inputs; None if it was not measured.
        memory: bytes of the weights, those of the graph included, as a ratio to the eager model's; None if not known.
        engine: the engine that computes the graph.
        engines: the engines that were tried and do not compute the graph, each with the reason.
        reason: why calls with these inputs fall back to eager; None if the graph is used.
        assigned: the attributes and buffers that the forward changes, each as a module and a name; None if not known.
        fixed: why sizes are fixed that were to be free, such as the line of the forward that fixes one; None if none is.
        unused: why no layer computes in the precision of the options; None if a layer does.
    """

    inputs: str = ""
    explanations: Sequence[Explanation] = ()
    kernels: Mapping[str, int] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    error: float | None = None
    cosine: float | None = None
    speedup: float | None = None
    memory: float | None = None
    engine: str = "torch"
    engines: Mapping[str, str] = dataclasses.field(default_factory=dict)
    reason: str | None = None
    assigned: Sequence[tuple[str, str]] | None = None
    unused: str | None = None
    fixed: str | None = None

    def __str__(self) -> str:
        head = f"{'graph' if self.reason is None else 'eager'} for {self.inputs}"
        return "\n".join([head, *(f"  {name:10}{text}" for name, text in self._rows() if text)])

    def _rows(self) -> Iterator[tuple[str, str | None]]:
        yield "reason", self.reason
        yield "precision", self.unused
        for name, value, text in (
            ("speed", self.speedup, "{:.2f}x eager"),
            ("error", self.error, "{:.2f}x eager's, vs float64"),
            ("cosine", self.cosine, "{:.5f}, with the outputs in float64"),
            ("memory", None if self.reason else self.memory, "{:.2f}x the weights of the model"),
        ):
            yield name, None if value is None else text.format(value)
        if self.reason is None:
            yield "engine", "" if self.engine == "torch" else self.engine
            yield from (("engine", f"not {name}: {why}") for name, why in self.engines.items())
            yield "prepared", f"in {self.seconds:.1f} s"
            passes = (f"{each.name} {len(each.sites)}" for each in self.explanations if each.sites)
            yield "sites", ", ".join(passes)
            yield from (("refused", _refused(each)) for each in self.explanations)
            yield "kernels", ", ".join(f"{name} {number}" for name, number in self.kernels.items())


class Report(tuple[GraphReport, ...]):
    """The graphs for each input signature so far: a tuple whose `str()` is a text to read.

    Attributes:
        called: the methods that were called other than forward, and not optimized.
        fallbacks: the reasons in the warnings so far, each once.
    """

    called: tuple[str, ...] = ()
    fallbacks: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self:
            known = {text for each in self for text in (each.reason, each.unused, *each.engines.values())}
            others = (f"warned: {reason}" for reason in self.fallbacks if reason not in known)
            return "\n".join([*map(str, self), *others])
        names = ", ".join(map(repr, self.called))
        parts = "optimize the parts of the model that it calls, or " if "generate" in self.called else ""
        why = f"forward was not called, but {names}; {parts}name methods as optimize(..., methods=({names},))"
        no_call = "call the module, or pass example inputs to optimize"
        return f"no graph yet: {'; '.join(self.fallbacks) or (why if self.called else no_call)}"

    __repr__ = __str__


def _refused(explanation: Explanation) -> str:
    """The pass with its most frequent reason, and how many others there are."""
    counts = collections.Counter(reason for _, _, reason in explanation.refusals)
    if not counts:
        return ""
    ((reason, count),) = counts.most_common(1)
    others = counts.total() - count
    return f"{explanation.name} {count}: {reason}{f', and {others} for other reasons' if others else ''}"
