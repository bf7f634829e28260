"""The one way by which a pass changes a graph module: every change is logged, and can be taken back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fxopt import graph, submodules
from fxopt.errors import UndoError
from fxopt.node_values import described
from fxopt.rewriting.edits import (
    Edit,
    NodeEdit,
    NodesByName,
    NodeState,
    Redirect,
    Swap,
    Swapped,
    check_nodes,
)
from fxopt.rewriting.weights import PROVENANCE, Restore, provenance
from fxopt.torch_internals import modules_of, root_of, used_names


class Rewriter:
    """Changes a graph module on behalf of a pass, and logs each change.

    `Rewrite.apply` gets one, and changes the graph module through it alone: what is not logged is not undone.

    Attributes:
        graph_module: the module to change.
        log: the changes so far, oldest first.
        signature: of the pass.
        made: the nodes that were created, by name.
        orders: the names of the children that a module had before, for each path where modules were swapped.

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
        """Insert a node, described as for `torch.fx.Graph.create_node`.

        Args:
            before: the node that it stands in front of, whose origin in the model it takes.
            val: a tensor without data that describes its value, for `meta["val"]`; by default, the one that the call gives
                for the descriptions of its arguments.
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
        """Change `op`, `target`, `args` or `kwargs` of a node, and `val`, the description of its value."""
        check_nodes(self.graph, node, fields.get("args"), fields.get("kwargs"))
        self._set(node, {} if val is None else {"val": val}, fields)

    def _set(self, node: Node, meta: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
        before, kept = NodeState.of(node), {name: node.meta.get(name) for name in meta}
        node.meta.update(meta)
        for name in (name for name, value in meta.items() if value is None):
            del node.meta[name]  # it was not there
        for name, value in fields.items():
            setattr(node, name, value)
        self.log.append(NodeEdit(node.name, before, NodeState.of(node) if fields else before, meta=kept))

    def replace_input(self, node: Node, old: Node, new: Node) -> None:
        """Make one node take `new` wherever it took `old`."""

        def renewed(value: Node) -> Node:
            return new if value is old else value

        self.set(node, args=map_arg(node.args, renewed), kwargs=map_arg(node.kwargs, renewed))

    def replace_uses(self, old: Node, new: Node) -> None:
        """Make all users of `old`, but for `new` itself, take `new`."""
        check_nodes(self.graph, old, new)
        kept = tuple(user.name for user in new.users)
        users = [user for user in old.users if user is not new]
        for user in [user for user in users if user in new.users]:
            self.replace_input(user, old, new)  # which of its inputs was which, its arguments alone tell
            users.remove(user)
        for user in users:
            user.replace_input_with(old, new)
        stands_in = new.name in self.made or (new.op == "call_module" and new.target in self._swapped)
        names = tuple(user.name for user in users)
        self.log.append(Redirect(old.name, new.name, names, kept, stands_in))

    def erase(self, node: Node) -> None:
        """Erase a node that nothing uses; its name stays reserved."""
        check_nodes(self.graph, node)
        edit = NodeEdit(node.name, NodeState.of(node), None, node.prev.name, node.meta)
        self.graph.erase_node(node)
        self.log.append(edit)

    def swap(
        self, put: Mapping[str, Any], remove: Iterable[str] = (), restore: Restore | None = None
    ) -> None:
        """Put modules, parameters or buffers at qualified names and take others away, as one change.

        Args:
            put: what to put at each name, in the place of what is there.
            remove: the names to take away.
            restore: makes what undo puts back at each name, given what stands at each name of `put` then and
                how it was left; by default copies of what is there now, as long as the new weights stay.
        """
        before = {path: submodules.find(self.graph_module, path) for path in (*put, *remove)}
        made_by = (*(s for value in before.values() for s in provenance(value)), self.signature)
        for value in put.values():  # what was there before, the model may share
            if isinstance(value, nn.Module) and id(value) not in self._known:
                value.__dict__[PROVENANCE] = tuple(dict.fromkeys(made_by))
        self._swapped.update(put)
        self._place(before, {**put, **dict.fromkeys(remove)}, restore)

    def replace_module(self, path: str, module: nn.Module, restore: Restore | None = None) -> None:
        """Put `module` at `path`, in the place of what is there."""
        self.swap({path: module}, restore=restore)

    def add_module(self, parent: str, name: str, module: nn.Module) -> str:
        """Add `module` below `parent`, under this name or one like it that is free; returns the path."""
        path = submodules.free_path(self.graph_module, parent, name)
        self.swap({path: module})
        return path

    def remove_module(self, path: str) -> None:
        """Take the module at `path` away."""
        self.swap({}, [path])

    def orders_before(self, known: Mapping[str, list[str]]) -> dict[str, list[str]]:
        """The orders that are `known` from before, and those of the children that were added or removed since."""
        found = dict(known)
        for path, names in self.orders.items():
            if list(modules_of(submodules.module_at(self.graph_module, path))) != names:
                found[path] = submodules.merged_order(found.get(path, []), names)
        return found

    def play_back(self, edits: Sequence[Edit]) -> None:
        """Invert changes, the last one first.

        Raises:
            UndoError: something is not as a change left it. What was inverted before that stays so.
        """
        nodes = NodesByName({node.name: node for node in self.graph.nodes})
        for edit in reversed(edits):
            if isinstance(edit, Swapped):
                self._restore(edit)
            elif isinstance(edit, Redirect):
                self._direct_back(edit, nodes[edit.old], nodes[edit.new], nodes)
            elif isinstance(edit, NodeEdit) and edit.after is None:
                nodes[edit.name] = self._recreate(edit, nodes)
            elif isinstance(edit, NodeEdit) and edit.after is not None:
                self._change_back(edit, edit.after, nodes)

    def _direct_back(self, edit: Redirect, old: Node, new: Node, nodes: NodesByName) -> None:
        for name in edit.users:
            if new not in nodes[name].all_input_nodes:
                raise changed(name, nodes[name])
        for user in [user for user in new.users if user is not old]:
            if user.name in edit.users or (edit.stands_in and user.name not in edit.kept):
                self.replace_input(user, new, old)

    def _change_back(self, edit: NodeEdit, left: NodeState, nodes: NodesByName) -> None:
        node, fields = nodes[edit.name], edit.fields
        if not {*fields}.isdisjoint(left.differs(node)):
            raise changed(node.name, node)
        if edit.before is not None:
            state = edit.before.resolved(nodes)
            self._set(node, edit.meta, {name: state[name] for name in fields})
        elif node.users:
            raise changed(f"{node.name}, which {', '.join(user.name for user in node.users)} uses now,", node)
        else:
            self.erase(nodes.pop(edit.name))
            graph.free_name(self.graph, edit.name)

    def _recreate(self, edit: NodeEdit, nodes: NodesByName) -> Node:
        assert edit.before is not None
        state = edit.before.resolved(nodes)
        if edit.name not in nodes:
            used_names(self.graph).discard(edit.name)
        # Where the node in front of it is gone, it stands behind what it takes.
        behind = [nodes[name] for name in edit.before.references()]
        behind += [nodes[edit.previous]] if edit.previous in nodes else []
        with self.graph.inserting_after(max(behind, default=root_of(self.graph))):
            node = self.graph.create_node(name=edit.name, **state)
        node.meta = dict(edit.meta)
        self.log.append(NodeEdit(node.name, None, NodeState.of(node), node.prev.name))
        return node

    def _restore(self, edit: Swapped) -> None:
        """Put back what stood at each path, made of what stands there now."""
        now = {path: submodules.find(self.graph_module, path) for path in edit.left}
        for path, left in edit.left.items():
            if left is None and now[path] is not None:
                raise UndoError(
                    f"other modules stand at {path} now, a name that the pass had freed. Give them other names first"
                )
            if left is not None and not left.fits(now[path]):
                raise changed(path)
        assert edit.restore is not None
        left_behind = {path: left for path, left in edit.left.items() if left is not None}
        restored = dict(edit.restore({path: now[path] for path in left_behind}, left_behind))
        self._tie(restored, edit.ties)
        for path, value in restored.items():
            if isinstance(value, nn.Module):
                value.__dict__.pop(PROVENANCE, None)
                if made_by := edit.made_by.get(path):
                    value.__dict__[PROVENANCE] = made_by
                twin = path if path in left_behind else next(iter(left_behind), "")
                was = left_behind[twin].training if twin else edit.training
                is_now = (now[twin] if twin else self.graph_module).training
                if was != is_now:
                    value.train(is_now)
        self._place(now, {**dict.fromkeys(edit.left), **restored})

    def _tie(self, restored: dict[str, Any], ties: Mapping[str, str]) -> None:
        """Make tensors that are to be put back the ones that are at other names, which they were before."""
        for name, other in ties.items():
            path = next(prefix for prefix in submodules.prefixes(name) if prefix in restored)
            mine, tensor = (
                dict(submodules.tensors_of({path: restored[path]}))[name],
                submodules.find(self.graph_module, other),
            )
            if not isinstance(tensor, Tensor) or tensor.shape != mine.shape or not torch.equal(tensor, mine):
                raise UndoError(
                    f"{name} was the same tensor as {other}, and the two have other values now. Make them equal again first"
                )
            if path == name:
                restored[path] = tensor
            else:
                owner, _ = submodules.split_path(name[len(path) + 1 :])
                submodules.place(submodules.module_at(restored[path], owner), name, tensor)

    def _place(
        self, before: Mapping[str, Any], after: Mapping[str, Any], restore: Restore | None = None
    ) -> None:
        for path, value in after.items():
            parent, _ = submodules.split_path(path)
            owner = submodules.module_at(self.graph_module, parent)
            if parent not in self.orders:
                self.orders[parent] = list(modules_of(owner))
            submodules.place(owner, path, value)
        self.log.append(Swap(before, after, restore, self.graph_module.training))


def changed(what: str, node: Node | None = None) -> UndoError:
    """The error to raise where something is not as a pass left it."""
    where = f", at {graph.place(node)}" if node is not None else ""
    return UndoError(
        f"{what} was changed since{where}. Undo that change first, or take a copy from before it"
    )
