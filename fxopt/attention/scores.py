"""Reads the steps from the product of queries and keys to the weights: a factor, masks, a softmax."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from fxopt import graph
from fxopt.attention.attention_steps import Obstacle, described, factor_of, is_number, step_name, stop
from fxopt.attention.masks import CASTS, Mask, MaskReader
from fxopt.graph_index import GraphIndex
from fxopt.operators import Fact, facts_of, name_of


@dataclasses.dataclass
class Scores:
    """The factor and the masks of the scores after the steps that were read."""

    scale: float = 1.0
    masks: list[Mask] = dataclasses.field(default_factory=list)
    normalised: bool = False


class ScoreReader:
    """Reads the operations on scores in one graph.

    Args:
        index: index of the graph.
        masks: the reader of its masks.
    """

    def __init__(self, index: GraphIndex, masks: MaskReader) -> None:
        self._index, self._masks = index, masks

    def read(self, steps: Sequence[Node], dtype: torch.dtype | None) -> Scores:
        """Read the steps from the product of queries and keys to the weights of an attention with an output of `dtype`.

        Raises:
            Obstacle: one of them is not a step of attention.
        """
        scores = self._begun(steps[0])
        for source, step in itertools.pairwise(steps):
            self._read_step(scores, source, step)
        self._masks.check_rows(scores.masks, dtype)
        return scores

    def _begun(self, product: Node) -> Scores:
        """Read the product of queries and keys, which may be a `baddbmm` with a factor and a mask."""
        if name_of(product) != "baddbmm":
            return Scores()
        alpha, beta = (product.kwargs.get(name, 1) for name in ("alpha", "beta"))
        if not is_number(alpha) or beta not in (0, 1) or not product.args:
            raise Obstacle(f"{product.name} scales what it adds")
        return Scores(float(alpha), [self._masks.added(product.all_input_nodes[0], product)] if beta else [])

    def _read_step(self, scores: Scores, source: Node, step: Node) -> None:
        """Record one step after the product of queries and keys."""
        name = step_name(self._index, step)
        stop(self._index.removing_obstacle(step))
        if "dropout" in name:
            if not self._index.memory.is_pure(step) and graph.argument(step, "p") != 0:
                raise Obstacle(f"{step.name} is active: the model is in training mode")
        elif name in CASTS:
            options = [*step.args[1:], *step.kwargs.values()]
            stays = name == "type_as" and described(step).device == described(source).device
            if graph.first_argument(step) is not source:
                raise Obstacle(f"{step.name} takes nothing but the dtype of the scores")
            if not stays and not all(isinstance(option, torch.dtype) for option in options):
                raise Obstacle(f"{step.name} may move the scores to another device")
        elif name == "softmax" and not scores.normalised:
            if self._softmax_dimension(step) not in (-1, len(described(step).shape) - 1):
                raise Obstacle("the softmax is not over the keys")
            scores.normalised = True
        elif Fact.RESHAPES in facts_of(step):
            if (step.args or step.all_input_nodes)[0] is not source:  # `x.view_as(scores)`
                raise Obstacle(f"{step.name} takes nothing but the shape of the scores")
        elif name != "identity":
            if scores.normalised:
                raise Obstacle(f"{step.name} is between the softmax and the values")
            self._read_change(scores, name, source, step)

    def _softmax_dimension(self, step: Node) -> Any:
        if step.op == "call_module":
            return getattr(self._index.module(step), "dim", None)
        return step.kwargs.get("dim", step.args[1] if len(step.args) > 1 else None)

    def _read_change(self, scores: Scores, name: str, source: Node, step: Node) -> None:
        """Record a scaling or a mask."""
        args = step.args
        if step.op == "call_method" and name == "where":
            args = (*args[1::-1], *args[2:])
        factor, others = factor_of(step), [arg for arg in args if arg is not source]
        nodes = [other for other in others if isinstance(other, Node)]
        if factor is not None:
            if not all(mask.fill == -math.inf and factor > 0 for mask in scores.masks):
                raise Obstacle(f"{step.name} scales what is masked")
            scores.scale *= factor
        elif name == "add" and len(args) == 2 and len(nodes) == 1 and not step.kwargs:
            scores.masks.append(self._masks.added(nodes[0], step))
        elif name == "masked_fill" and len(args) == 3 and args[0] is source and len(others) == 2 and nodes:
            scores.masks.append(self._masks.filled(nodes[0], step, source, others[1]))
        elif name == "where" and len(args) == 3 and args[0] is not source and len(others) == 2 and nodes:
            scores.masks.append(self._masks.filled(nodes[0], step, source, others[1], args[2] is source))
        else:
            raise Obstacle(f"{step.name} is between the product of queries and keys and the softmax")
