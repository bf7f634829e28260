"""The parts of a graph that work in channels_last as well as in torch's default layout, and their borders."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator

from torch import Tensor
from torch.fx import Node

from fxopt import graph
from fxopt.graph_index import GraphIndex
from fxopt.operators import Fact, facts_of, name_of

_POOLS = ("max_pool2d", "maxpool2d", "avg_pool2d", "avgpool2d", "adaptive_avg_pool2d", "adaptiveavgpool2d")


@dataclasses.dataclass(frozen=True)
class Region:
    """Calls of convolutions with what connects them, all of which keeps the layout of its input.

    Attributes:
        convs: the calls of the convolutions, in graph order.
        nodes: these, and all nodes whose values are in channels_last when those of the convolutions are.
        borders: each value that others use, with these users: they get it in the default layout.
    """

    convs: tuple[Node, ...]
    nodes: tuple[Node, ...]
    borders: tuple[tuple[Node, tuple[Node, ...]], ...]


def regions(index: GraphIndex, convs: Collection[Node]) -> Iterator[Region]:
    """Find the regions of some convolutions.

    Args:
        index: of the graph.
        convs: the calls of convolutions whose outputs are to be in channels_last.
    """
    members: dict[Node, list[Node]] = {}  # each node of a region -> all nodes of it, one list for all
    for node in index.nodes:
        if node in convs or _keeps_layout(index, node):
            inside = [value for value in node.all_input_nodes if value in members]
            if inside or node in convs:
                own = [node]
                for part in {id(members[value]): members[value] for value in inside}.values():
                    own = part + own
                members.update(dict.fromkeys(own, own))
    for nodes in {id(part): part for part in members.values()}.values():
        ordered = sorted(nodes, key=index.position.__getitem__)
        borders = (
            (node, tuple(user for user in node.users if members.get(user) is not nodes)) for node in ordered
        )
        yield Region(
            tuple(node for node in ordered if node in convs),
            tuple(ordered),
            tuple((node, users) for node, users in borders if users),
        )


def region_obstacle(index: GraphIndex, region: Region) -> str | None:
    """Why a region cannot be in channels_last; `None` if it can."""
    for node in region.nodes:
        value = graph.value_of(node)
        if not isinstance(value, Tensor) or value.dim() != 4:
            return (
                f"the shape of {node.name} is not known: capture the model with fxopt.trace, or run "
                "torch.fx.passes.fake_tensor_prop.FakeTensorProp on the graph module, with "
                "FakeTensorMode(allow_non_fake_inputs=True)"
            )
    for node, users in region.borders:
        if not graph.value_of(node).is_contiguous():
            return f"{node.name} is not in torch's default layout, in which what follows would get it"
        # The users get a copy, so that a later write would reach one of the two alone. An earlier one is in both.
        first = min(map(index.position.__getitem__, users))
        late = [writer for writer in index.memory.writers(node) if index.position[writer] >= first]
        if late:
            return f"{late[0].name} may write into the memory of {node.name} after that is copied to the default layout"
        twins = [
            other for other, _ in region.borders if other is not node and index.memory.may_alias(other, node)
        ]
        if twins and index.memory.is_returned(node):
            return f"{node.name} and {twins[0].name} may share memory that the graph returns"
    return None


def _keeps_layout(index: GraphIndex, node: Node) -> bool:
    """Tell whether the value of a node has the layout of its inputs, and does not depend on it."""
    value = graph.value_of(node)
    if not isinstance(value, Tensor) or value.dim() != 4 or "out" in node.kwargs:
        return False
    module = index.module(node) if node.op == "call_module" else None
    name = name_of(node) if module is None else type(module).__name__.lower()
    facts = facts_of(node, module)
    if not facts:
        return False  # not an operator of torch's own, or one with hooks
    if name in ("cat", "concat"):
        return bool((node.kwargs.get("dim") if len(node.args) < 2 else node.args[1]) == 1)
    if name in ("identity", "dropout", "dropout2d", "batch_norm", "batchnorm2d"):
        return index.memory.is_pure(node)
    if name == "pad":  # by views and copies in other modes
        return graph.argument(node, "mode") in (None, "constant")
    if name in _POOLS:
        return True
    inputs = map(graph.value_of, node.all_input_nodes)
    return Fact.ELEMENTWISE in facts and all(isinstance(each, Tensor) for each in inputs)
