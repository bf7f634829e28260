"""What scales and shifts each channel becomes a part of the layers beside it: what all passes share that fold so."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fxopt import graph, submodules
from fxopt.errors import UndoError
from fxopt.graph_index import GraphIndex
from fxopt.operators import Fact, facts_of, name_of
from fxopt.rewriting.explanation import Refusal
from fxopt.rewriting.rewrite import ReversibleRewrite
from fxopt.rewriting.rewriter import Rewriter
from fxopt.rewriting.weights import Left, copied
from fxopt.scaling import LAYERS, folded, scaling_obstacle


@dataclasses.dataclass(frozen=True)
class Fold:
    """A call that scales and shifts, and the layers that take that over.

    Attributes:
        layers: the calls of the layers.
        node: the call that scales and shifts.
        behind: whether it is behind the layer, and not before them.
        removable: whether the module that it calls goes, too, when nothing calls that any more.
    """

    layers: tuple[Node, ...]
    node: Node
    behind: bool
    removable: bool = False


@dataclasses.dataclass(frozen=True)
class Folding(ReversibleRewrite[Fold]):
    """A pass that folds scales and shifts into layers; its `match` says which.

    Args:
        reversible: `False` keeps no copies; then the pass cannot be undone.
    """

    reversible: bool = True

    preserves_computation = True

    @abc.abstractmethod
    def scale_and_shift(self, graph_module: GraphModule, node: Node) -> tuple[Tensor, Tensor | None]:
        """What a call multiplies each channel by, and what it adds then: a number for all, or one for each."""

    def value(self, node: Node) -> Node | None:
        """What takes the place of a call that scales and shifts; None where it stays, and does less."""
        return node.all_input_nodes[0]

    @abc.abstractmethod
    def sources(self, rewriter: Rewriter, site: Fold) -> dict[str, Any]:
        """The paths of the modules and tensors that this comes from, with what is to stand there; None for nothing."""

    def apply(self, rewriter: Rewriter, site: Fold) -> tuple[Node, ...]:
        """Put fused layers in the place of the old ones, and drop what scaled and shifted."""
        module = rewriter.graph_module
        scale, shift = self.scale_and_shift(module, site.node)
        value = self.value(site.node)
        paths, sources = [str(call.target) for call in site.layers], self.sources(rewriter, site)
        before = {path: submodules.find(module, path) for path in (*paths, *sources)}
        fused = {path: folded(before[path], scale, shift, site.behind) for path in paths}
        restore = None
        if self.reversible:
            biases = {path: _copy_of(layer._parameters["bias"]) for path, layer in fused.items()}
            stay = tuple(path for path, left in sources.items() if left is before[path])
            restore = functools.partial(_unfolded, copied(before), biases, scale, shift, site.behind, stay)
        for node in _between(site, value):
            rewriter.set(
                node, val=node.meta.get("val")
            )  # it is of the site: what it takes has other values now
        put = {path: left for path, left in sources.items() if left is not None}
        rewriter.swap(fused | put, [path for path in sources if path not in put], restore)
        if value is not None:
            rewriter.replace_uses(site.node, value)
            _erase(rewriter, site.node, value)
        return site.layers


def each_layer_once(candidates: Iterable[tuple[Node, Iterable[Fold | str]]]) -> Iterator[Fold | Refusal]:
    """Yield the first fold of each node into layers that no other one has taken; a refusal where there are only reasons.

    Args:
        candidates: the nodes that scale and shift, each with its folds, or the reasons against them.
    """
    taken = set[Node]()
    for node, folds in candidates:
        reasons = list[str]()
        for found in folds:
            if isinstance(found, str):
                reasons.append(found)
            elif taken.isdisjoint(found.layers):
                taken.update(found.layers)
                yield found
                break
        else:
            if reasons:
                yield Refusal(node, "; ".join(dict.fromkeys(reasons)))


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
    first, last = (graph.dtype_of(node) for node in (path[0], path[-1]))
    if reason is None and None not in (first, last) and first != last:
        # A folded layer would round what is not yet centred: nothing might be left of it.
        reason = f"{path[0].name} gives {first}, {path[-1].name} works in {last}, as in an autocast block"
    return reason


def use_obstacle(node: Node, layers: Iterable[Node]) -> str | None:
    """Name a user of `node` that is none of `layers`, and takes more than its shape or dtype; None if there is none."""
    others = [user.name for user in node.users if user not in layers and not _only_describes(user, node)]
    return f"{node.name} is also used by {', '.join(others)}" if others else None


_KEEP_ORDER = ("flatten", "reshape", "reshape_as", "view", "view_as", "squeeze", "unsqueeze", "unflatten")
"""The views that keep the order of all elements: where the last dimension has the same size, it is the same."""


def _keeps_last(node: Node) -> bool:
    if name_of(node) not in _KEEP_ORDER or not node.all_input_nodes:
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


def _between(site: Fold, value: Node | None) -> list[Node]:
    """The views from a layer to what is folded into it, and what reads the shapes of the values there."""
    found = list[Node]()
    if site.behind and value is not None:
        path = [value]
        while path[-1] not in site.layers:
            path.append(path[-1].all_input_nodes[0])
        found = [*path[:-1], *(user for node in path for user in node.users)]
    return [node for node in dict.fromkeys(found) if node is not site.node]


def _erase(rewriter: Rewriter, node: Node, kept: Node) -> None:
    """Erase a node, and what it alone needed, but for one of its inputs."""
    inputs = [each for each in node.all_input_nodes if each is not kept]
    rewriter.erase(node)
    for each in inputs:
        if not each.users:
            _erase(rewriter, each, kept)


def _copy_of(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _unfolded(
    kept: Mapping[str, Any],
    biases: Mapping[str, Tensor | None],
    scale: Tensor,
    shift: Tensor | None,
    behind: bool,
    stay: Sequence[str],
    now: Mapping[str, Any],
    left: Mapping[str, Left],
) -> dict[str, Any]:
    """Copies of what was folded, as long as the folded weights are what folding made of them."""
    for path, bias in biases.items():
        made = folded(kept[path], scale, shift, behind)
        # The bias is a sum, which another machine may round differently.
        if not _same(made.get_parameter("weight"), now[path].weight) or not _same(bias, now[path].bias):
            raise UndoError(
                f"the folded weights of {path} have changed since (by training, load_state_dict, or a lower dtype "
                "and back), and undoing would lose that. Put the weights back, or keep the model folded"
            )
    for path in stay:
        if not _same_values(now[path], kept[path]):
            raise UndoError(f"{path}, which was folded into {', '.join(biases)}, was changed since")
    first, restored = next(iter(biases)), dict[str, Any]()
    for path, value in copied(kept).items():
        like = path if path in biases else first
        restored[path] = now[path] if path in stay else left[like].follow(value, now[like])
    return restored


def _same(made: Tensor | None, current: Tensor | None) -> bool:
    """Tell whether a tensor has the values that were made for it, whatever its dtype and device are now."""
    if made is None or current is None or current.is_meta:
        return True
    return not made.is_meta and torch.equal(made.detach().to(current.device, current.dtype), current.detach())


def _same_values(one: Any, other: Any) -> bool:
    """Tell whether modules or tensors have the same values, whatever the dtype of the first is now."""
    if isinstance(one, Tensor):
        return one.is_meta or torch.equal(one, other.to(one.dtype))
    values = other.state_dict()
    return all(_same_values(value, values[name]) for name, value in one.state_dict().items())
