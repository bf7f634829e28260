"""One application of a pass: roll back after an error, and checks of the results of its methods."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fxopt.errors import PassError
from fxopt.rewriting.edits import Edit
from fxopt.rewriting.fingerprint import fingerprint
from fxopt.rewriting.record import MARKS, Step, marked_nodes, orders_of, set_steps, steps_of
from fxopt.rewriting.snapshot import Snapshot, Writes

Applied = tuple[GraphModule, Callable[[], None]]
"""The result of a transformation, and a function that rolls it back, valid until something else changes the result."""


class Attempt:
    """A `with` block for the code of a pass; an error in the block rolls the graph module back.

    Attributes:
        snapshot: the graph module before the block.
        fingerprint: the fingerprint of the graph module before the block.
        written: the tensors of the graph module that were written in place, by name, each with a copy of its earlier values.
    """

    def __init__(self, pass_: Any, graph_module: GraphModule, method: str = "transform") -> None:
        self._pass, self._method, self._signature = pass_, method, pass_.signature
        self.fingerprint, self.snapshot = fingerprint(graph_module), Snapshot(graph_module)
        self.written: dict[str, tuple[Tensor, Tensor]] = {}
        self.writes = Writes(self.snapshot, self._keep)

    def _keep(self, name: str, tensor: Tensor) -> None:
        if name not in self.written:
            self.written[name] = tensor, tensor.detach().clone()

    def __enter__(self) -> Attempt:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.roll_back()
            error.add_note(f"raised by {self._pass!r} in {self._method}()")

    def roll_back(self) -> None:
        """Roll the graph module back; erased nodes come back as copies."""
        self.snapshot.roll_back()
        with torch.no_grad():
            for tensor, values in self.written.values():
                tensor.copy_(values)

    def check(self, result: object) -> None:
        """Raise a PassError if `result` is not a graph module, or the pass changed its signature or broke its promise."""
        where = f"{type(self._pass).__name__}.{self._method}"
        if not isinstance(result, GraphModule):
            raise PassError(f"{where} returned {type(result).__name__}; it has to return the graph module")
        if self._pass.signature != self._signature:
            raise PassError(
                f"{where} changed its own signature, by which its marks are found again; keep results out of "
                "its attributes, or write a property `signature`"
            )
        if self._method == "transform":
            check_promise(self._pass, result, self.snapshot.steps)

    def note(
        self,
        result: GraphModule,
        edits: Sequence[Edit],
        marked: Sequence[Node] | None = None,
        *,
        orders: dict[str, list[str]] | None = None,
        **facts: Any,
    ) -> None:
        """Add the application to the history, if it changed something.

        Args:
            result: the graph module that the application returned.
            edits: its changes, as data.
            marked: the nodes that it marked; by default, those with the mark of the pass that did not have it before.
            orders: the new orders of the record; by default, the orders stay.
            facts: other fields of the step.
        """
        standing, inner = self.standing(result)
        if marked is None:
            marked = [
                node
                for node in marked_nodes(result, self._signature)
                if self._signature not in self.snapshot.meta(node.name).get(MARKS, ())
            ]
        after = fingerprint(result)
        if edits or marked or inner or self.written or after != self.fingerprint:
            facts = {"sites": len(marked) or 1, "before": self.fingerprint, "after": after, **facts}
            step = Step(
                *(repr(self._pass), self._signature, len(marked), self._pass.reversible),
                edits=tuple(edits),
                marked=tuple(node.name for node in marked),
                parts=tuple(inner),
                transformation=self._pass,
                **facts,
            )
            standing.append(step)
        set_steps(result, standing, orders or orders_of(result) or self.snapshot.orders)

    def standing(self, result: GraphModule) -> tuple[list[Step], list[Step]]:
        """The steps in the record of the result: those from before the block, and those applied inside it."""
        present = steps_of(result) or steps_of(self.snapshot.graph_module)
        earlier = {step.key for step in self.snapshot.steps}
        return [s for s in present if s.key in earlier], [s for s in present if s.key not in earlier]


def check_promise(pass_: Any, result: GraphModule, steps: Sequence[Step]) -> None:
    """Raise a PassError that names the pass, and the steps before it, if the result breaks what the pass `ensures`."""
    reason = pass_.ensures(result)
    if not isinstance(reason, str | None):  # False would count as no fault
        raise PassError(
            f"ensures of {pass_!r} returned {reason!r}: it has to return a text that says what is wrong, or None"
        )
    if reason:
        applied = ", ".join(step.name for step in steps) or "nothing"
        raise PassError(f"{pass_!r} broke its promise: {reason}. Applied before it: {applied}")


def check_log(pass_: Any, snapshot: Snapshot, log: Sequence[Edit]) -> None:
    """Raise a PassError if `apply` changed something that is not in the log of its rewriter."""
    unlogged_change = snapshot.unlogged_change(log)
    if unlogged_change:
        raise PassError(
            f"apply of {pass_!r} changed {unlogged_change} without its rewriter, so the change could not be undone. The pass was "
            "rolled back. Use the methods of the rewriter, such as set, erase and replace_module; in a Pattern, change a copy"
        )


def found_by(pass_: Any, graph_module: GraphModule) -> list[Any]:
    """List all that `match` yields; raise a PassError if something is not a node, site or refusal."""
    matched = pass_.match(graph_module)
    found = list(matched) if isinstance(matched, Iterable) else [matched]
    wrong = [type(each).__name__ for each in found if not isinstance(getattr(each, "node", each), Node)]
    if wrong:
        raise PassError(
            f"match of {pass_!r} gave a {wrong[0]}: it has to yield nodes, objects with an attribute `node`, and refusals"
        )
    return found


def nodes_of(pass_: Any, made: Any) -> list[Node]:
    """List the nodes that `apply` returned; raise a PassError if it returned anything else."""
    nodes = made if isinstance(made, Iterable) and not isinstance(made, str) else [made]
    found = [each for each in nodes if each is not None]
    wrong = next((type(each).__name__ for each in found if not isinstance(each, Node)), None)
    if wrong is not None:
        raise PassError(
            f"apply of {pass_!r} returned a {wrong}: it has to return the nodes to mark as transformed, or None"
        )
    return found
