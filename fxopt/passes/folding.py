"""The base class of passes that fold a scale and a shift of each channel into adjacent layers."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fxopt import submodules
from fxopt.errors import UndoError
from fxopt.graph_index import GraphIndex
from fxopt.obstacles.foldable import Fold, Scaling, folds
from fxopt.obstacles.scaling import folded
from fxopt.rewriting.explanation import Refusal
from fxopt.rewriting.rewrite import ReversibleRewrite
from fxopt.rewriting.rewriter import Rewriter
from fxopt.rewriting.weights import Left, copied
from fxopt.torch_internals import parameters_of


@dataclasses.dataclass(frozen=True)
class Folding(ReversibleRewrite[Fold]):
    """A pass that folds scales and shifts into layers; a subclass defines `scalings`, the calls to fold.

    Args:
        reversible: `False` keeps no copies; then the pass cannot be undone.
    """

    reversible: bool = True

    preserves_computation = True

    into_following: ClassVar[bool] = True
    """If True, the pass also folds into layers after the calls."""

    @abc.abstractmethod
    def scalings(self, index: GraphIndex) -> Iterator[Scaling]:
        """Yield the calls that scale and shift."""

    def match(self, graph_module: GraphModule) -> Iterator[Fold | Refusal]:
        """Yield the calls that scale and shift with the layers to fold them into, each layer at most once."""
        index, taken = GraphIndex(graph_module), set[Node]()
        for scaling in self.scalings(index):
            reasons = list[str]()
            for found in folds(index, scaling, self.into_following):
                if isinstance(found, str):
                    reasons.append(found)
                elif taken.isdisjoint(found.layers):
                    taken.update(found.layers)
                    yield found
                    break
            else:
                if reasons:
                    yield Refusal(scaling.node, "; ".join(dict.fromkeys(reasons)))

    def apply(self, rewriter: Rewriter, site: Fold) -> tuple[Node, ...]:
        """Replace the layers by fused ones, and remove the call that scales and shifts."""
        module, scale, shift, sources = rewriter.graph_module, site.scale, site.shift, site.sources
        paths = [str(call.target) for call in site.layers]
        before = {path: submodules.find(module, path) for path in (*paths, *sources)}
        fused = {path: folded(before[path], scale, shift, site.behind) for path in paths}
        restore = None
        if self.reversible:
            held = {path: parameters_of(layer)["bias"] for path, layer in fused.items()}
            biases = {path: None if bias is None else bias.detach().clone() for path, bias in held.items()}
            stay = tuple(path for path, left in sources.items() if left is before[path])
            own = scale.clone(), None if shift is None else shift.clone()  # may share memory with a parameter
            restore = functools.partial(_unfolded, copied(before), biases, *own, site.behind, stay)
        value = None if site.operand is None else site.node.all_input_nodes[site.operand]
        for node in _between(site, value):
            # Mark the node as a part of the site, because its input has other values.
            rewriter.set(node, val=node.meta.get("val"))
        put = {path: left for path, left in sources.items() if left is not None}
        rewriter.swap(fused | put, [path for path in sources if path not in put], restore)
        if value is not None:
            rewriter.replace_uses(site.node, value)
            _erase(rewriter, site.node, value)
        return site.layers


def _between(site: Fold, value: Node | None) -> list[Node]:
    """The views between a layer and the folded call after it, and the nodes that read the shapes of these values."""
    found = list[Node]()
    if site.behind and value is not None:
        path = [value]
        while path[-1] not in site.layers:
            path.append(path[-1].all_input_nodes[0])
        found = [*path[:-1], *(user for node in path for user in node.users)]
    return [node for node in dict.fromkeys(found) if node is not site.node]


def _erase(rewriter: Rewriter, node: Node, kept: Node) -> None:
    """Erase a node, and all nodes that only it needed, except for `kept`."""
    inputs = [each for each in node.all_input_nodes if each is not kept]
    rewriter.erase(node)
    for each in inputs:
        if not each.users:
            _erase(rewriter, each, kept)


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
    """Return copies of the original layers and sources; raise UndoError if the folded weights were changed."""
    for path, bias in biases.items():
        made = folded(kept[path], scale, shift, behind)
        # Compare the bias with a copy: it is a sum, which another machine may round differently.
        if not _same(made.get_parameter("weight"), now[path].weight) or not _same(bias, now[path].bias):
            raise UndoError(
                f"the folded weights of {path} have changed since (by training, load_state_dict, or a lower dtype "
                "and back), and undoing would lose that. Put the weights back, or keep the model folded"
            )
    for path in stay:
        if not _same(kept[path], now[path]):
            raise UndoError(f"{path}, which was folded into {', '.join(biases)}, was changed since")
    first, restored = next(iter(biases)), dict[str, Any]()
    for path, value in copied(kept).items():
        like = path if path in biases else first
        restored[path] = now[path] if path in stay else left[like].follow(value, now[like])
    return restored


def _same(made: Tensor | None, current: Tensor | None) -> bool:
    """Tell whether a tensor has the values of `made`, converted to the tensor's current dtype and device."""
    if made is None or current is None or current.is_meta:
        return True
    return not made.is_meta and torch.equal(made.detach().to(current.device, current.dtype), current.detach())
