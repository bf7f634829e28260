"""The masks of attention: tensors that are added to scores, or that select the scores to replace by another value."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fxopt import graph
from fxopt.attention.attention_steps import Obstacle, described
from fxopt.constants import computed_constant, constants_of
from fxopt.graph_index import GraphIndex
from fxopt.operators import Fact, facts_of, name_of
from fxopt.submodules import attribute


@dataclasses.dataclass(frozen=True)
class Mask:
    """A tensor that is added to scores, or that selects the scores to replace by another value.

    Attributes:
        node: the tensor, with as many dimensions as the scores or fewer; boolean if there is a `fill`.
        step: the node that applies the mask.
        fill: the value of the scores at which `node` equals `where`; None if `node` is added.
        where: the value of `node` that selects a score.
        unless: why one call cannot compute the attention if a row of scores is masked entirely; None if it can.
        least: the least number that the mask adds to scores, or sets them to.
    """

    node: Node
    step: Node
    fill: float | Node | None = None
    where: bool = True
    unless: str | None = None
    least: float = 0.0


class MaskReader:
    """Reads the masks in one graph.

    Args:
        index: index of the graph.
        each_row_has_a_key: whether no row of scores is masked entirely in any run.
        inference: whether gradients do not matter, and parameters and buffers do not change.
    """

    def __init__(self, index: GraphIndex, each_row_has_a_key: bool, inference: bool) -> None:
        self._index, self._inference = index, inference
        self._each_row_has_a_key = each_row_has_a_key
        self._least = dict[Node, float]()

    def added(self, node: Node, step: Node) -> Mask:
        """Describe the mask that a step adds."""
        least, training = self._least_in(node), self._index.graph_module.training
        unless = None
        if not _is_finite(least, step) or (training and least <= _LOSING_GRADIENTS):
            unless = f"{node.name} may hold {least:.1e}: a row that is masked entirely would differ if fused"
        return Mask(node, step, unless=unless, least=least)

    def filled(self, node: Node, step: Node, source: Node, fill: Any, where: bool = True) -> Mask:
        """Describe the mask by which a step replaces scores by a value, which must be small enough to hide any score."""
        number = fill
        if isinstance(fill, Node):
            value = described(fill)
            if fill not in self._constants or value.shape or value.dtype != graph.dtype_of(source):
                raise Obstacle(f"{fill.name}, which masks, is not known to be one small number")
            number = computed_constant(self._index.graph_module, fill, {}).item()
        if type(number) not in (int, float) or not number <= _SMALLEST:
            raise Obstacle(f"masked scores are {number}, which is too large to hide a score")
        unless = "in a row that is masked entirely, scores would get gradients, which they do not have now"
        if number == -math.inf:
            unless = "masked scores are -inf: a row that is masked entirely gives NaN, but zeros if fused"
        return Mask(node, step, fill, where, unless, number)

    def check_rows(self, masks: Sequence[Mask], dtype: torch.dtype | None) -> None:
        """Raise an Obstacle if a row of scores may be masked entirely, and one call would compute another result for it."""
        reasons = [mask.unless for mask in masks if mask.unless]
        if masks and dtype == torch.float16:
            reasons.append("in float16, a row that is masked entirely would have other weights")
        elif len(masks) == 1:  # two masks together may hide all keys of a row
            no_matter = self._inference and _is_finite(masks[0].least, masks[0].step)
            reasons = [] if no_matter or (reasons and self._leaves_keys(masks[0])) else reasons
        elif _may_overflow(masks) and not any(map(self._leaves_keys, masks)):
            reasons.append("its masks may add up to -inf: a row of -inf gives NaN, but zeros if fused")
        if reasons and not self._each_row_has_a_key:
            raise Obstacle(f"{reasons[0]}. If no row is masked entirely, pass each_row_has_a_key=True")

    def _leaves_keys(self, mask: Mask) -> bool:
        """Tell whether a mask is a constant with a key in each row, such as that of causal attention."""
        node: Any = mask.node
        while mask.fill is None and name_of(node) in CASTS:
            node = graph.first_argument(node)
        if node not in self._constants or self._index.memory.written(node):
            return False
        value = computed_constant(self._index.graph_module, node, {})
        hidden = value <= _LOSING_GRADIENTS if mask.fill is None else value == mask.where
        return not bool(hidden.all(-1).any())

    def _least_in(self, mask: Node) -> float:
        """The least constant in the computation of a mask, -inf if it contains a logarithm; 0 if there is no constant."""
        if mask not in self._least:
            made = graph.reached([mask], self._made_by)
            self._least[mask] = min((self._least_of(node) for node in made), default=0.0)
        return self._least[mask]

    def _least_of(self, node: Node) -> float:
        found = graph.leaf_arguments(node)
        if node.op == "get_attr":
            found.append(attribute(self._index.graph_module, str(node.target)))
        return -math.inf if name_of(node) in _LOGARITHMS else min(map(_least, found), default=0.0)

    def _made_by(self, node: Node) -> tuple[Node, ...]:
        """The values that a value of a mask is computed from; empty for operators that mix many values."""
        if node.op == "call_module" or Fact.MIXES in facts_of(node):
            return ()
        return (*node.all_input_nodes, *self._index.memory.writers(node))

    @functools.cached_property
    def _constants(self) -> Collection[Node]:
        return constants_of(self._index, freeze=self._inference)


def _least(value: object) -> float:
    """The least number that a constant may contribute to a mask, which may negate a float."""
    if isinstance(value, Tensor) and value.is_floating_point() and not value.is_meta and value.numel():
        return float(value.detach().min())
    if isinstance(value, float):
        return -abs(value) if math.isfinite(value) else value
    return float(min(value, 0)) if isinstance(value, int) else 0.0


def _may_overflow(masks: Sequence[Mask]) -> bool:
    """Tell whether the sum of masks may be less than the least number of their dtype; halves keep Python's sum finite."""
    if len(masks) < 2:
        return False
    least = torch.finfo(graph.value_of(masks[0].step).dtype).min
    return sum(mask.least / 2 for mask in masks) < 0.51 * least


def _is_finite(number: float, step: Node) -> bool:
    """Tell whether kernels treat a number in a mask as finite: then a masked row may differ only in its gradients."""
    return number > (-math.inf if graph.value_of(step).device.type == "cpu" else _LEAST_ELSEWHERE)


_LOGARITHMS = ("log", "log2", "log10", "log1p", "logit", "logsumexp", "log_softmax", "log_sigmoid")

_LEAST_ELSEWHERE = torch.finfo(torch.float32).min / 2
"""Memory-efficient kernels multiply masks by log2(e), so the least float32 becomes -inf."""

_LOSING_GRADIENTS = -1e4
"""Mask values up to this lose gradients: rounding drops the logarithm of a row's sum, which the backward adds to scores."""

_SMALLEST = torch.finfo(torch.bfloat16).min
"""Largest value that hides a score: adding a score to it changes nothing after rounding, in every dtype except float16."""

CASTS = ("to", "type", "type_as", "float", "double", "half", "bfloat16")
"""Methods by which models change the dtype of scores and masks."""
