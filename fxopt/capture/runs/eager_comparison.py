"""The final test of a capture: the model and its graph both run on the example inputs, twice, and must agree.

The second call tests state: a counter that the graph does not advance is still correct in the first call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from fxopt.capture.capture_internals import detect_fake_mode
from fxopt.capture.fakes.fake_model import Written
from fxopt.capture.recording.request import Request
from fxopt.capture.runs.eager_outcome import Outcome, difference, named, outcome_of
from fxopt.capture.runs.first_difference import exporting, likely_cause, place_of_divergence
from fxopt.capture.runs.own_copies import ComparisonCopy, RepeatedRandomness, copy_inputs
from fxopt.capture.runtime.traced_module import TracedModule
from fxopt.errors import GuardError, TraceError

_CALLS = 2

# Undoes at the end of a block what a run did to state outside of the model.
Restored = Callable[[], contextlib.AbstractContextManager[None]]


def check_against_eager(
    traced: TracedModule, request: Request, written: Written, restored: Restored, tables: Collection[str]
) -> None:
    """Raise TraceError if the graph and the model compute different results on the example inputs.

    If the model raises on them, or returns two results from the same random state, a comparison is not possible and a warning
    says why. The user's tensors in `written` are copied, and `restored` undoes what a run does outside of the model. `tables`
    are buffers that the model keeps and the graph computes in each call.
    """
    if not _is_real(request):
        return
    randomness = RepeatedRandomness(request)
    try:
        reason = _Comparison(traced, request, written, restored, randomness, tables).check()
    finally:
        randomness.rewind()
    if reason:
        warnings.warn(
            f"the graph of {type(request.model).__name__} was not compared with the model on the example inputs: {reason}. "
            "verify=False leaves this check out.",
            stacklevel=2,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class _Comparison:
    """The calls of one check."""

    traced: TracedModule
    request: Request
    written: Written
    restored: Restored
    randomness: RepeatedRandomness
    tables: Collection[str]

    def check(self) -> str | None:
        """Compare call by call; return the reason if that is not possible.

        The first attempt condenses large tensors and, if no backward follows, drops the tensors that autograd saves: it needs
        little more memory than a run. If results differ, the next attempts keep the saved tensors, then also all numbers.
        """
        kept, dropped = contextlib.nullcontext(), saved_tensors_hooks(lambda tensor: None, lambda none: none)
        for condensed, saved in ((True, dropped), (True, kept), (False, kept))[self._gradients() :]:
            with saved:
                expected = self._calls(self.request.model, condensed)
                drawn = self.randomness.were_used()
                found = self._calls(self.traced, condensed)
            differences = list(map(difference, expected, found))
            if not any(differences):
                return None
        number, differs = next((n, each) for n, each in enumerate(differences) if each)
        if (error := expected[number].error) is not None:
            return f"the model raises {named(error)}"
        error = found[number].error
        if isinstance(error, GuardError) and drawn and self.request.specialize:
            return None  # random numbers decide, and they are different in this run
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
            return f"the graph raises {named(error)}"
        again = self._calls(self.request.model, condensed=False)
        if difference(expected[number], again[: number + 1][-1]) is not None:
            return "two runs of the model from the same state of the random generators differ"
        raise self._error(differs, number, found[number])

    def _calls(self, module: torch.nn.Module, condensed: bool) -> list[Outcome]:
        """Call a new copy of a module; return the outcomes, up to the first one that raises."""
        twin, outcomes = ComparisonCopy(module, self.written), list[Outcome]()
        while len(outcomes) < _CALLS and all(outcome.error is None for outcome in outcomes):
            outcomes.append(self._outcome(twin, condensed))
        return outcomes

    def _outcome(
        self, twin: ComparisonCopy, condensed: bool = False, function: Callable[..., Any] | None = None
    ) -> Outcome:
        """Make one call of `function`; by default, of the module itself."""
        examples = copy_inputs(self.request.inputs)
        self.randomness.rewind()

        def call(values: dict[str, Any]) -> Any:
            args, kwargs = self.request.arguments(values)
            return (function or twin.module)(*args, **kwargs)

        with self.restored(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outcome = twin.run(outcome_of, call, examples, twin.module, self._gradients(), condensed)
        for name in self.tables:
            outcome.contents.pop(f"buffer {name}", None)
        return outcome

    def _gradients(self) -> bool:
        return self.request.model.training and torch.is_grad_enabled()

    def _error(self, differs: str, number: int, found: Outcome) -> TraceError:
        exported = exporting(lambda: self._calls(self.request.model, condensed=False))
        agrees = len(exported) > number and difference(exported[number], found) is None
        model, graph = (
            ComparisonCopy(self.request.model, self.written),
            ComparisonCopy(self.traced, self.written),
        )
        for twin in (model, graph) * number:
            self._outcome(twin)
        layers = {name for name, m in self.request.model.named_modules() if id(m) in self.request.layers}
        place = place_of_divergence(
            graph.module,
            model.module,
            layers,
            lambda f: self._outcome(graph if f is graph else model, function=f),
        )
        which = f" in call {number + 1}" if number else ""
        return TraceError(
            f"the graph differs from the model{which}: {differs}. They diverge at {place}. "
            f"The likely cause: {likely_cause(differs, number + 1, agrees)}. "
            "(Both were run on the example inputs; verify=False skips this check.)"
        )


def _is_real(request: Request) -> bool:
    """Tell whether there is data to compare: no fake tensors, and none on the meta device."""
    tensors = request.tensors()
    return detect_fake_mode(tensors) is None and not any(t.is_meta for t in tensors)
