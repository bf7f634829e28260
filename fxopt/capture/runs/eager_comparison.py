"""The net under a capture: the model and its graph both run on the example inputs, twice, and must give the same.

The second call is for state: a counter that stands still in a graph is right in the first one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.autograd.graph import saved_tensors_hooks

from fxopt.capture.fakes.fake_model import Written
from fxopt.capture.recording.request import Request
from fxopt.capture.runs.eager_outcome import Outcome, difference, outcome_of
from fxopt.capture.runs.first_difference import exporting, likely_cause, parting_place
from fxopt.capture.runs.own_copies import RepeatedRandomness, Twin, copy_inputs
from fxopt.capture.runtime.traced_module import TracedModule
from fxopt.errors import GuardError, TraceError
from fxopt.objects import tensors_in

_CALLS = 2

# Undoes what a run does to state outside of the model, at the end of a block.
Restored = Callable[[], contextlib.AbstractContextManager[None]]


def check_against_eager(
    traced: TracedModule, request: Request, written: Written, restored: Restored, tables: Collection[str]
) -> None:
    """Raise TraceError where the graph computes something else than the model on the example inputs.

    A model that raises on them, or does not repeat itself under one state of the random generators, cannot be judged: a warning
    says so. What is `written` of the user's tensors is copied, and `restored` undoes what a run does outside of the model; `tables`
    are buffers that the model keeps and the graph makes anew.
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
        """Compare call by call; the reason if it could not be done."""
        if self._agrees(keeps=False) or self._agrees(keeps=True):
            return None
        model, graph = self._twins()
        for call in range(1, _CALLS + 1):
            expected = self._outcome(model)
            if expected.error is not None:
                return f"the model raises {_named(expected.error)}"
            drawn = self.randomness.were_used()
            found = self._outcome(graph)
            if isinstance(found.error, GuardError) and drawn and self.request.specialize:
                return None  # decided by random numbers, which are others now
            if isinstance(found.error, (MemoryError, torch.OutOfMemoryError)):
                return f"the graph raises {_named(found.error)}"
            differs = f"raises {_named(found.error)}" if found.error else difference(expected, found)
            if differs is None:
                continue
            if difference(expected, self._at(call, Twin(self.request.model, self.written))) is not None:
                return "from one state of the random generators the model gives one thing, then another"
            raise self._error(differs, call)
        return None

    def _agrees(self, keeps: bool) -> bool:
        """Tell whether there is clearly nothing to find, in little more memory than one run takes.

        One copy is in memory at a time, and of a call a small part of its numbers remains. Where no backward follows, what that
        needs of the forward is kept only with `keeps`, for a forward that computes gradients itself.
        """
        if keeps and self._gradients():
            return False  # as before
        saved = saved_tensors_hooks(lambda tensor: None, lambda none: none)
        outcomes = []
        for module in (self.request.model, self.traced):
            twin = Twin(module, self.written)
            for _ in range(_CALLS):
                with contextlib.nullcontext() if keeps or self._gradients() else saved:
                    outcomes.append(self._outcome(twin, condensed=True))
                if outcomes[-1].error or outcomes[-1].gradient_error:
                    return False
            del twin
        return all(difference(*pair) is None for pair in zip(outcomes[:_CALLS], outcomes[_CALLS:], strict=True))

    def _gradients(self) -> bool:
        return self.request.model.training and torch.is_grad_enabled()

    def _twins(self) -> tuple[Twin, Twin]:
        """New copies of the model and of the graph."""
        return Twin(self.request.model, self.written), Twin(self.traced, self.written)

    def _at(self, call: int, twin: Twin) -> Outcome:
        """The outcome of a fresh copy at this call."""
        return [self._outcome(twin) for _ in range(call)][-1]

    def _outcome(
        self, twin: Twin, function: Callable[..., Any] | None = None, condensed: bool = False
    ) -> Outcome:
        """One call, by `function` where it is not that of the module itself."""
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

    def _error(self, differs: str, call: int) -> TraceError:
        model, graph = self._twins()
        exported, found = exporting(lambda: self._at(call, model)), self._at(call, graph)
        agrees = exported.error is None and difference(exported, found) is None
        model, graph = self._twins()
        for twin in (model, graph):
            for _ in range(call - 1):
                self._outcome(twin)
        layers = {name for name, m in self.request.model.named_modules() if id(m) in self.request.layers}
        place = parting_place(
            graph.module, model.module, layers, lambda f: self._outcome(graph if f is graph else model, f)
        )
        which = "" if call == 1 else f" in call {call}"
        return TraceError(
            f"the graph differs from the model{which}: {differs}. They part at {place}. "
            f"The likely cause: {likely_cause(differs, call, agrees)}. "
            "(Both were run on the example inputs; verify=False leaves that out.)"
        )


def _is_real(request: Request) -> bool:
    """Tell whether there is data to compare: no fake tensors, and none on the meta device."""
    tensors = [*request.model.parameters(), *request.model.buffers(), *tensors_in(request.inputs)]
    return detect_fake_mode(tensors) is None and not any(t.is_meta for t in tensors)


def _named(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
