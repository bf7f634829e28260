"""What passes did to a graph module, kept where copies and pickles keep it.

Marks live in `node.meta`, which a deepcopy keeps and a pickle drops. So they are also kept, by position, in
a child module without parameters (`PassRecord`), which a pickle keeps.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import pickle
import re
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node

from fxopt.errors import PassError, UndoError

RECORD = "fxopt_record"
"""The name of the child module that carries marks and undo data."""

MARKS = "fxopt_marks"
ROLES = "fxopt_roles"
"""Keys of `node.meta`: signatures of the passes that transformed the node, and its roles in their sites."""


@dataclasses.dataclass(frozen=True)
class Step:
    """One application of a transformation.

    Attributes:
        name: the transformation as it is written, with its options.
        signature: the same as `Transformation.signature`.
        nodes: how many nodes it marked as transformed.
        reversible: whether it can be undone.
        sites: the numbers of its entries in the record; of fxopt's own passes only.
        transformation: the instance, or, out of a pickle, its pickle (`None`: it could not be pickled).
    """

    name: str
    signature: str
    nodes: int
    reversible: bool
    sites: frozenset[int] = dataclasses.field(default=frozenset(), repr=False)
    transformation: Any = dataclasses.field(default=None, repr=False, compare=False)

    def load(self) -> Any:
        """The transformation that was applied.

        Raises:
            UndoError: it did not survive a pickle.
        """
        if not isinstance(self.transformation, bytes | None):
            return self.transformation
        why = "it could not be pickled together with the graph module"
        try:
            if self.transformation is not None:
                return pickle.loads(self.transformation)
        except Exception as error:  # the class of a user may be gone, or raise anything
            why = f"it cannot be unpickled ({type(error).__name__}: {error})"
        raise UndoError(f"{self.name} is not known here: {why}. Undo it with {self.name}(gm, reverse=True)")

    def __deepcopy__(self, memo: dict[int, Any]) -> Step:
        return self

    def __getstate__(self) -> dict[str, Any]:
        pickled = self.transformation
        if not isinstance(pickled, bytes | None):
            try:
                pickled = pickle.dumps(pickled)
            except Exception:  # a graph module must not become unpicklable by what a user passed to a pass
                pickled = None
        return {**self.__dict__, "transformation": pickled}


class PassRecord(torch.nn.Module):
    """What passes did to a graph module, as data; it rides along as a child module without parameters.

    Attributes:
        steps: what was applied and not undone, oldest first.
        entries: what each rewritten site needs to be undone (`fxopt.rewrite.Entry`), oldest first.
        orders: the names of the children that a module had before, where passes added or removed some, by path.
        facts: for each node of the graph, in order, what it is and how it is marked.
        unpickled: the marks in `node.meta` may be gone and have to be read from `facts`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.entries: list[Any] = []
        self.orders: dict[str, list[str]] = {}
        self.facts: list[_NodeFact] = []
        self.unpickled = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "unpickled": True}

    def extra_repr(self) -> str:
        return f"{len(self.entries)} rewritten sites"


def find_record(graph_module: GraphModule) -> PassRecord | None:
    """The record of `graph_module`, if it has one."""
    record = graph_module._modules.get(RECORD)
    return record if isinstance(record, PassRecord) else None


def make_record(graph_module: GraphModule) -> PassRecord:
    """The record of `graph_module`, made if it has none."""
    record = find_record(graph_module)
    if record is None:
        if hasattr(graph_module, RECORD):
            raise PassError(
                f"the graph module has an attribute {RECORD!r}, a name that fxopt needs: rename it"
            )
        record = PassRecord()
        graph_module.add_module(RECORD, record)
    return record


def carry_record(source: GraphModule, result: GraphModule) -> None:
    """Give a module that was made from `source`, and has no record, the record of `source`."""
    record = find_record(source)
    if record is not None and find_record(result) is None:
        carried = make_record(result)
        carried.steps, carried.entries = list(record.steps), list(record.entries)
        carried.orders = record.orders


def marks_of(node: Node) -> dict[str, Any]:
    """What `node.meta` keeps of passes: marks and roles."""
    return {key: node.meta[key] for key in (MARKS, ROLES) if key in node.meta}


def restore_marks(graph_module: GraphModule) -> None:
    """Put the marks that a pickle dropped back on the nodes, by position.

    When the graph was edited after its last pass and then pickled, positions prove nothing: the nodes stay
    without marks, and undoing raises.
    """
    record = find_record(graph_module)
    if record is None or not record.unpickled:
        return
    record.unpickled = False
    nodes = list(graph_module.graph.nodes)
    if any(MARKS in node.meta or ROLES in node.meta for node in nodes):
        return  # a deepcopy: the marks are all there
    if [fact.kind for fact in record.facts] != [_kind(node) for node in nodes]:
        return
    namespace = graph_module.graph._graph_namespace
    # fx's pickle traces the code again, and so renames nodes.
    renamed = [(n, fact.name) for n, fact in zip(nodes, record.facts, strict=True) if n.name != fact.name]
    namespace._used_names.difference_update(node.name for node, _ in renamed)
    for node, name in renamed:
        namespace.create_name(name, None)  # reserves it
        node.name = name
    for node, fact in zip(nodes, record.facts, strict=True):
        node.meta.update(fact.meta)


def store_marks(graph_module: GraphModule) -> None:
    """Write the marks of all nodes to the record, and drop a record that has nothing left to say."""
    nodes = list(graph_module.graph.nodes)
    record = find_record(graph_module)
    marked = any(MARKS in node.meta or ROLES in node.meta for node in nodes)
    if marked or (record is not None and record.steps):
        make_record(graph_module).facts = [_NodeFact.of(node) for node in nodes]
    elif record is not None and not record.entries:
        delattr(graph_module, RECORD)


class Snapshot:
    """A graph module as it is now: a copy of its graph, and what its modules hold, without copying tensors."""

    def __init__(self, graph_module: GraphModule) -> None:
        restore_marks(graph_module)  # or else a copy made after a pickle would have none
        self.graph_module = graph_module
        try:
            self._graph = copy.deepcopy(graph_module.graph)
        except KeyError:  # a node before what it reads: the graph was invalid already, and linting says so
            self._graph = graph_module.graph
        self._held: list[tuple[dict[str, Any], dict[str, Any]]] = [
            (cast(dict[str, Any], registry), dict(registry))
            for module in graph_module.modules()
            for registry in (module._modules, module._parameters, module._buffers)
        ]
        self._attributes = [
            (vars(module), _public(vars(module)))
            for module in graph_module.modules()
            if not isinstance(module, PassRecord)
        ]
        self._versions = [
            (name, tensor, tensor._version)
            for name, tensor in (*graph_module.named_parameters(), *graph_module.named_buffers())
            if not tensor.is_inference()  # such tensors count no writes
        ]
        record = find_record(graph_module)
        self.steps = [] if record is None else list(record.steps)
        self.entries = [] if record is None else list(record.entries)
        self._record = None if record is None else (record, list(record.facts), record.orders)

    def restore(self) -> None:
        """Bring the graph module back; its nodes are copies of those that it had."""
        for registry, held in self._held:
            registry.clear()
            registry.update(held)
        for attributes, public in self._attributes:
            for name in _public(attributes).keys() - public.keys():
                del attributes[name]
            attributes.update(public)
        if self._record is not None:
            record, facts, orders = self._record
            record.facts, record.orders = facts, orders
            record.steps, record.entries = self.steps, self.entries
        self.graph_module.graph = self._graph

    def written(self) -> list[str]:
        """The parameters and buffers that were written into since, as far as torch counts (not `.data`)."""
        return [name for name, tensor, version in self._versions if tensor._version != version]

    def marked(self, signature: str) -> int:
        """How many nodes had the mark of a pass."""
        return sum(signature in node.meta.get(MARKS, ()) for node in self._graph.nodes)

    def is_like(self, graph_module: GraphModule) -> bool:
        """Whether it is this module, with the same nodes, modules and tensors, and nothing was written since."""
        nodes, copies = graph_module.graph.nodes, self._graph.nodes
        return (
            graph_module is self.graph_module
            and len(nodes) == len(copies)
            and all(_content(old) == _content(new) for old, new in zip(nodes, copies, strict=True))
            and all(_same_items(registry, held) for registry, held in self._held)
            and all(_same_items(_public(attributes), public) for attributes, public in self._attributes)
            and not self.written()
        )


def _same_items(registry: Mapping[str, Any], held: Mapping[str, Any]) -> bool:
    same_names = list(registry) == list(held)
    return same_names and all(_is_same(registry[name], value) for name, value in held.items())


def _is_same(left: Any, right: Any) -> bool:
    is_plain = type(left) is type(right) and isinstance(left, bool | int | float | str)
    return left is right or (is_plain and left == right)


def _public(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a module: what is in its `__dict__`, without torch's own registries."""
    return {name: value for name, value in attributes.items() if not name.startswith("_")}


def _content(node: Node) -> tuple[Any, ...]:
    arguments = torch.fx.node.map_arg((node.args, node.kwargs), lambda value: value.name)
    return node.name, node.op, node.target, arguments


@dataclasses.dataclass(frozen=True)
class _NodeFact:
    """A node's name, its kind (what must agree for its position to be trusted) and its marks."""

    name: str
    kind: tuple[str, str]
    meta: dict[str, Any]

    @classmethod
    def of(cls, node: Node) -> _NodeFact:
        return cls(node.name, _kind(node), marks_of(node))


def _kind(node: Node) -> tuple[str, str]:
    # The name of a placeholder or an output may change in a pickle; those of functions and modules do not.
    if node.op in ("placeholder", "output"):
        return node.op, ""
    return node.op, node.target if isinstance(node.target, str) else stable_text(node.target)


def stable_text(value: object) -> str:
    """A text for `value` that is the same in every process: no address, no order of a set."""
    signature = getattr(value, "signature", None)
    if isinstance(signature, str):
        return signature  # a transformation inside another
    if isinstance(value, type):
        return class_name(value)
    if isinstance(value, enum.Enum):
        return f"{class_name(type(value))}.{value.name}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(sorted(f"{stable_text(k)}: {stable_text(v)}" for k, v in value.items())) + "}"
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(stable_text(item) for item in value)) + "}"
    if isinstance(value, list | tuple):
        return "(" + ", ".join(stable_text(item) for item in value) + ")"
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{getattr(value, '__module__', None)}.{value.__qualname__}"
    if type(value).__repr__ is object.__repr__ and hasattr(value, "__dict__"):
        return f"{class_name(type(value))}({stable_text(vars(value))})"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def class_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
