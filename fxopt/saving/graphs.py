"""A graph as data: its nodes in order, arguments that are nodes by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import has_side_effect

from fxopt.effects import is_write
from fxopt.errors import SaveError
from fxopt.graph import place
from fxopt.rewriting.record import MARKS
from fxopt.saving.allowed import NameRefused, Names, qualified_name
from fxopt.saving.calls import check_name, check_node
from fxopt.saving.values import ORIGIN, NotData, Values
from fxopt.torch_internals import codegen_of


def write_graph(graph: Graph, names: Names) -> dict[str, list[Any]]:
    """A graph as JSON: its nodes, and the places in the model that they come from, each once; SaveError where it cannot be."""
    if type(codegen_of(graph)) is not torch.fx.graph.CodeGen:
        raise SaveError(
            f"the graph takes its inputs by a {type(codegen_of(graph)).__name__}, as torch.export makes one: fxopt saves graphs "
            "whose forward takes its placeholders as they are."
        )
    values = Values(names, _refuse, _refuse)
    nodes: list[Any] = []
    origins: dict[str, int] = {}
    for node in graph.nodes:
        try:
            check_node(names, node.op, node.target, node.args, node.kwargs)
            origin = {key: values.write(_plain(node.meta[key])) for key in ORIGIN if key in node.meta}
            number = origins.setdefault(json.dumps(origin), len(origins))
            nodes.append(_written(node, values) | {"origin": number})
        except (NameRefused, NotData) as error:
            named = node.op in ("get_attr", "call_module")
            advice = (
                "Rename the module or tensor: its name goes into code, so that it takes letters, digits and no two "
                "underscores in front"
                if named
                else "Give a class or function of yours in `trusted`, for save and for load"
            )
            raise SaveError(
                f"{place(node)} calls or holds {error}, which a saved graph cannot have. {advice}."
            ) from None
    return {"origins": [json.loads(origin) for origin in origins], "nodes": nodes}


def read_graph(written: Mapping[str, Any], names: Names) -> Graph:
    """The graph that `write_graph` wrote; NameRefused or NotData where it holds what it may not."""
    graph, made = Graph(), dict[str, Node]()
    values = Values(names, _refuse, _refuse, made.__getitem__)
    for data in written["nodes"]:
        name, op, target = data["name"], data["op"], data["target"]
        check_name(name)
        if op == "call_function":
            target = names.target(target)
            if is_write(target):
                has_side_effect(target)
        args = values.read(data["args"])
        kwargs = {key: values.read(value) for key, value in data["kwargs"].items()}
        check_node(names, op, target, args, kwargs)
        kind = values.read(data["type"]) if "type" in data else None
        node = graph.create_node(op, target, tuple(args), kwargs, name, kind)
        if node.name != name:
            raise NotData(f"a second node {name!r}")
        origin = written["origins"][data["origin"]]
        node.meta = {key: values.read(value) for key, value in origin.items() if key in ORIGIN}
        if "marks" in data:
            node.meta[MARKS] = values.read(data["marks"])
        made[name] = node
    return graph


def _written(node: Node, values: Values) -> dict[str, Any]:
    data = {
        "name": node.name,
        "op": node.op,
        "target": node.target if isinstance(node.target, str) else values.names.of(node.target),
        "args": [values.write(value) for value in node.args],
        "kwargs": {name: values.write(value) for name, value in node.kwargs.items()},
    }
    if MARKS in node.meta:
        data["marks"] = values.write(node.meta[MARKS])
    if node.type in _ANNOTATIONS:  # any other is left out: it changes nothing
        data["type"] = values.write(node.type)
    return data


_ANNOTATIONS = (bool, float, int, str, torch.Tensor)


def _plain(value: Any) -> Any:
    """Metadata in which torch.fx has classes, with their names instead, as torch.export has them."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return tuple(map(_plain, value))
    return qualified_name(value) if isinstance(value, type) else value


def _refuse(value: Any) -> Any:
    raise NotData(f"a {type(value).__name__} among the arguments of a node")
