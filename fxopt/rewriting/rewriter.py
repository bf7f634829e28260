"""The only interface by which a pass changes a graph module; it logs every change, so that undo can invert it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fxopt import graph, submodules
from fxopt.errors import PassError
from fxopt.node_values import described
from fxopt.rewriting.edits import (
    FIELDS,
    Edit,
    NodeEdit,
    NodeState,
    Redirect,
    Swap,
    check_nodes,
)
from fxopt.rewriting.weights import PROVENANCE, Restore, provenance


class Rewriter:
    """Changes a graph module on behalf of a pass, and logs each change.

    `Rewrite.apply` gets a rewriter and must make all changes through it: changes that are not logged cannot be undone.

    Attributes:
        graph_module: the module to change.
        log: the changes so far, oldest first.
        signature: the signature of the pass.
        made: the nodes that were created, by name.
        orders: the names of parameters, buffers and children before the first change, by the path of each changed parent module.

    Example:
        >>> import torch
        >>> traced = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.ReLU()))
        >>> (relu,) = traced.graph.find_nodes(op="call_module", target="0")
        >>> rewriter = Rewriter(traced)
        >>> rewriter.set(relu, op="call_function", target=torch.relu)
        >>> [edit.name for edit in rewriter.log]
        ['_0']
    """

    def __init__(self, graph_module: GraphModule, signature: str = "") -> None:
        self.graph_module = graph_module
        self.log: list[Edit] = []
        self.made: dict[str, Node] = {}
        self.orders: dict[str, list[str]] = {}
        self.signature = signature
        self._swapped: set[str] = set()
        self._known = {id(module) for module in graph_module.modules()}

    @property
    def graph(self) -> Graph:
        """The graph to change."""
        return self.graph_module.graph

    def create(
        self,
        op: str,
        target: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        before: Node,
        val: Any = None,
    ) -> Node:
        """Insert a node; `op`, `target`, `args` and `kwargs` are those of `torch.fx.Graph.create_node`.

        Args:
            before: the node before which the new node is inserted; the new node copies its origin in the model.
            val: a tensor without data that describes the value, for `meta["val"]`. By default, the call is run on the
                descriptions of its arguments.
        """
        check_nodes(self.graph, before, args, kwargs)
        with self.graph.inserting_before(before):
            node = self.graph.create_node(op, target, args, dict(kwargs or {}))
        if val is None and op.startswith("call"):
            val = described(self.graph_module, node)
        node.meta = graph.origin_of(before) | ({} if val is None else {"val": val})
        self.log.append(NodeEdit(node.name, None, NodeState.of(node), node.prev.name))
        self.made[node.name] = node
        return node

    def set(self, node: Node, *, val: Any = None, **fields: Any) -> None:
        """Change `op`, `target`, `args` or `kwargs` of a node, and `meta["val"]`, the description of its value."""
        if unknown := fields.keys() - {*FIELDS}:
            raise TypeError(f"set changes {', '.join(FIELDS)} and val, not {', '.join(sorted(unknown))}")
        check_nodes(self.graph, node, fields.get("args"), fields.get("kwargs"))
        before, kept = NodeState.of(node), {} if val is None else {"val": node.meta.get("val")}
        node.meta.update({} if val is None else {"val": val})
        for name, value in fields.items():
            setattr(node, name, value)
        self.log.append(NodeEdit(node.name, before, NodeState.of(node) if fields else before, meta=kept))

    def replace_input(self, node: Node, old: Node, new: Node) -> None:
        """Replace `old` by `new` in all arguments of `node`."""
        args, kwargs = map_arg((node.args, node.kwargs), lambda each: new if each is old else each)
        self.set(node, args=args, kwargs=kwargs)

    def replace_uses(self, old: Node, new: Node) -> None:
        """Replace `old` by `new` in all users of `old`, except in `new` itself."""
        check_nodes(self.graph, old, new)
        kept = tuple(user.name for user in new.users)
        for user in [user for user in old.users if user is not new and user in new.users]:
            self.replace_input(user, old, new)  # it uses both: its logged arguments tell which was `old`
        users = [user for user in old.users if user is not new]
        for user in users:
            user.replace_input_with(old, new)
        is_replacement = new.name in self.made or (new.op == "call_module" and new.target in self._swapped)
        names = tuple(user.name for user in users)
        self.log.append(Redirect(old.name, new.name, names, kept, is_replacement))

    def erase(self, node: Node) -> None:
        """Erase a node that nothing uses; its name stays reserved."""
        check_nodes(self.graph, node)
        if node.op == "output":
            raise PassError("the output node cannot be erased: the graph would return None")
        if node.users:
            raise PassError(f"{node.name} cannot be erased: {next(iter(node.users)).name} uses it")
        edit = NodeEdit(node.name, NodeState.of(node), None, node.prev.name, node.meta)
        self.graph.erase_node(node)
        self.log.append(edit)

    def swap(
        self, put: Mapping[str, Any], remove: Iterable[str] = (), restore: Restore | None = None
    ) -> None:
        """Put modules, parameters or buffers at qualified names and remove others, as one change.

        Args:
            put: the new value for each name.
            remove: the names to remove.
            restore: a function that undo calls with two dicts by name: the present values at the names of `put`, and descriptions
                of the values that the pass put there. It returns the value to put back at each name. By default, undo
                puts copies back, and raises `UndoError` if the new weights have changed.
        """
        before = {path: submodules.find(self.graph_module, path) for path in (*put, *remove)}
        made_by = [signature for value in before.values() for signature in provenance(value)]
        made_by += [self.signature] if self.signature else []  # `commit` has none
        for value in put.values():  # a module that was there before may be shared with the model
            if isinstance(value, nn.Module) and id(value) not in self._known:
                value.__dict__[PROVENANCE] = tuple(dict.fromkeys(made_by))
        self._swapped.update(put)
        after = {**put, **dict.fromkeys(remove)}
        for parent in {submodules.split_path(path)[0] for path in after} - self.orders.keys():
            self.orders[parent] = submodules.names_in(self.graph_module, parent)
        submodules.place_all(self.graph_module, after)
        self.log.append(Swap(before, after, restore, self.graph_module.training))

    def replace_module(self, path: str, module: nn.Module, restore: Restore | None = None) -> None:
        """Replace the module at `path` by `module`."""
        if submodules.find(self.graph_module, path) is None:
            raise PassError(f"replace_module: there is no module {path!r}; add_module adds one")
        self.swap({path: module}, restore=restore)

    def add_module(self, parent: str, name: str, module: nn.Module, restore: Restore | None = None) -> str:
        """Add `module` below `parent`, under `name` or a similar free name; returns the path.

        Undo raises `UndoError` if weights or buffers of `module` have changed, as those of an observer do. A `restore` that
        returns an empty dict permits such changes.
        """
        path = submodules.free_path(self.graph_module, parent, name)
        self.swap({path: module}, restore=restore)
        return path

    def remove_module(self, path: str) -> None:
        """Remove the module at `path`."""
        self.swap({}, [path])

    def orders_before(self, known: Mapping[str, list[str]]) -> dict[str, list[str]]:
        """Copy `known`, and add the earlier order of names for each module whose names have changed since."""
        found = dict(known)
        for path, names in self.orders.items():
            if submodules.names_in(self.graph_module, path) != names:
                found[path] = submodules.merged_order(names, found.get(path, []))
        return found
