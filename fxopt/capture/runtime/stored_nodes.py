"""The nodes of a graph as data that can be pickled: nodes in arguments, and targets, are stored by name."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch
from torch.fx.node import has_side_effect

from fxopt.capture.capture_internals import get_qualified_name
from fxopt.capture.runtime import modes
from fxopt.capture.runtime.conditional import Conditional
from fxopt.effects import is_write
from fxopt.objects import find, is_found, qualified_name

# A node and its metadata.
Stored = tuple[dict[str, Any], dict[str, Any]]


def picklable(graph: torch.fx.Graph) -> list[Stored]:
    """Return the nodes of a graph, with only the metadata that means the same in another process."""
    stored = []
    for node, (data, meta) in zip(graph.nodes, copyable(graph), strict=True):
        if node.op == "call_function":
            data["target"] = _Importable.of(node)
        stored.append((data, {key: value for key, value in meta.items() if _is_plain(value)}))
    return stored


def copyable(graph: torch.fx.Graph) -> list[Stored]:
    """Return the nodes of a graph, with all of their metadata."""
    return [(_node_data(node), copy.copy(node.meta)) for node in graph.nodes]


def rebuilt_graph(nodes: list[Stored]) -> torch.fx.Graph:
    """Rebuild the graph from its stored nodes."""
    graph = torch.fx.Graph()
    made: dict[str, torch.fx.Node] = {}

    def resolve(value: Any) -> Any:
        return made[value.name] if isinstance(value, _Reference) else value

    for data, meta in nodes:
        target = find(data["target"].name) if isinstance(data["target"], _Importable) else data["target"]
        if data["op"] == "call_function" and is_write(target):
            has_side_effect(target)
        args, kwargs = torch.fx.node.map_aggregate((data["args"], data["kwargs"]), resolve)
        node = graph.create_node(data["op"], target, args, kwargs, data["name"], data["type_expr"])
        node.meta = meta
        made[data["name"]] = node
    return graph


class _Reference:
    """A node, by name, inside the stored arguments of another."""

    def __init__(self, name: str) -> None:
        self.name = name


class _Importable:
    """The target of a `call_function` node, by name."""

    def __init__(self, name: str) -> None:
        self.name = name

    @classmethod
    def of(cls, node: torch.fx.Node) -> Any:
        target: Any = node.target
        if isinstance(target, (modes.ApplyFunction, Conditional)):
            return target  # pickle can store these objects themselves
        name = qualified_name(target) if isinstance(target, type) else get_qualified_name(target)
        if not is_found(name, target):
            raise pickle.PicklingError(
                f"node {node.name!r} calls {name}, which cannot be imported by that name, so the graph cannot be "
                "pickled. Define it at the top level of a module."
            )
        return cls(name)


def _node_data(node: torch.fx.Node) -> dict[str, Any]:
    """Return the node as data, with names in place of nodes in its arguments."""
    name: Any = lambda node: _Reference(node.name)  # noqa: E731
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), name)
    return {
        "op": node.op,
        "target": node.target,
        "args": args,
        "kwargs": kwargs,
        "name": node.name,
        "type_expr": node.type,
    }


def _is_plain(value: Any) -> bool:
    """Tell whether a value in `node.meta` means the same in another process; fake tensors do not."""
    if isinstance(value, dict):
        return all(_is_plain(item) for pair in value.items() for item in pair)
    if isinstance(value, (tuple, list, set, frozenset)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (str, int, float, bool, torch.dtype))
