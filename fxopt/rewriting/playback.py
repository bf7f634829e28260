"""Inversion of the log of a rewriter: it restores nodes, and computes earlier modules from the present ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from fxopt import graph, submodules
from fxopt.errors import UndoError
from fxopt.rewriting.edits import Edit, NodeEdit, NodesByName, Redirect, Swapped
from fxopt.rewriting.weights import PROVENANCE
from fxopt.torch_internals import root_of, used_names


def play_back(graph_module: GraphModule, edits: Sequence[Edit], orders: Mapping[str, list[str]]) -> None:
    """Invert changes, the last one first.

    Args:
        graph_module: the graph module that was changed.
        edits: the changes.
        orders: the names of the parameters, buffers and children that modules had before the changes, by path.

    Raises:
        UndoError: a node or module is not as a change left it. The changes inverted before the error stay inverted.
    """
    nodes = NodesByName({node.name: node for node in graph_module.graph.nodes})
    for edit in reversed(edits):
        if isinstance(edit, Swapped):
            for parent in _restore(graph_module, edit) & orders.keys():
                submodules.put_in_order(graph_module, parent, orders[parent])
        elif isinstance(edit, Redirect):
            _direct_back(edit, nodes[edit.old], nodes[edit.new], nodes)
        elif isinstance(edit, NodeEdit) and edit.before is None:
            _erase_again(edit, nodes)
        elif isinstance(edit, NodeEdit) and edit.after is None:
            _create_again(edit, graph_module.graph, nodes)
        elif isinstance(edit, NodeEdit):
            _change_back(edit, nodes[edit.name], nodes)


def _direct_back(edit: Redirect, old: Node, new: Node, nodes: NodesByName) -> None:
    for name in edit.users:
        if new not in nodes[name].all_input_nodes:
            raise _changed(name, nodes[name])
    for user in [user for user in new.users if user is not old]:
        if user.name in edit.users or (edit.is_replacement and user.name not in edit.kept):
            user.replace_input_with(new, old)


def _erase_again(edit: NodeEdit, nodes: NodesByName) -> None:
    node = nodes[edit.name]
    del nodes[edit.name]
    _check(edit, node)
    if node.users:
        raise _changed(f"{node.name}, which {', '.join(user.name for user in node.users)} uses now,", node)
    node.graph.erase_node(node)
    graph.free_name(node.graph, edit.name)


def _change_back(edit: NodeEdit, node: Node, nodes: NodesByName) -> None:
    _check(edit, node)
    assert edit.before is not None
    state = edit.before.resolved(nodes)
    for field in edit.fields:
        setattr(node, field, state[field])
    for key, value in edit.meta.items():
        if value is None:
            node.meta.pop(key, None)  # the key was absent
        else:
            node.meta[key] = value


def _create_again(edit: NodeEdit, where: Graph, nodes: NodesByName) -> None:
    assert edit.before is not None
    state = edit.before.resolved(nodes)
    # After the node that preceded it, if that still exists, and after its inputs.
    behind = [nodes[name] for name in edit.before.references()]
    behind += [nodes[edit.previous]] if edit.previous in nodes else []
    if edit.name not in nodes:
        used_names(where).discard(edit.name)
    with where.inserting_after(max(behind, default=root_of(where))):
        node = nodes[edit.name] = where.create_node(name=edit.name, **state)
    node.meta = dict(edit.meta)


def _check(edit: NodeEdit, node: Node) -> None:
    """Raise an UndoError if a field that a pass set was changed since."""
    assert edit.after is not None
    if not {*edit.fields}.isdisjoint(edit.after.differs(node)):
        raise _changed(node.name, node)


def _restore(graph_module: GraphModule, edit: Swapped) -> set[str]:
    """Restore the earlier value at each path; returns the paths of parent modules whose order of names this may change."""
    now = {path: submodules.find(graph_module, path) for path in edit.left}
    for path, left in edit.left.items():
        is_as_left = now[path] is None if left is None else left.fits(now[path])
        if not is_as_left:
            raise _changed(path)
    assert edit.restore is not None
    left_behind = {path: left for path, left in edit.left.items() if left is not None}
    restored = dict(edit.restore({path: now[path] for path in left_behind}, left_behind))
    for path, value in restored.items():
        if isinstance(value, nn.Module):
            value.__dict__.pop(PROVENANCE, None)
            if made_by := edit.made_by.get(path):
                value.__dict__[PROVENANCE] = made_by
            twin = path if path in left_behind else next(iter(left_behind), "")
            was = left_behind[twin].training if twin else edit.training
            is_now = (now[twin] if twin else graph_module).training
            if was != is_now:
                value.train(is_now)
    submodules.place_all(graph_module, {**dict.fromkeys(edit.left), **restored})
    # A value of the same kind keeps its position: the order noted by an earlier step must not be applied there.
    changed = (p for p in {*now, *restored} if _registry(now.get(p)) != _registry(restored.get(p)))
    return {submodules.split_path(path)[0] for path in changed}


def _registry(value: object) -> int:
    """A number for the kind of a value: modules, parameters and buffers each have their own order."""
    kinds = (nn.Module, nn.Parameter, Tensor)
    return next((number for number, kind in enumerate(kinds) if isinstance(value, kind)), len(kinds))


def _changed(what: str, node: Node | None = None) -> UndoError:
    """Make the error for a node or module that was changed since the pass."""
    where = f", at {graph.place(node)}" if node is not None else ""
    return UndoError(
        f"{what} was changed since{where}. Undo that change first, or take a copy from before it"
    )
