"""Applying and undoing as a plan says: what must hold of the graph module after each of the calls."""

from __future__ import annotations

import collections
import copy
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

import fxopt
from fxopt.rewriting.record import MARKS
from fxopt.submodules import sharing_copy
from fxopt.testing import assert_round_trip
from tests.fuzz.plans import Action, Pipeline, made, parts


class Fault(AssertionError):
    """A promise that was not kept; `kind` names the judge."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Lost(Exception):
    """Undoing was refused where the user has thrown away what it needs."""


class Player:
    """Applies passes to a graph module and undoes them, and judges each step.

    Attributes:
        graph_module: the module.
        states: what it is when the first so many applications stand, and nothing else.
        makers: for each application, the pass and the compositions that it was a part of.
        counts: the sites that were rewritten, those that could not be verified, and the reasons for that.
    """

    def __init__(self, graph_module: GraphModule) -> None:
        self.graph_module = graph_module
        self.states = [copy.deepcopy(graph_module)]
        self.makers: list[frozenset[Pipeline]] = []
        self.counts: collections.Counter[str] = collections.Counter()

    @property
    def applications(self) -> int:
        """How many of them changed something, and were not undone at once."""
        return len(self.makers)

    def apply(self, pipeline: Pipeline, verify: bool = False, lint: bool = True) -> None:
        """Apply a pass, or a composition, which must do what its parts do one after the other."""
        expected = self._follow(pipeline) if isinstance(pipeline, tuple) else None
        lint = lint or expected is not None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.graph_module = guarded(
                "pass",
                lambda: made(pipeline)(self.graph_module, lint_and_recompile=lint, verify=verify),
            )
        if verify:
            self._count([str(warning.message) for warning in caught])
        if expected is not None:
            self._expect("composition", expected, self.graph_module)
        elif len(fxopt.history(self.graph_module)) > self.applications:
            self._keep(self.graph_module, frozenset([pipeline]))
        if len(fxopt.history(self.graph_module)) != self.applications:
            raise Fault("history", f"{fxopt.history(self.graph_module)} of {self.applications}")
        self.counts["sites"] = sum(step.sites for step in fxopt.history(self.graph_module))

    def apply_within(self, pipeline: Pipeline, judge: Callable[[GraphModule], None]) -> None:
        """Apply it for the length of a `with` block, after which nothing of it is left."""

        def run() -> None:
            with fxopt.applied(self.graph_module, made(pipeline)):
                sites = sum(step.sites for step in fxopt.history(self.graph_module))
                self.counts["sites"] = max(sites, self.counts["sites"])
                judge(self.graph_module)

        guarded("applied", run)
        self._expect("applied", self.states[-1], self.graph_module)

    def undo(self, actions: Sequence[Action], lossy: bool, judge: Callable[[GraphModule], None]) -> None:
        """Undo everything, in this order as far as it is possible.

        Raises:
            Lost: that was refused, and may be, because of what the user has done to the graph module.
        """
        makers = dict(zip(self._keys(), self.makers, strict=False))
        known, pending, again = list(makers), list(actions), len(actions)
        while pending or self._keys():
            keys = self._keys()
            action = pending.pop(0) if pending else len(keys)
            if isinstance(action, int):
                action = min(action, len(keys)) or 1
                left = keys[:-action]
                if not keys and not (lossy and self.makers):
                    continue
            else:
                left = [key for key in keys if action not in makers[key]]
            before = None if lossy else self._state(keys, known) or copy.deepcopy(self.graph_module)
            try:
                self.graph_module = guarded("undo", lambda action=action: self._undone(action))
            except fxopt.UndoError as error:
                later = left != keys[: len(left)]
                if not later or not self._names_another(str(error), keys, left):
                    if lossy:
                        raise Lost(str(error)) from error
                    raise Fault("undo", f"{action}: {error}") from error
                if before is not None:
                    self._expect("refused undo", before, self.graph_module)
                pending += [action] if again > 0 else []
                again -= 1
                continue
            self.counts["undone"] += 1
            if self._keys() != left:
                raise Fault(
                    "undo history", f"{action}: {len(keys)} steps became {fxopt.history(self.graph_module)}"
                )
            expected = self._state(left, known)
            if lossy:
                continue
            if expected is not None:
                self._expect("round trip" if not left else "partial undo", expected, self.graph_module)
            else:
                judge(self.graph_module)

    def _undone(self, action: Action) -> GraphModule:
        if isinstance(action, int):
            return fxopt.undo(self.graph_module, action)
        return made(action)(self.graph_module, reverse=True)  # type: ignore[call-arg]

    def _keys(self) -> list[str]:
        return [step.key for step in fxopt.history(self.graph_module)]

    def _state(self, keys: Sequence[str], known: Sequence[str]) -> GraphModule | None:
        """The state that the graph module must be in, if these applications are the first ones."""
        return self.states[len(keys)] if [*keys] == [*known[: len(keys)]] else None

    def _names_another(self, message: str, keys: Sequence[str], left: Sequence[str]) -> bool:
        """True where the refusal names what has to be undone first, and that is applied."""
        found = re.search(r"Undo (.+) first$", message)
        steps = {step.key: step.name for step in fxopt.history(self.graph_module)}
        return bool(found) and {*found[1].split(", then ")} <= {steps[key] for key in left}

    def _follow(self, pipeline: Pipeline) -> GraphModule:
        """Apply the parts of a composition, one by one, to a copy."""
        follower = sharing_copy(self.graph_module)  # a deepcopy gives each tensor memory of its own
        for text, around in parts(pipeline):
            steps = len(fxopt.history(follower))
            follower = guarded("pass", lambda text=text, on=follower: made(text)(on))
            if len(fxopt.history(follower)) > steps:
                self._keep(follower, around)
        return follower

    def _keep(self, graph_module: GraphModule, maker: frozenset[Pipeline]) -> None:
        self.states.append(guarded("copy", lambda: copy.deepcopy(graph_module)))
        self.makers.append(maker)

    def _expect(self, kind: str, expected: GraphModule, actual: GraphModule) -> None:
        guarded(kind, lambda: assert_round_trip(expected, actual))
        names = [[step.name for step in fxopt.history(side)] for side in (expected, actual)]
        if names[0] != names[1]:
            raise Fault(f"{kind} history", f"{names[0]} became {names[1]}")
        for old, new in zip(expected.graph.nodes, actual.graph.nodes, strict=True):
            facts = [_facts(node.meta.get("val")) for node in (old, new)]
            marks = [sorted(node.meta.get(MARKS, ())) for node in (old, new)]
            if facts[0] != facts[1] or marks[0] != marks[1]:
                raise Fault(f"{kind} metadata", f"{old}: {facts[0]} {marks[0]} became {facts[1]} {marks[1]}")

    def _count(self, messages: Sequence[str]) -> None:
        for message in messages:
            if re.search(r" rolled back its rewrite of .*: | was rolled back: ", message, re.DOTALL):
                raise Fault("verify", message)
            found = re.search(r"could not verify the site at .*?: (.*)", message, re.DOTALL)
            if found:
                self.counts["unverified"] += 1
                self.counts[f"unverified: {re.sub('[0-9]+', 'N', found[1])}"] += 1


def guarded(kind: str, function: Callable[[], Any]) -> Any:
    """The result of a function, whose errors are faults; but for a refusal where undoing is judged."""
    try:
        return function()
    except Fault:
        raise
    except Exception as error:
        if kind == "undo" and isinstance(error, fxopt.UndoError):
            raise
        raise Fault(kind, f"{type(error).__name__}: {error}") from error


def _facts(value: Any) -> list[Any]:
    return [(list(leaf.shape), leaf.dtype) for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
