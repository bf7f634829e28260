"""Changes of a graph module as data: changes of nodes, and of modules, parameters and buffers at qualified names."""

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
    """The name of a node, in place of the node in stored arguments; its repr is that of the node."""

    name: str

    def __repr__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True)
class NodeState:
    """A node as data; the nodes among its arguments are `Reference`s.

    Arguments are compared by their repr: 1 differs from 1.0, and nan equals nan.
    """

    op: str
    target: Any
    args: Any
    kwargs: Any

    @classmethod
    def of(cls, node: Any, names: Mapping[Node, str] = types.MappingProxyType({})) -> NodeState:
        """Describe a node, or an object with the fields of a node; `names` overrides the names of nodes among the arguments."""
        name: Any = lambda value: Reference(names.get(value, value.name))  # noqa: E731
        return cls(node.op, node.target, *map_arg((node.args, node.kwargs), name))

    def differs(self, other: NodeState | Node) -> list[str]:
        """The fields in which another node differs from this one."""
        mine, theirs = ((each.op, each.target, repr(each.args), repr(each.kwargs)) for each in (self, other))
        return [name for name, one, two in zip(FIELDS, mine, theirs, strict=True) if one != two]

    def __getstate__(self) -> dict[str, Any]:
        operator = isinstance(self.target, OpOverload)  # torch cannot pickle these
        return {**vars(self), "target": _Operator(str(self.target)) if operator else self.target}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if isinstance(self.target, _Operator):
            vars(self)["target"] = functools.reduce(getattr, self.target.split("."), torch.ops)

    def arguments(self, given: Callable[[str], Any]) -> tuple[Any, Any]:
        """The arguments, with each node replaced by the result of `given` for its name."""

        def found(value: Any) -> Any:
            return given(value.name) if type(value) is Reference else value

        return map_aggregate((self.args, self.kwargs), found)

    def resolved(self, nodes: Mapping[str, Node]) -> dict[str, Any]:
        """The fields, with the nodes of `nodes` in place of the references."""
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
        name: the name of the node.
        before: the node before the change.
        after: the node after the change.
        previous: the name of the node before it in the graph, if it was created or erased.
        meta: the metadata that undo restores.
    """

    name: str
    before: NodeState | None
    after: NodeState | None
    previous: str = ""
    meta: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def fields(self) -> list[str]:
        """The fields that changed: all fields if the node was created or erased."""
        if self.before is None or self.after is None:
            return list(FIELDS)
        return self.before.differs(self.after)


@dataclasses.dataclass(frozen=True)
class Redirect:
    """The uses of one node that became uses of another node.

    Attributes:
        old: the name of the node that was used before the change.
        new: the name of the node that is used after the change.
        users: the names of the nodes whose uses of `old` were redirected.
        kept: the names of the nodes that already used `new` before the change.
        is_replacement: whether the pass made `new` to replace `old`; undo then directs later users of `new` to `old` as well.
    """

    old: str
    new: str
    users: tuple[str, ...]
    kept: tuple[str, ...]
    is_replacement: bool


@dataclasses.dataclass(frozen=True)
class Swap:
    """Modules, parameters and buffers at qualified names before and after a change; None means that the name is free."""

    before: Mapping[str, Any]
    after: Mapping[str, Any]
    restore: Restore | None
    training: bool


@dataclasses.dataclass(frozen=True)
class Swapped:
    """A `Swap` as data.

    Attributes:
        left: a description of the value that the pass left at each qualified name; None if the name was left free.
        restore: computes the earlier values; None if undo is left to a hand-written `reverse`.
        training: the training flag of the graph module.
        made_by: the provenance of the earlier modules that have one, by qualified name.
    """

    left: Mapping[str, Left | None]
    restore: Restore | None
    training: bool
    made_by: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)


Edit = NodeEdit | Redirect | Swap | Swapped


def as_data(edit: Edit, keep: bool = True) -> Edit:
    """Describe a change without its modules and tensors; `keep=False` also drops the data that undo needs."""
    if not isinstance(edit, Swap):
        return edit
    restore = (edit.restore or Keep.of(edit.before, edit.after)) if keep else None
    left = {path: None if value is None else Left.of(value) for path, value in edit.after.items()}
    made_by = {path: found for path, value in edit.before.items() if (found := provenance(value))}
    return Swapped(left, restore, edit.training, made_by)


def renamed(state: NodeState, old: str, new: str) -> NodeState:
    """The state of a node with the references to `old` replaced by references to `new`."""
    arguments = state.arguments(lambda name: Reference(new if name == old else name))
    return NodeState(state.op, state.target, *arguments)


def conflicts(earlier: Iterable[Edit], later: Iterable[Edit]) -> bool:
    """Tell whether later changes depend on earlier ones, so that the later ones have to be undone first."""
    one, other = _Touched(earlier), _Touched(later)
    return not (
        one.sets.isdisjoint(other.sets)
        and one.needs.isdisjoint(other.sets | other.shifts)
        and other.needs.isdisjoint(one.sets | one.shifts)
    )


class _Touched:
    """The aspects that changes touch: pairs of a node name or module path, and the name of an aspect.

    Attributes:
        sets: the aspects that the changes replace.
        shifts: the aspects that they change without excluding other changes: the inputs of a node, the meaning of a value.
        needs: the aspects that must be unchanged when the changes are undone.
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
                self.shifts.update([(edit.new, "value")] if edit.is_replacement else [])
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
        if edit.before and edit.after is None:  # undo inserts it after the same node, with the same inputs
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
    """The name of the target of a node, the same in every process."""
    return target if isinstance(target, str) else ADDRESS.sub("", qualified_name(target))


ADDRESS = re.compile(" at 0x[0-9a-f]+")
"""A memory address in a repr."""


class NodesByName(dict[str, Node]):
    """The nodes of a graph by name."""

    def __missing__(self, name: str) -> Node:
        raise UndoError(
            f"the graph no longer has nodes that the pass made ({name}). Undo the pass before dead code elimination, and "
            "before pickling a graph that was edited by hand"
        )


def check_nodes(graph: Graph, *values: Any) -> None:
    """Raise a PassError if a node among the values is erased or belongs to another graph; undo could not handle such nodes."""

    def checked(node: Node) -> Node:
        if node.graph is not graph or is_erased(node):
            why = "was erased" if is_erased(node) else "is of another graph"
            raise PassError(f"a pass gives its rewriter the node {node.name}, which {why}")
        return node

    map_arg(values, checked)
