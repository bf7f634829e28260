"""Finds layers into which a call that scales and shifts each channel can be folded, and the reasons against it."""

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
        value: the value that it scales; None to fold only into layers after the call, which stays without its weights.
        kinds: the types of the layers that may scale and shift instead.
        scale_and_shift: function that returns the factor of each channel, or one for all, and the summands, None for none.
        obstacle: function that returns the reason why a layer cannot scale and shift instead. Its arguments are the call of
            the layer, and the path of nodes between both calls, including these.
        sources: for the paths from which scale and shift come, the objects after the rewrite; None removes an object.
    """

    node: Node
    value: Node | None
    kinds: tuple[type[nn.Module], ...]
    scale_and_shift: Callable[[], tuple[Tensor, Tensor | None]]
    obstacle: Callable[[Node, Sequence[Node]], str | None]
    sources: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Fold:
    """A call that scales and shifts, and the layers that do so instead.

    Attributes:
        layers: the calls of the layers.
        node: the call that scales and shifts.
        behind: whether the call is after the layer, and not before the layers.
        scale: the factor of each channel, or one for all.
        shift: the summand of each channel, or one for all; None for none.
        operand: the position in `all_input_nodes` of the input that replaces the call, because other folds may replace the
            node itself; None if the call stays without its weights.
        sources: as in `Scaling`.
    """

    layers: tuple[Node, ...]
    node: Node
    behind: bool
    scale: Tensor
    shift: Tensor | None
    operand: int | None
    sources: Mapping[str, Any]


def folds(index: GraphIndex, scaling: Scaling, into_following: bool) -> Iterator[Fold | str]:
    """Yield the folds of a call that scales and shifts, the better one first, and reasons why other folds are impossible.

    Args:
        index: index of the graph.
        scaling: the call.
        into_following: whether to fold into layers after the call, too.
    """
    node = scaling.node
    if before := layer_before(index, scaling.value, scaling.kinds):
        yield _fold(index, scaling, [[*before, node]])
    behind = layers_behind(index, node, scaling.kinds) if into_following else []
    if behind:
        yield _fold(index, scaling, [[node, layer] for layer in behind])


def _fold(index: GraphIndex, scaling: Scaling, paths: Sequence[Sequence[Node]]) -> Fold | str:
    """Make the fold of a call into the layers at the other ends of `paths`, or return why there is none."""
    node, behind = scaling.node, paths[0][-1] is scaling.node
    layers = tuple(path[0 if behind else -1] for path in paths)
    links = graph.grouped(link for path in paths for link in itertools.pairwise(path))
    uses = (use_obstacle(*link) for link in links.items())
    others = (_obstacle(index, scaling, *each) for each in zip(layers, paths, strict=True))
    reason = next(filter(None, itertools.chain(uses, others)), None)
    operand = None if scaling.value is None else node.all_input_nodes.index(scaling.value)
    return reason or Fold(layers, node, behind, *scaling.scale_and_shift(), operand, scaling.sources)


def _obstacle(index: GraphIndex, scaling: Scaling, layer: Node, path: Sequence[Node]) -> str | None:
    """Return why a layer cannot scale and shift instead of a call; None if it can."""
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
        # A folded layer would round values before they are centered, and might lose all their digits.
        reason = f"{path[0].name} gives {first}, {path[-1].name} works in {last}, as in an autocast block"
    return reason


def layer_before(index: GraphIndex, value: Node | None, kinds: tuple[type[nn.Module], ...]) -> list[Node]:
    """The path from the call of a layer to `value`: the call, and the views of its output.

    The views keep the last dimension, which contains the channels of a linear layer. The list is empty if there is no such
    layer.
    """
    found = [] if value is None else [value]
    while found and _keeps_last(found[0]):
        found.insert(0, found[0].all_input_nodes[0])
    if not found or found[0].op != "call_module":
        return []
    layer = index.module(found[0])
    return found if isinstance(layer, kinds) and (len(found) == 1 or isinstance(layer, nn.Linear)) else []


def layers_behind(index: GraphIndex, node: Node, kinds: tuple[type[nn.Module], ...]) -> list[Node]:
    """The calls of layers whose only input is the value of `node`."""
    calls = [
        user for user in node.users if user.op == "call_module" and isinstance(index.module(user), kinds)
    ]
    return [call for call in calls if graph.input_of(call, index.module(call)) is node]


def use_obstacle(node: Node, layers: Iterable[Node]) -> str | None:
    """Name the users of `node` that are not in `layers` and read more than its shape or dtype; None if there are none."""
    describing = (user for user in node.users if _only_describes(user, node))
    return graph.use_obstacle(node, [*layers, *describing])


def _keeps_last(node: Node) -> bool:
    # A reshape keeps the order of elements, so a last dimension of the same size is unchanged.
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
