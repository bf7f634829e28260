"""Code of a pass being tried: what a hand-written `transform` or `reverse` changed, how that is taken back, and checks of results."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, cast

from torch.fx import GraphModule, Node

from fxopt.errors import PassError
from fxopt.rewriting.edits import Edit, NodeEdit, NodeState, Swap, Swapped, as_data
from fxopt.rewriting.fingerprint import fingerprint
from fxopt.rewriting.record import MARKS, PassRecord, Step, marked_nodes, orders_of, set_steps, steps_of
from fxopt.torch_internals import REGISTRIES, buffers_of, modules_of, parameters_of, version_of

Applied = tuple[GraphModule, Callable[[], None]]
"""The result of a transformation, and a function that takes it back as long as nothing else has happened."""


class Attempt:
    """Runs hand-written code; after an error in its `with` block the graph module is as it was before.

    Attributes:
        steps: what had been applied to the graph module before.
        orders: the orders of its record.
        fingerprint: its fingerprint.
        states: its nodes as data, by name.
    """

    def __init__(self, pass_: Any, graph_module: GraphModule, method: str = "transform") -> None:
        self.steps, self.orders = steps_of(graph_module), orders_of(graph_module)
        self._pass, self._method, self._graph_module = pass_, method, graph_module
        self._signature, self._name = pass_.signature, repr(pass_)
        try:
            self._graph = copy.deepcopy(graph_module.graph)
        except KeyError:  # a node before what it reads: the graph was invalid already, and linting says so
            self._graph = graph_module.graph
        self.states = {node.name: NodeState.of(node) for node in self._graph.nodes}
        self.fingerprint, self._held = fingerprint(graph_module), dict(_held(graph_module))
        modules = [module for module in graph_module.modules() if not isinstance(module, PassRecord)]
        self._dicts = [
            (cast(dict[str, Any], held), dict(held))
            for module in modules
            for name, held in vars(module).items()
            if isinstance(held, dict) and (name in REGISTRIES or name.endswith("_hooks"))
        ]
        self._gradients = [(tensor, tensor.requires_grad) for tensor in graph_module.parameters()]
        self._options = [(vars(module), _public(module)) for module in modules]
        self._versions = [
            (name, tensor, version_of(tensor))
            for name, tensor in (*graph_module.named_parameters(), *graph_module.named_buffers())
            if not tensor.is_inference()  # such tensors count no writes
        ]

    def __enter__(self) -> Attempt:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        written = self.written()
        self.take_back()
        error.add_note(f"raised by {self._name} in {self._method}()")
        if written:
            error.add_note(
                f"written into before, and not restored: {', '.join(written)}. A pass must put new tensors "
                "in the place of the old ones"
            )

    def take_back(self) -> None:
        """Bring the graph module back; its nodes are copies of those that it had."""
        for held, before in self._dicts:
            held.clear()
            held.update(before)
        for options, public in self._options:
            for name in [name for name in options if name[0] != "_" and name not in public]:
                del options[name]
            options.update(public)
        for tensor, requires_grad in self._gradients:
            tensor.requires_grad_(requires_grad)
        self._graph_module.graph = self._graph
        set_steps(self._graph_module, list(self.steps), self.orders)

    def written(self) -> list[str]:
        """The parameters and buffers that were written into since, as far as torch counts (not `.data`)."""
        return [name for name, tensor, version in self._versions if version_of(tensor) != version]

    def check(self, result: object) -> None:
        """Raise a PassError if this is no graph module, or not what the pass promises."""
        where = f"{type(self._pass).__name__}.{self._method}"
        if not isinstance(result, GraphModule):
            raise PassError(f"{where} returned {type(result).__name__}; it has to return the graph module")
        if self._pass.signature != self._signature:
            raise PassError(
                f"{where} changed its own signature, by which its marks are found again; keep results out of "
                "its attributes, or write a property `signature`"
            )
        if self._method == "transform":
            check_promise(self._pass, result, self.steps)

    def changes(self, result: GraphModule) -> list[Edit]:
        """The changes of nodes, and of what modules hold, that made `result` of what there was."""
        before, now = self.states, {node.name: NodeState.of(node) for node in result.graph.nodes}
        nodes = {node.name: node for graph in (result.graph, self._graph) for node in graph.nodes}
        new = [NodeEdit(n, None, now[n], nodes[n].prev.name) for n in now if n not in before]
        changed = [
            NodeEdit(n, before[n], now[n], meta=nodes[n].meta)
            for n in now
            if n in before and before[n].differs(now[n])
        ]
        erased = [
            NodeEdit(n, before[n], None, nodes[n].prev.name, nodes[n].meta) for n in before if n not in now
        ]
        held = dict(_held(result)) if result is self._graph_module else self._held
        places = [place for place in self._held | held if self._held.get(place) is not held.get(place)]
        taken, put = ({place: side.get(place) for place in places} for side in (self._held, held))
        swaps = [Swap(taken, put, None, result.training)] if places else []
        return [*new, *changed, *reversed(erased), *swaps]

    def note(self, result: GraphModule, edits: Sequence[Edit]) -> None:
        """Add the application to the history, if it changed something."""
        standing, inner = self.standing(result)
        before = {node.name for node in self._graph.nodes if self._signature in node.meta.get(MARKS, ())}
        marked = [node.name for node in marked_nodes(result, self._signature) if node.name not in before]
        after, data = fingerprint(result), [as_data(edit, keep=False) for edit in edits]
        if self.written() or (after != self.fingerprint and not edits):
            data.append(Swapped({}, None, False))  # more than is known
        if data or marked or inner:
            step = Step.of(
                self._pass,
                marked,
                sites=len(marked) or 1,
                edits=tuple(data),
                before=self.fingerprint,
                after=after,
                parts=tuple(inner),
            )
            standing.append(step)
        set_steps(result, standing, orders_of(result) or self.orders)

    def standing(self, result: GraphModule) -> tuple[list[Step], list[Step]]:
        """The steps in the record of the result: those of before, and those that were applied inside."""
        present = steps_of(result) or steps_of(self._graph_module)
        earlier = {step.key for step in self.steps}
        return [s for s in present if s.key in earlier], [s for s in present if s.key not in earlier]


def check_promise(pass_: Any, result: GraphModule, steps: Sequence[Step]) -> None:
    """Raise a PassError that names the pass, and those before it, if the result is not what it `ensures`."""
    reason = pass_.ensures(result)
    if not isinstance(reason, str | None):  # False would say that nothing is wrong
        raise PassError(
            f"ensures of {pass_!r} returned {reason!r}: it has to return a text that says what is wrong, or None"
        )
    if reason:
        applied = ", ".join(step.name for step in steps) or "nothing"
        raise PassError(f"{pass_!r} broke its promise: {reason}. Applied before it: {applied}")


def check_apply(pass_: Any, graph_module: GraphModule, steps: Sequence[Step], signature: str) -> None:
    """Raise a PassError if `apply` called another transformation, or changed the signature of its own."""
    if [step.key for step in steps_of(graph_module)] != [step.key for step in steps]:
        raise PassError(
            f"apply of {pass_!r} called another transformation: change the graph through the rewriter alone, or compose "
            "the two"
        )
    if pass_.signature != signature:
        raise PassError(f"apply of {pass_!r} changed its signature; keep results out of its attributes")


def check_unchanged(pass_: Any, graph_module: GraphModule, before: str) -> None:
    """Raise a PassError if `apply` changed the graph, and the rewriter logged nothing; `before` is its fingerprint."""
    if fingerprint(graph_module) != before:
        raise PassError(
            f"apply of {pass_!r} changed the graph by itself, and that stays changed: call the methods of the rewriter, "
            "which can take back what they do"
        )


def found_by(pass_: Any, graph_module: GraphModule) -> list[Any]:
    """All that `match` yields; raise a PassError for what is no node, site or refusal."""
    matched = pass_.match(graph_module)
    found = list(matched) if isinstance(matched, Iterable) else [matched]
    wrong = [type(each).__name__ for each in found if not isinstance(getattr(each, "node", each), Node)]
    if wrong:
        raise PassError(
            f"match of {pass_!r} gave a {wrong[0]}: it has to yield nodes, objects with an attribute `node`, and refusals"
        )
    return found


def nodes_of(pass_: Any, made: Any) -> list[Node]:
    """The nodes that `apply` returned; PassError if that is anything else."""
    nodes = made if isinstance(made, Iterable) and not isinstance(made, str) else [made]
    found = [each for each in nodes if each is not None]
    wrong = next((type(each).__name__ for each in found if not isinstance(each, Node)), None)
    if wrong is not None:
        raise PassError(
            f"apply of {pass_!r} returned a {wrong}: it has to return the nodes to mark as transformed, or None"
        )
    return found


def _held(graph_module: GraphModule) -> Iterator[tuple[str, Any]]:
    """Yield the modules, parameters and buffers with their qualified names."""
    for path, module in graph_module.named_modules():
        for held in (modules_of(module), parameters_of(module), buffers_of(module)):
            for name, value in held.items():
                if value is not None and not isinstance(value, PassRecord):
                    yield (f"{path}.{name}" if path else name), value


def _public(module: Any) -> dict[str, Any]:
    """The options of a module: what is in its `__dict__`, without torch's own registries."""
    return {name: value for name, value in vars(module).items() if name[0] != "_"}
