"""The record of passes on a graph module, kept where copies and pickles keep it.

Marks live in `node.meta`, which a deepcopy keeps and a pickle drops, and steps in a child module without
parameters, which both keep. When it is pickled, it also writes down the nodes and their marks.
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
from fxopt.rewriting.edits import Edit, NodeEdit, NodeState, Swapped, picklable, target_text
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
        name: the transformation as it is written, with its options.
        signature: the same as `Transformation.signature`.
        nodes: how many nodes it marked as transformed.
        reversible: whether it can be undone.
        sites: how many sites it rewrote; 1 where it has no sites but changed something.
        edits: what it changed, oldest first; None where that did not survive a pickle.
        before: the fingerprint of the graph module before it.
        after: the fingerprint after it.
        marked: the names of the nodes that it marked.
        within: the signatures of the compositions that it was a part of.
        parts: the applications of other transformations that were a part of it.
        by_hand: whether its transformation has a `transform` of its own, and so a `reverse`.
        transformation: the instance, or, out of a pickle, its pickle (`None`: it could not be pickled).
        key: tells it from other applications, also in copies.
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

    @property
    def logged(self) -> bool:
        """True where its changes are known so well that playing them back undoes it."""
        edits = self.edits or ()
        return bool(edits) and all(e.restore for e in edits if isinstance(e, Swapped))

    def load(self) -> Any:
        """The transformation that was applied.

        Raises:
            UndoError: it did not survive a pickle.
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
        # A graph module must not become unpicklable by what was applied to it.
        return {**self.__dict__, "transformation": pickled, "edits": edits if picklable(edits) else None}


@dataclasses.dataclass(frozen=True)
class _NodeFact:
    """A node as it was when the graph module was pickled, with the name of what it calls for its target."""

    name: str
    state: NodeState
    marks: tuple[str, ...]

    @classmethod
    def of(cls, node: Node) -> _NodeFact:
        state = dataclasses.replace(NodeState.of(node), target=_target_name(node))
        return cls(node.name, state, node.meta.get(MARKS, ()))


class PassRecord(torch.nn.Module):
    """The record of a graph module; it rides along as a child module without parameters.

    Attributes:
        steps: what was applied and not undone, oldest first.
        orders: the names of the parameters, buffers and children that a module had before, where passes added or removed some, by path.
        facts: out of a pickle, the nodes as they were.
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
        # Not as a module does it, which would make the graph module a child of its child.
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
    """The record of `graph_module`, if it has one; marks that a pickle dropped are back on the nodes then."""
    record = modules_of(graph_module).get(RECORD)
    if not isinstance(record, PassRecord):
        return None
    record.owner = graph_module
    if record.facts is not None:
        facts, record.facts = record.facts, None
        _restore_nodes(graph_module, facts)
    return record


def steps_of(graph_module: GraphModule) -> list[Step]:
    """The applications to a graph module that were not undone, oldest first."""
    record = find_record(graph_module)
    return list(record.steps) if record else []


def orders_of(graph_module: GraphModule) -> dict[str, list[str]]:
    """The names of the children that a module had before passes added or removed some, by path."""
    record = find_record(graph_module)
    return record.orders if record else {}


def set_steps(graph_module: GraphModule, steps: list[Step], orders: dict[str, list[str]]) -> None:
    """Write down what was applied; a record that has nothing to say goes."""
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
    """Write on a node that a pass transformed it."""
    marks = node.meta.get(MARKS, ())
    if signature not in marks:
        node.meta[MARKS] = (*marks, signature)  # a new tuple: copies of a node share the old one


def unmark(node: Node, signature: str) -> None:
    """Take the mark of a pass off a node."""
    marks = tuple(mark for mark in node.meta.get(MARKS, ()) if mark != signature)
    if marks:
        node.meta[MARKS] = marks
    else:
        node.meta.pop(MARKS, None)


def _restore_nodes(graph_module: GraphModule, facts: list[_NodeFact]) -> None:
    """Give nodes the names, arguments and marks that they had before a pickle, by position.

    fx's pickle traces the code again, and so renames nodes and writes defaults out. When the graph was edited
    after its last pass and then pickled, positions prove nothing: the nodes stay as they are, and undoing raises.
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
    """Tell whether a call is what it was before, with options written out that had been left to their defaults."""
    try:
        parameters = inspect.signature(now.target).parameters
        taken, was = (dict(zip(parameters, s.args, strict=False)) | dict(s.kwargs) for s in (now, before))
    except (TypeError, ValueError):  # no function of Python: torch.fx writes nothing out
        return False
    given = {name: each.default for name, each in parameters.items()} | was
    alike = (repr(value) == repr(given[name]) for name, value in taken.items() if name in given)
    return was.keys() <= taken.keys() and all(alike)


def _target_name(node: Node) -> str:
    # The name of a placeholder or an output may change in a pickle; those of functions and modules do not.
    return "" if node.op in ("placeholder", "output") else target_text(node.target)
