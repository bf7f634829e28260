"""Snapshots of a graph module, to find later changes and to roll them back."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fxopt.errors import PassError
from fxopt.graph import grouped
from fxopt.memory import storage_of
from fxopt.rewriting.edits import Edit, NodeEdit, NodeState, Redirect, Swap, renamed
from fxopt.rewriting.record import RECORD, PassRecord, orders_of, set_steps, steps_of
from fxopt.submodules import find, is_inside
from fxopt.torch_internals import (
    BUFFERS,
    MODULES,
    NON_PERSISTENT,
    PARAMETERS,
    TorchDispatchMode,
    is_erased,
    name_counts,
    pytree,
    root_of,
    used_names,
    written_arguments,
)


class _Row(NamedTuple):
    """A node, and its fields at the time of the snapshot."""

    node: Node
    name: str
    op: str
    target: Any
    args: Any
    kwargs: Any
    type: Any
    meta: dict[str, Any]

    @classmethod
    def of(cls, node: Node) -> _Row:
        return cls(node, node.name, node.op, node.target, node.args, node.kwargs, node.type, dict(node.meta))

    def is_unchanged(self) -> bool:
        """Tell whether the node is certainly unchanged: torch.fx creates new argument objects when it changes arguments."""
        node = self.node
        return node.args is self.args and node.kwargs is self.kwargs and node.target is self.target


_TABLES = (MODULES, PARAMETERS, BUFFERS)
_KEPT = (*_TABLES, NON_PERSISTENT, *(name for name in vars(nn.Module()) if name.endswith("_hooks")))
"""The attributes of a module in which torch keeps submodules, parameters, buffers and hooks."""


_ABSENT = object()


class _Module(NamedTuple):
    """A module, with its attributes and the contents of its registries at the time of the snapshot."""

    path: str
    module: nn.Module
    kind: type
    attributes: dict[str, Any]
    contents: dict[str, Any]

    @classmethod
    def of(cls, path: str, module: nn.Module) -> _Module:
        attributes = dict(vars(module))
        # Registries of scripted modules are not dicts, but views of C++ objects. Empty ones are not copied: many objects
        # slow down the garbage collector.
        kept = ((name, attributes.get(name)) for name in _KEPT)
        contents = {name: each.copy() for name, each in kept if each and isinstance(each, dict | set)}
        return cls(path, module, type(module), attributes, contents)

    def held(self) -> Iterator[tuple[str, Any]]:
        """Yield the modules, parameters and buffers that the module held, by qualified name."""
        for table in _TABLES:
            for name, value in self.contents.get(table, {}).items():
                if value is not None and not isinstance(value, PassRecord):
                    yield self.place(name), value

    def place(self, name: str) -> str:
        """The qualified name of an attribute."""
        return f"{self.path}.{name}" if self.path else name

    def changes(self) -> Iterator[str]:
        """Yield the qualified names of changed modules, parameters and buffers, and a text for each other change."""
        now, owner = vars(self.module), self.path or "the graph module"
        if type(self.module) is not self.kind:  # parametrizations set it
            yield f"the class of {owner}"
        for name in _KEPT:
            held, before = now.get(name), self.contents.get(name, {})
            held = held if isinstance(held, dict) else {}
            if name in _TABLES and not _same(held, before):
                keys = (key for key in {**before, **held} if held.get(key) is not before.get(key))
                yield from (self.place(key) for key in keys if key != RECORD)
            elif name.endswith("_hooks") and held != before:
                yield f"the hooks of {owner} ({name.strip('_')})"
        for name in [] if _same(now, self.attributes) else {**now, **self.attributes}:
            if name[0] != "_" and now.get(name, _ABSENT) is not self.attributes.get(name, _ABSENT):
                yield f"the attribute {name} of {owner}"

    def roll_back(self) -> None:
        if type(self.module) is not self.kind:
            self.module.__class__ = self.kind
        now = vars(self.module)
        for name in [name for name in now if name[0] != "_" and name not in self.attributes]:
            del now[name]
        now.update({name: value for name, value in self.attributes.items() if name[0] != "_"})
        for name in _KEPT:
            if isinstance(each := now.get(name), dict | set):
                each.clear()
                each.update(self.contents.get(name, {}))


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(map(operator.is_, map(one.get, other), other.values()))


def _is_in_place(tensor: Tensor, memory: Tensor) -> bool:
    """Tell whether a tensor has the memory, dtype, shape and strides of `memory`; lazy and nested ones count as unchanged."""
    if nn.parameter.is_lazy(tensor) or tensor.is_nested:
        return True
    same = tensor.dtype == memory.dtype and tensor.shape == memory.shape and tensor.layout == memory.layout
    if not same or tensor.layout != torch.strided:
        return same
    return storage_of(tensor) == storage_of(memory) and (
        (tensor.storage_offset(), tensor.stride()) == (memory.storage_offset(), memory.stride())
    )


class Snapshot:
    """The nodes of a graph module, its modules with their contents, and their options, at the time of creation.

    A node is compared by its fields, a module by identity, and a tensor by identity, memory and dtype.

    Attributes:
        graph_module: the graph module.
        steps: the steps of the record.
        orders: the orders of the record.
        held: the modules, parameters and buffers by qualified name.

    Example:
        >>> import torch
        >>> traced = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.ReLU()))
        >>> snapshot = Snapshot(traced)
        >>> traced.graph.erase_node(list(traced.graph.nodes)[-1])
        >>> snapshot.roll_back()
        >>> [node.name for node in traced.graph.nodes]
        ['input_1', '_0', 'output']
    """

    def __init__(self, graph_module: GraphModule) -> None:
        self.graph_module, self._graph = graph_module, graph_module.graph
        self._rows = {node.name: _Row.of(node) for node in self._graph.nodes}
        self._names = {row.node: name for name, row in self._rows.items()}
        self._used_names = set(used_names(self._graph)), dict(name_counts(self._graph))
        self.steps, self.orders = steps_of(graph_module), orders_of(graph_module)
        self._modules = [
            _Module.of(path, module)
            for path, module in graph_module.named_modules()
            if not isinstance(module, PassRecord)
        ]
        self.held = {name: value for each in self._modules for name, value in each.held()}
        tensors = (value for value in self.held.values() if isinstance(value, Tensor))
        # `tensor.data` keeps the memory alive: `tensor.data = ...` gives the tensor other memory, and perhaps another dtype.
        self._tensors = [(tensor, tensor.requires_grad, tensor.data) for tensor in tensors]

    @property
    def nodes(self) -> dict[str, Node]:
        """The nodes by name, in order; nodes that were erased since are included."""
        return {name: row.node for name, row in self._rows.items()}

    def meta(self, name: str) -> Mapping[str, Any]:
        """The metadata that the node of this name had; empty if there was none."""
        return self._rows[name].meta if name in self._rows else {}

    def edits(self, result: GraphModule) -> list[Edit]:
        """List the changes from the snapshot to `result`: those of nodes, and of modules, parameters and buffers.

        Args:
            result: the graph module, or another one made from it, whose modules are not compared.
        """
        held = Snapshot(result).held if result is self.graph_module else self.held
        places = [place for place in self.held | held if self.held.get(place) is not held.get(place)]
        taken, put = ({place: side.get(place) for place in places} for side in (self.held, held))
        swaps = [Swap(taken, put, None, result.training)] if places else []
        return [*self._node_edits(result), *swaps]

    def _node_edits(self, result: GraphModule) -> list[NodeEdit]:
        now = {node.name: node for node in result.graph.nodes}
        new = [NodeEdit(n, None, NodeState.of(now[n]), now[n].prev.name) for n in now if n not in self._rows]
        changed = [
            NodeEdit(name, before, after, meta=row.meta)
            for name, row in self._rows.items()
            if name in now and not (row.node is now[name] and row.is_unchanged())
            if (before := self.state(name)).differs(after := NodeState.of(now[name]))
        ]
        erased = [
            NodeEdit(name, self.state(name), None, previous, self._rows[name].meta)
            for previous, name in itertools.pairwise(["root", *self._rows])
            if name not in now
        ]
        return [*new, *changed, *reversed(erased)]

    def broken_ties(self) -> list[str]:
        """List names that shared one tensor and no longer do; empty if all ties remain."""
        names = grouped((id(value), path) for path, value in self.held.items() if isinstance(value, Tensor))
        groups = [group for group in names.values() if len(group) > 1]
        now = Snapshot(self.graph_module).held if groups else {}
        return next((group for group in groups if len({id(now.get(path)) for path in group}) > 1), [])

    def unlogged_change(self, log: Sequence[Edit]) -> str | None:
        """Describe a change since the snapshot that is not in the log of a rewriter; None if the log has all changes."""
        if node := self.past_nodes(log, self.graph_module):
            return node
        put, paths = dict[str, Any](), set[str]()
        for edit in reversed(log):
            after = edit.after if isinstance(edit, Swap) else {}
            put |= {path: value for path, value in after.items() if not is_inside(path, put)}
            paths.update(after)
        return self._past_modules(put, paths)

    def past_nodes(self, log: Iterable[Edit], result: GraphModule, *, by_others: bool = False) -> str | None:
        """Describe a node of `result` that differs from the snapshot with the logged changes; None if no node differs.

        Args:
            log: the changes.
            result: the graph module, or another one made from it.
            by_others: accept that other passes have changed the same nodes, too, and that numbers have another type.
        """
        logged = dict[str, NodeState | None]()

        def before(name: str) -> NodeState | None:
            return self.state(name) if name in self._rows else None

        for edit in log:
            if isinstance(edit, NodeEdit):
                known, after = logged.get(edit.name, before(edit.name)), edit.after
                if edit.before and known:
                    if not by_others and (fields := known.differs(edit.before)):
                        return f"{' and '.join(fields)} of the node {edit.name}"
                    changed = {field: getattr(after, field) for field in edit.fields if after}
                    after = after and dataclasses.replace(known, **changed)
                logged[edit.name] = after
            elif isinstance(edit, Redirect):
                for user in edit.users:
                    state = logged.get(user, before(user))
                    logged[user] = state and renamed(state, edit.old, edit.new)
        found = {edit.name: edit.after for edit in self._node_edits(result)}
        for name in found | logged:
            node, told = found.get(name, before(name)), logged.get(name, before(name))
            if node is None or told is None:
                if node is not told:
                    return f"the node {name}, which it {'erased' if node is None else 'made'}"
            elif not (by_others and told == node) and (fields := told.differs(node)):
                return f"{' and '.join(fields)} of the node {name}"
        return None

    def _past_modules(self, put: Mapping[str, Any], paths: Collection[str]) -> str | None:
        """Describe a change of modules or tensors that the logged `put` and `paths` do not explain; None if there is none."""
        for each in self._modules:
            for what in each.changes():
                if what not in paths:
                    return what
        for path, value in put.items():
            if find(self.graph_module, path) is not value:
                return path
        for tensor, requires_grad, memory in self._tensors:
            is_moved = not _is_in_place(tensor, memory)
            if is_moved or tensor.requires_grad != requires_grad:
                name = next(name for name, value in self.held.items() if value is tensor)
                return f"{'the memory or dtype' if is_moved else 'requires_grad'} of {name}"
        return None

    def roll_back(self) -> None:
        """Roll the graph module back to the snapshot; nodes that were erased come back as copies."""
        for each in self._modules:
            each.roll_back()
        for tensor, requires_grad, memory in self._tensors:
            if not _is_in_place(tensor, memory):
                tensor.data = memory
            if tensor.requires_grad != requires_grad:
                tensor.requires_grad_(requires_grad)
        if self.graph_module.graph is not self._graph:
            self.graph_module.graph = self._graph
        self._put_nodes()
        set_steps(self.graph_module, list(self.steps), self.orders)

    def _put_nodes(self) -> None:
        graph, rows = self._graph, self._rows.values()
        new = [node for node in graph.nodes if node not in self._names]
        for node in new:
            node.args, node.kwargs = (), {}
        copies = {row.node: self._again(row) for row in rows if is_erased(row.node)}
        given: Any = lambda node: copies.get(node, node)  # noqa: E731
        previous = root_of(graph)
        for row in rows:
            node = given(row.node)
            node.op, node.target, node.type = row.op, row.target, row.type
            node.args, node.kwargs = map_arg((row.args, row.kwargs), given)
            node.meta.clear()
            node.meta.update(row.meta)
            previous.append(node)
            previous = node
        for node in new:
            graph.erase_node(node)
        for row in rows:
            given(row.node).name = row.name
        for names, before in zip((used_names(graph), name_counts(graph)), self._used_names, strict=True):
            names.clear()
            names.update(before)

    def _again(self, row: _Row) -> Node:
        used_names(self._graph).discard(row.name)
        with self._graph.inserting_before(root_of(self._graph)):
            return self._graph.create_node(row.op, row.target, (), {}, row.name)

    def state(self, name: str) -> NodeState:
        """The node of this name as data."""
        return NodeState.of(self._rows[name], self._names)


class Writes(TorchDispatchMode):  # type: ignore[misc]
    """While this mode is active, `tell` is called before each write into a tensor of a graph module.

    Args:
        snapshot: the snapshot of the graph module.
        tell: the function to call with the qualified name and the tensor.
    """

    def __init__(self, snapshot: Snapshot, tell: Callable[[str, Tensor], None]) -> None:
        super().__init__()
        self._snapshot, self._tell = snapshot, tell

    @functools.cached_property
    def _names(self) -> dict[int, list[tuple[str, Tensor]]]:
        held = self._snapshot.held.items()
        tensors = ((name, value) for name, value in held if isinstance(value, Tensor))
        return grouped((storage_of(tensor), (name, tensor)) for name, tensor in tensors)

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for each in pytree.tree_leaves(written_arguments(operator, args, kwargs)):
            for name, tensor in self._names.get(storage_of(each), ()) if isinstance(each, Tensor) else ():
                self._tell(name, tensor)
        return operator(*args, **kwargs)


def refuse_writes(pass_: Any, snapshot: Snapshot) -> Writes:
    """Return a mode in which a write into a tensor of the graph module, by `apply` of a pass, raises a PassError."""

    def refuse(name: str, tensor: Tensor) -> None:
        raise PassError(
            f"apply of {pass_!r} writes into {name}: undo could not restore it, and the model may share it. Change a "
            "copy of the module, and pass the copy to rewriter.replace_module"
        )

    return Writes(snapshot, refuse)
