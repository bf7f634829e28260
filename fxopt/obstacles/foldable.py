"""Layers beside a call that scales and shifts each channel, and why they cannot take that over."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from torch import Tensor, nn
from torch.fx import Node

from fxopt import graph
from fxopt.graph_index import GraphIndex
from fxopt.obstacles.scaling import LAYERS, scaling_obstacle
from fxopt.operators import Fact, facts_of, name_of

F = TypeVar("F")


def folds(
    index: GraphIndex,
    node: Node,
    value: Node | None,
    kinds: tuple[type[nn.Module], ...],
    obstacle: Callable[[Node, Sequence[Node]], str | None],
    fold: Callable[[Sequence[Node], bool], F],
    into_behind: bool = True,
) -> Iterator[F | str]:
    """The folds of a call that scales and shifts, the better one first, and the reasons why there are no others.

    Args:
        index: the graph.
        node: the call.
        value: what it takes; None where no layer before counts.
        kinds: the types of the layers.
        obstacle: gives the reason why a layer cannot scale and shift instead. It takes the call of the layer, and the nodes
            between both calls, these included.
        fold: makes a fold, of the calls of the layers, and whether `node` is behind them.
        into_behind: whether layers behind `node` count, too.
    """
    if before := layer_before(index, value, kinds):
        path = [*before, node]
        uses = (use_obstacle(one, [other]) for one, other in itertools.pairwise(path))
        reason = next(filter(None, uses), None) or obstacle(path[0], path)
        yield reason or fold(path[:1], True)
    behind = layers_behind(index, node, kinds) if into_behind else []
    if behind:
        reasons = (obstacle(layer, [node, layer]) for layer in behind)
        reason = use_obstacle(node, behind) or next(filter(None, reasons), None)
        yield reason or fold(behind, False)


def layer_before(index: GraphIndex, value: Node | None, kinds: tuple[type[nn.Module], ...]) -> list[Node]:
    """The call of a layer that gives `value`, and the views on the way from its output to that.

    The views keep the last dimension as it is, in which a linear layer has its channels. The list is empty where there
    is no such layer.
    """
    found = [] if value is None else [value]
    while found and _keeps_last(found[0]):
        found.insert(0, found[0].all_input_nodes[0])
    if not found or found[0].op != "call_module":
        return []
    layer = index.module(found[0])
    return found if isinstance(layer, kinds) and (len(found) == 1 or isinstance(layer, nn.Linear)) else []


def layers_behind(index: GraphIndex, node: Node, kinds: tuple[type[nn.Module], ...]) -> list[Node]:
    """The calls of layers that take the value of `node` alone."""
    calls = [
        user for user in node.users if user.op == "call_module" and isinstance(index.module(user), kinds)
    ]
    return [call for call in calls if graph.input_of(call, index.module(call)) is node]


def layer_obstacle(index: GraphIndex, layer: Node) -> str | None:
    """Why the layer of a call cannot be replaced by one with other weights; None if it can."""
    kind = next(kind for kind in LAYERS if isinstance(index.module(layer), kind))
    return index.obstacle(layer, kind)


def folding_obstacle(
    index: GraphIndex,
    layer: Node,
    path: Sequence[Node],
    scale: Tensor,
    shift: Tensor | None,
    value: Node | None = None,
) -> str | None:
    """Why a scale and a shift cannot become a part of a layer; None if they can.

    Args:
        index: the graph.
        layer: the call of a layer without a `layer_obstacle`.
        path: that call and the one that scales and shifts, in order, with the views between.
        scale: what `folded` takes.
        shift: the same.
        value: what the first of them takes, where the layer is to read that instead.
    """
    reason = scaling_obstacle(index.module(layer), scale, shift, behind=layer is path[0])
    reason = reason or index.memory.write_between(path[0], path[-1], value)
    if reason is None and value is not None:
        reason = index.keeping_obstacle(layer, value)
    first, last = (graph.dtype_of(node) for node in (path[0], path[-1]))
    if reason is None and None not in (first, last) and first != last:
        # A folded layer would round what is not yet centred: nothing might be left of it.
        reason = f"{path[0].name} gives {first}, {path[-1].name} works in {last}, as in an autocast block"
    return reason


def use_obstacle(node: Node, layers: Iterable[Node]) -> str | None:
    """Name a user of `node` that is none of `layers`, and takes more than its shape or dtype; None if there is none."""
    describing = (user for user in node.users if _only_describes(user, node))
    return graph.use_obstacle(node, [*layers, *describing])


def _keeps_last(node: Node) -> bool:
    # In the same order, a last dimension of the same size is the same.
    if Fact.RESHAPES not in facts_of(node) or not node.all_input_nodes:
        return False
    now, then = (graph.value_of(each) for each in (node, node.all_input_nodes[0]))
    if not (isinstance(now, Tensor) and isinstance(then, Tensor) and now.ndim and then.ndim):
        return False
    known = isinstance(now.shape[-1], int) and isinstance(then.shape[-1], int)
    return known and now.shape[-1] == then.shape[-1] and now.dtype == then.dtype


def _only_describes(user: Node, value: Node) -> bool:
    """Tell whether a node reads only the shape, dtype or device of a value."""
    facts = facts_of(user)
    if name_of(user) in ("reshape_as", "view_as", "expand_as"):
        return user.args[0] is not value
    return Fact.DESCRIBES in facts and not facts & (Fact.LAYOUT | Fact.NEW)
