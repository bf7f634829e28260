"""The record of the passes on a graph module, which survives copies and pickles.

Marks are in `node.meta`, which a deepcopy keeps and a pickle drops. Steps are in a child module without parameters,
which both keep. When the child module is pickled, it also stores the nodes and their marks.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import pickle
import uuid
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxopt.errors import PassError, UndoError, error_text
from fxopt.graph import origin_of
from fxopt.rewriting.edits import Edit, NodeEdit, NodeState, picklable, target_text
from fxopt.torch_internals import modules_of, used_names

RECORD = "fxopt_record"
"""The name of the child module that carries the record."""

MARKS = "fxopt_marks"
"""The key of `node.meta` with the signatures of the passes that transformed the node."""

_hidden: Any = functools.partial(dataclasses.field, repr=False, compare=False)


@dataclasses.dataclass(frozen=True)
class Step:
    """One application of a transformation.

    Attributes:
        name: the repr of the transformation, with its options.
        signature: `Transformation.signature`.
        nodes: the number of nodes that it marked as transformed.
        reversible: whether the step can be undone.
        sites: the number of sites that it rewrote; 1 if it has no sites but changed something.
        edits: its changes, oldest first; None if a pickle lost them.
        before: the fingerprint of the graph module before the step.
        after: the fingerprint of the graph module after the step.
        marked: the names of the nodes that it marked.
        within: the signatures of the compositions that applied it as a part.
        parts: the steps of other transformations that it applied inside its own.
        by_hand: whether the transformation has a hand-written `transform`, and so a hand-written `reverse`.
        transformation: the instance; after unpickling, its pickle, or `None` if it could not be pickled.
        key: a random key that identifies the step, also in copies of the graph module.
    """

    name: str
    signature: str
    nodes: int
    reversible: bool
    sites: int = _hidden(default=0)
    edits: tuple[Edit, ...] | None = _hidden(default=())
    before: str = _hidden(default="")
    after: str = _hidden(default="")
    marked: tuple[str, ...] = _hidden(default=())
    within: tuple[str, ...] = _hidden(default=())
    parts: tuple[Step, ...] = _hidden(default=())
    by_hand: bool = _hidden(default=True)
    transformation: Any = _hidden(default=None)  # noqa: RUF009 - it makes a field
    key: str = _hidden(default_factory=lambda: uuid.uuid4().hex)

    def load(self) -> Any:
        """Return the transformation that was applied.

        Raises:
            UndoError: the transformation was not pickled with the graph module, or cannot be unpickled.
        """
        if not isinstance(self.transformation, bytes | None):
            return self.transformation
        why = "it was not pickled or saved with the graph module (fxopt.save takes its class in `trusted`)"
        try:
            if self.transformation is not None:
                return pickle.loads(self.transformation)
        except Exception as error:  # the class of a user may be gone, or raise anything
            why = f"it cannot be unpickled ({error_text(error)})"
        raise UndoError(f"{self.name} is not known here: {why}. Undo it with {self.name}(gm, reverse=True)")

    def __getstate__(self) -> dict[str, Any]:
        pickled = self.transformation
        if not isinstance(pickled, bytes | None):
            pickled = pickle.dumps(pickled) if picklable(pickled) else None
        # Other metadata, such as fake tensors, means nothing in another process.
        edits = self.edits and tuple(
            dataclasses.replace(edit, meta=origin_of(edit)) if isinstance(edit, NodeEdit) else edit
            for edit in self.edits
        )
        # A transformation must not make the graph module unpicklable.
        return {**self.__dict__, "transformation": pickled, "edits": edits if picklable(edits) else None}


@dataclasses.dataclass(frozen=True)
class _NodeFact:
    """A node as it was when the graph module was pickled; its target is stored by name."""

    name: str
    state: NodeState
    marks: tuple[str, ...]

    @classmethod
    def of(cls, node: Node) -> _NodeFact:
        state = dataclasses.replace(NodeState.of(node), target=_target_name(node))
        return cls(node.name, state, node.meta.get(MARKS, ()))


class PassRecord(torch.nn.Module):
    """The record of a graph module: a child module without parameters.

    Attributes:
        steps: the steps that were applied and not undone, oldest first.
        orders: the earlier names of parameters, buffers and children, by the path of each module where passes changed them.
        facts: after unpickling, the nodes as they were.
        owner: the graph module.
    """

    steps: list[Step]
    orders: dict[str, list[str]]
    facts: list[_NodeFact] | None
    owner: GraphModule | None

    def __init__(self, training: bool) -> None:
        super().__init__()
        self.training = training
        self.steps, self.orders, self.facts, self.owner = [], {}, None, None

    def __setattr__(self, name: str, value: Any) -> None:
        # `nn.Module.__setattr__` would register the owner as a child of its own child.
        self.__dict__[name] = value

    def __deepcopy__(self, memo: dict[int, Any]) -> PassRecord:
        copied = PassRecord(self.training)
        copied.steps, copied.orders, copied.facts = list(self.steps), self.orders, self.facts
        copied.owner = memo.get(id(self.owner))
        return copied

    def __getstate__(self) -> dict[str, Any]:
        facts = self.facts
        if facts is None and self.owner is not None:
            facts = [_NodeFact.of(node) for node in self.owner.graph.nodes]
        return {**self.__dict__, "owner": None, "facts": facts if picklable(facts) else []}

    def extra_repr(self) -> str:
        return f"{len(self.steps)} steps"


def find_record(graph_module: GraphModule) -> PassRecord | None:
    """Find the record of `graph_module`, if it has one, and restore the marks of nodes that a pickle dropped."""
    record = modules_of(graph_module).get(RECORD)
    if not isinstance(record, PassRecord):
        return None
    record.owner = graph_module
    if record.facts is not None:
        facts, record.facts = record.facts, None
        _restore_nodes(graph_module, facts)
    return record


def steps_of(graph_module: GraphModule) -> list[Step]:
    """List the steps that were applied to a graph module and not undone, oldest first."""
    record = find_record(graph_module)
    return list(record.steps) if record else []


def orders_of(graph_module: GraphModule) -> dict[str, list[str]]:
    """The earlier names of parameters, buffers and children, by the path of each module where passes changed them."""
    record = find_record(graph_module)
    return record.orders if record else {}


def set_steps(graph_module: GraphModule, steps: list[Step], orders: dict[str, list[str]]) -> None:
    """Replace the steps and orders of the record; without steps, the record is removed."""
    record = find_record(graph_module)
    if steps:
        if record is None:
            if hasattr(graph_module, RECORD):
                raise PassError(
                    f"the graph module has an attribute {RECORD!r}, a name that fxopt needs: rename it"
                )
            record = PassRecord(graph_module.training)
            record.owner = graph_module
            graph_module.add_module(RECORD, record)
        record.steps, record.orders = steps, orders
    elif record:
        delattr(graph_module, RECORD)


def marked_nodes(graph_module: GraphModule, signature: str) -> list[Node]:
    """The nodes with the mark of a pass, in graph order."""
    find_record(graph_module)
    return [node for node in graph_module.graph.nodes if signature in node.meta.get(MARKS, ())]


def mark(node: Node, signature: str) -> None:
    """Mark a node as transformed by a pass."""
    marks = node.meta.get(MARKS, ())
    if signature not in marks:
        node.meta[MARKS] = (*marks, signature)  # a new tuple: copies of a node share the old one


def unmark(node: Node, signature: str) -> None:
    """Remove the mark of a pass from a node."""
    marks = tuple(mark for mark in node.meta.get(MARKS, ()) if mark != signature)
    if marks:
        node.meta[MARKS] = marks
    else:
        node.meta.pop(MARKS, None)


def _restore_nodes(graph_module: GraphModule, facts: list[_NodeFact]) -> None:
    """Restore the names, arguments and marks that nodes had before a pickle, by position.

    Unpickling a graph module traces its code again, which renames nodes and spells out default arguments. If the traced
    nodes do not match the stored ones, for example after edits by hand, they stay unchanged, and undo raises.
    """
    nodes = list(graph_module.graph.nodes)
    if [(fact.state.op, fact.state.target) for fact in facts] != [(n.op, _target_name(n)) for n in nodes]:
        return
    by_name = {fact.name: node for fact, node in zip(facts, nodes, strict=True)}
    for fact, node in zip(facts, nodes, strict=True):
        if {by_name[name] for name in fact.state.references()} != {*node.all_input_nodes}:
            return
    names = used_names(graph_module.graph)
    names.difference_update(node.name for node in nodes)
    names.update(by_name)
    for fact, node in zip(facts, nodes, strict=True):
        node.name = fact.name
        if fact.marks:
            node.meta[MARKS] = fact.marks
        if _spells_out(NodeState.of(node), fact.state):
            state = fact.state.resolved(by_name)
            node.args, node.kwargs = state["args"], state["kwargs"]


def _spells_out(now: NodeState, before: NodeState) -> bool:
    """Tell whether a call differs from the earlier call only by spelled-out default arguments."""
    try:
        parameters = inspect.signature(now.target).parameters
        taken, was = (dict(zip(parameters, s.args, strict=False)) | dict(s.kwargs) for s in (now, before))
    except (TypeError, ValueError):  # not a Python function: torch.fx spells out nothing
        return False
    given = {name: each.default for name, each in parameters.items()} | was
    alike = (repr(value) == repr(given[name]) for name, value in taken.items() if name in given)
    return was.keys() <= taken.keys() and all(alike)


def _target_name(node: Node) -> str:
    # A pickle may change the targets of placeholders and outputs, but not those of functions and modules.
    return "" if node.op in ("placeholder", "output") else target_text(node.target)
