"""The masks of attention: tensors that are added to scores, or say where other values stand."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_aggregate

from fxopt import graph
from fxopt.attention.attention_steps import Obstacle, described
from fxopt.constants import computed_constant, constants_of
from fxopt.graph_index import GraphIndex
from fxopt.operators import Fact, facts_of, name_of
from fxopt.submodules import attribute


@dataclasses.dataclass(frozen=True)
class Mask:
    """A tensor that is added to scores, or says where they have another value.

    Attributes:
        node: the tensor, with as many dimensions as the scores or fewer; of booleans where there is a `fill`.
        step: the node that applies it.
        fill: the value that stands where `node` is `where`; None where `node` is added.
        where: at which elements of `node` the value stands.
    """

    node: Node
    step: Node
    fill: float | Node | None = None
    where: bool = True


class MaskReader:
    """Reads the masks in one graph.

    Args:
        index: the graph.
        each_row_has_a_key: whether no row of scores is masked entirely in any run.
    """

    def __init__(self, index: GraphIndex, each_row_has_a_key: bool) -> None:
        self._index = index
        self._each_row_has_a_key = each_row_has_a_key
        self._finite: set[Node] = set()

    def added(self, node: Node, step: Node) -> Mask:
        """The mask that a step adds."""
        device = graph.value_of(step).device.type
        least = -math.inf if device == "cpu" else _LEAST_ELSEWHERE
        if self._may_hold(least, node):
            self.ask_for_keys(
                f"{node.name} may hold -inf: a row of it is NaN, and would be zeros"
                if device == "cpu"
                else f"{node.name} may hold {least:.1e} or less: kernels of {device} give zeros for a row of it"
            )
        return Mask(node, step)

    def checked_fill(self, source: Node, fill: Any) -> Any:
        """A value that masks, if it is so small that a score which is added to it makes no difference."""
        number = fill
        if isinstance(fill, Node):
            value = described(fill)
            if fill not in self._constants or value.shape or value.dtype != graph.dtype_of(source):
                raise Obstacle(f"{fill.name}, which masks, is not known to be one small number")
            number = computed_constant(self._index.graph_module, fill, {}).item()
        if number == -math.inf:
            self.ask_for_keys(
                "masked scores are -inf: a row that is masked entirely is NaN, and would be zeros"
            )
        if type(number) not in (int, float) or not number <= _SMALLEST:
            raise Obstacle(f"masked scores are {number}, beside which a score may count")
        self.ask_for_keys(
            "in a row that is masked entirely, scores would have gradients that they do not have"
        )
        return fill

    def ask_for_keys(self, reason: str) -> None:
        """Raise an Obstacle if a row of scores may be masked entirely."""
        if not self._each_row_has_a_key:
            raise Obstacle(f"{reason}. Where there is no such row, give each_row_has_a_key=True")

    def _may_hold(self, least: float, mask: Node) -> bool:
        """Tell whether the graph writes such a number or a smaller one into a mask, or makes it by a logarithm."""
        seen, pending = {mask}, [mask]
        while pending:
            node = pending.pop()
            if node in self._finite:
                continue
            found: list[Any] = []
            map_aggregate((node.args, node.kwargs), found.append)
            if node.op == "get_attr":
                found.append(attribute(self._index.graph_module, str(node.target)))
            if any(_holds(each, least) for each in found) or name_of(node) in _LOGARITHMS:
                return True
            if node.op != "call_module" and Fact.MIXES not in facts_of(node):
                made_by = (*node.all_input_nodes, *self._index.memory.writers(node))
                new = [value for value in made_by if value not in seen]
                seen.update(new)
                pending += new
        self._finite |= seen
        return False

    @functools.cached_property
    def _constants(self) -> Collection[Node]:
        return constants_of(self._index)


def _holds(value: object, least: float) -> bool:
    if isinstance(value, Tensor) and value.is_floating_point() and not value.is_meta:
        return bool((value <= least).any())
    return isinstance(value, float) and value <= least


_LOGARITHMS = ("log", "log2", "log10", "log1p", "logit", "logsumexp", "log_softmax", "log_sigmoid")

_LEAST_ELSEWHERE = torch.finfo(torch.float32).min / 2
"""Memory-efficient kernels multiply masks by log2(e), and so make -inf of float32's least number."""

_SMALLEST = torch.finfo(torch.bfloat16).min
"""The value that masks with at most: a score that is added to it is lost in rounding, in every dtype but float16."""
