"""Layers beside a call that scales and shifts each channel, and why they cannot take that over."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.fx import Node

from fxopt import graph
from fxopt.graph_index import GraphIndex
from fxopt.obstacles.scaling import LAYERS, scaling_obstacle
from fxopt.operators import Fact, facts_of, name_of


@dataclasses.dataclass(frozen=True)
class Scaling:
    """A call that scales and shifts each channel.

    Attributes:
        node: the call.
        value: what it scales; None where no layer before counts, and the call stays and does less.
        kinds: the types of the layers that may scale and shift instead.
        scale_and_shift: gives the factor of each channel, or one for all, and the summands that follow, None for none.
        obstacle: gives the reason why a layer cannot scale and shift instead. It takes the call of the layer, and the nodes
            between both calls, these included.
        sources: what is to stand at the paths that scale and shift come from; None for nothing.
    """

    node: Node
    value: Node | None
    kinds: tuple[type[nn.Module], ...]
    scale_and_shift: Callable[[], tuple[Tensor, Tensor | None]]
    obstacle: Callable[[Node, Sequence[Node]], str | None]
    sources: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Fold:
    """A call that scales and shifts, and the layers that take that over.

    Attributes:
        layers: the calls of the layers.
        node: the call that scales and shifts.
        behind: whether it is behind the layer, and not before them.
        scale: the factor of each channel, or one for all.
        shift: the summand that follows, likewise; None for none.
        operand: which input of the call takes its place, counted in `all_input_nodes`, as other folds may put others there; None
            where the call stays, and does less.
        sources: as in `Scaling`.
    """

    layers: tuple[Node, ...]
    node: Node
    behind: bool
    scale: Tensor
    shift: Tensor | None
    operand: int | None
    sources: Mapping[str, Any]


def folds(index: GraphIndex, scaling: Scaling, into_behind: bool) -> Iterator[Fold | str]:
    """The folds of a call that scales and shifts, the better one first, and the reasons why there are no others.

    Args:
        index: the graph.
        scaling: the call.
        into_behind: whether layers behind the call count, too.
    """
    node = scaling.node
    if before := layer_before(index, scaling.value, scaling.kinds):
        yield _fold(index, scaling, [[*before, node]])
    behind = layers_behind(index, node, scaling.kinds) if into_behind else []
    if behind:
        yield _fold(index, scaling, [[node, layer] for layer in behind])


def _fold(index: GraphIndex, scaling: Scaling, paths: Sequence[Sequence[Node]]) -> Fold | str:
    """The fold into the layers at the other ends of some paths from or to a call, or why there is none."""
    node, behind = scaling.node, paths[0][-1] is scaling.node
    layers = tuple(path[0 if behind else -1] for path in paths)
    links = graph.grouped(link for path in paths for link in itertools.pairwise(path))
    uses = (use_obstacle(*link) for link in links.items())
    others = (_obstacle(index, scaling, *each) for each in zip(layers, paths, strict=True))
    reason = next(filter(None, itertools.chain(uses, others)), None)
    operand = None if scaling.value is None else node.all_input_nodes.index(scaling.value)
    return reason or Fold(layers, node, behind, *scaling.scale_and_shift(), operand, scaling.sources)


def _obstacle(index: GraphIndex, scaling: Scaling, layer: Node, path: Sequence[Node]) -> str | None:
    """Why a layer cannot scale and shift in the place of a call; None if it can."""
    module, behind = index.module(layer), layer is path[0]
    kind = next(kind for kind in LAYERS if isinstance(module, kind))
    if reason := index.obstacle(layer, kind) or scaling.obstacle(layer, path):
        return reason
    value = None if behind else scaling.value
    reason = scaling_obstacle(module, *scaling.scale_and_shift(), behind)
    reason = reason or index.memory.write_between(path[0], path[-1], value)
    if reason is None and value is not None:
        reason = index.keeping_obstacle(layer, value)
    first, last = (graph.dtype_of(node) for node in (path[0], path[-1]))
    if reason is None and None not in (first, last) and first != last:
        # A folded layer would round what is not yet centred: nothing might be left of it.
        reason = f"{path[0].name} gives {first}, {path[-1].name} works in {last}, as in an autocast block"
    return reason


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
    return graph.alike(now.shape[-1:], then.shape[-1:]) and now.dtype == then.dtype


def _only_describes(user: Node, value: Node) -> bool:
    """Tell whether a node reads only the shape, dtype or device of a value."""
    facts = facts_of(user)
    if name_of(user) in ("reshape_as", "view_as", "expand_as"):
        return user.args[0] is not value
    return Fact.DESCRIBES in facts and not facts & (Fact.LAYOUT | Fact.NEW)
