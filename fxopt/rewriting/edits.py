"""Changes of a graph module as data: what a pass did to nodes, and to what stands at qualified names."""

from __future__ import annotations

import dataclasses
import functools
import io
import pickle
import re
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate, map_arg

from fxopt.errors import PassError, UndoError
from fxopt.objects import qualified_name
from fxopt.rewriting.weights import Keep, Left, Restore, provenance
from fxopt.submodules import prefixes
from fxopt.torch_internals import OpOverload, is_erased

FIELDS = ("op", "target", "args", "kwargs")


@dataclasses.dataclass(frozen=True, slots=True)
class Reference:
    """A node, by name, inside the stored arguments of another; it reads like the node."""

    name: str

    def __repr__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True)
class NodeState:
    """A node as data; the nodes among its arguments are `Reference`s.

    Arguments are compared by what they read like: 1 is not 1.0, and nan is nan.
    """

    op: str
    target: Any
    args: Any
    kwargs: Any

    @classmethod
    def of(cls, node: Any, names: Mapping[Node, str] = types.MappingProxyType({})) -> NodeState:
        """Describe a node, or what has its fields; `names` are other names of nodes."""
        name: Any = lambda value: Reference(names.get(value, value.name))  # noqa: E731
        return cls(node.op, node.target, *map_arg((node.args, node.kwargs), name))

    def differs(self, other: NodeState | Node) -> list[str]:
        """The fields in which a node is not as this one."""
        same = {"op": self.op == other.op, "target": self.target == other.target}
        same["args"] = repr(self.args) == repr(other.args)
        same["kwargs"] = repr(self.kwargs) == repr(other.kwargs)
        return [name for name in FIELDS if not same[name]]

    def __getstate__(self) -> dict[str, Any]:
        operator = isinstance(self.target, OpOverload)  # which torch cannot pickle
        return {**vars(self), "target": _Operator(str(self.target)) if operator else self.target}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if isinstance(self.target, _Operator):
            vars(self)["target"] = functools.reduce(getattr, self.target.split("."), torch.ops)

    def arguments(self, given: Callable[[str], Any]) -> tuple[Any, Any]:
        """The arguments, with what `given` returns for its name in the place of each node."""

        def found(value: Any) -> Any:
            return given(value.name) if type(value) is Reference else value

        return map_aggregate((self.args, self.kwargs), found)

    def resolved(self, nodes: Mapping[str, Node]) -> dict[str, Any]:
        """The fields, with the nodes themselves among the arguments."""
        args, kwargs = self.arguments(nodes.__getitem__)
        return {"op": self.op, "target": self.target, "args": args, "kwargs": kwargs}

    def references(self) -> list[str]:
        """The names of the nodes among the arguments."""
        found: list[str] = []
        self.arguments(found.append)
        return found


class _Operator(str):
    """The name of an operator below `torch.ops`, with its overload."""


@dataclasses.dataclass(frozen=True)
class NodeEdit:
    """A node that was created (`before` is None), erased (`after` is None) or changed.

    Attributes:
        name: of the node.
        before: the node as it was.
        after: the node as it was left.
        previous: the name of the node in front of it, where it was created or erased.
        meta: the metadata that undo gives back.
    """

    name: str
    before: NodeState | None
    after: NodeState | None
    previous: str = ""
    meta: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def fields(self) -> list[str]:
        """The fields that changed: all of them, where the node is new or gone."""
        if self.before is None or self.after is None:
            return list(FIELDS)
        return self.before.differs(self.after)


@dataclasses.dataclass(frozen=True)
class Redirect:
    """The uses of one node that became uses of another.

    Attributes:
        old: the name of the node that was used.
        new: the name of the node that is used now.
        users: the names of the nodes that used `old`.
        kept: the names of the nodes that used `new` before.
        stands_in: whether `new` was made to stand for `old`, so that whoever uses it later means `old`, too.
    """

    old: str
    new: str
    users: tuple[str, ...]
    kept: tuple[str, ...]
    stands_in: bool


@dataclasses.dataclass(frozen=True)
class Swap:
    """Modules, parameters and buffers at qualified names, and those that took their place; None stands for nothing."""

    before: Mapping[str, Any]
    after: Mapping[str, Any]
    restore: Restore | None
    training: bool


@dataclasses.dataclass(frozen=True)
class Swapped:
    """A `Swap` as data.

    Attributes:
        left: what was left at each qualified name; None for nothing.
        restore: makes what stood there before; None where undo is left to a hand-written `reverse`.
        training: the training flag of the graph module.
        made_by: the provenance of the modules that stood there, where they have one.
    """

    left: Mapping[str, Left | None]
    restore: Restore | None
    training: bool
    made_by: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)


Edit = NodeEdit | Redirect | Swap | Swapped


def as_data(edit: Edit, keep: bool = True) -> Edit:
    """A change without objects; where `keep` is off, also without what undo needs of them."""
    if not isinstance(edit, Swap):
        return edit
    restore = (edit.restore or Keep.of(edit.before, edit.after)) if keep else None
    left = {path: None if value is None else Left.of(value) for path, value in edit.after.items()}
    made_by = {path: found for path, value in edit.before.items() if (found := provenance(value))}
    return Swapped(left, restore, edit.training, made_by)


def renamed(state: NodeState, old: str, new: str) -> NodeState:
    """The state of a node that takes the value of another node."""
    arguments = state.arguments(lambda name: Reference(new if name == old else name))
    return NodeState(state.op, state.target, *arguments)


def conflicts(earlier: Iterable[Edit], later: Iterable[Edit]) -> bool:
    """Tell whether later changes stand on earlier ones, so that these cannot be undone before them."""
    one, other = _Touched(earlier), _Touched(later)
    return not (
        one.sets.isdisjoint(other.sets)
        and one.needs.isdisjoint(other.sets | other.shifts)
        and other.needs.isdisjoint(one.sets | one.shifts)
    )


class _Touched:
    """The places that changes touch: pairs of the name of a node, or the path of a module, and an aspect of it.

    Attributes:
        sets: what they set, in the place of what was there.
        shifts: what they change in a way that leaves room for others: which inputs a node has, what a value means.
        needs: what must be as they left it when they are undone.
    """

    def __init__(self, edits: Iterable[Edit]) -> None:
        self.sets: set[tuple[str, str]] = set()
        self.shifts: set[tuple[str, str]] = set()
        self.needs: set[tuple[str, str]] = set()
        for edit in edits:
            if isinstance(edit, NodeEdit):
                self._enter(edit)
            elif isinstance(edit, Redirect):
                self.shifts.update((user, "inputs") for user in edit.users)
                self.shifts.update([(edit.new, "value")] if edit.stands_in else [])
                self.needs.update([(edit.old, "exists"), (edit.new, "exists")])
            else:
                for path in edit.left if isinstance(edit, Swapped) else edit.after:
                    self.sets.add((path, "module"))
                    self.shifts.update((prefix, "part") for prefix in prefixes(path))
        self.needs -= self.sets

    def _enter(self, edit: NodeEdit) -> None:
        self.sets.update((edit.name, field) for field in edit.fields)
        if not {"args", "kwargs"}.isdisjoint(edit.fields):
            self.needs.add((edit.name, "inputs"))
        for state in filter(None, (edit.before, edit.after)):
            self.needs.update((name, "exists") for name in state.references())
            if "target" in edit.fields and state.op in ("call_module", "get_attr"):
                self.needs.update((prefix, "module") for prefix in prefixes(state.target))
                self.needs.update([(state.target, "part")] if state is edit.before else [])
        if edit.before is None or edit.after is None:
            self.sets.add((edit.name, "exists"))
        elif edit.meta:
            self.shifts.add((edit.name, "value"))
            self.needs.add((edit.name, "exists"))
        if edit.before and edit.after is None:  # it comes back behind the same node, of the same values
            self.sets.add((edit.previous, "next"))
            self.needs.add((edit.previous, "exists"))
            aspects = ("value", *FIELDS)
            self.needs.update((name, aspect) for name in edit.before.references() for aspect in aspects)


def picklable(value: Any) -> bool:
    """Tell whether a value can be pickled, without pickling the weights in it."""
    try:
        _WithoutWeights(io.BytesIO()).dump(value)
    except Exception:  # a class of a user may raise anything
        return False
    return True


class _WithoutWeights(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return pickle.dumps(type(value)) if isinstance(value, Tensor | nn.Module) else None


@functools.lru_cache(maxsize=4096)
def target_text(target: Any) -> str:
    """The name of what a node calls, the same in every process."""
    return target if isinstance(target, str) else ADDRESS.sub("", qualified_name(target))


ADDRESS = re.compile(" at 0x[0-9a-f]+")
"""Where a repr names a place in memory."""


class NodesByName(dict[str, Node]):
    """The nodes of a graph by name."""

    def __missing__(self, name: str) -> Node:
        raise UndoError(
            f"nodes that it made are gone from the graph ({name}). Undo it before dead code elimination, and "
            "before pickling a graph that was edited by hand"
        )


def check_nodes(graph: Graph, *values: Any) -> None:
    """Raise a PassError where a node is not one of this graph: only what is in it can be changed and taken back."""

    def checked(node: Node) -> Node:
        if node.graph is not graph or is_erased(node):
            why = "was erased" if is_erased(node) else "is of another graph"
            raise PassError(f"a pass gives its rewriter the node {node.name}, which {why}")
        return node

    map_arg(values, checked)
