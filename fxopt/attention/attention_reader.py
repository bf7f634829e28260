"""Attention that is written out: a product of queries and keys, a softmax, and a product with the values."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.fx import Node

from fxopt import graph
from fxopt.attention.attention_steps import (
    Obstacle,
    described,
    factor_of,
    factors,
    step_name,
    stop,
)
from fxopt.attention.heads import check_types, heads_of
from fxopt.attention.masks import Mask, MaskReader
from fxopt.attention.scores import ScoreReader
from fxopt.graph_index import GraphIndex
from fxopt.operators import Fact, facts_of, name_of


@dataclasses.dataclass(frozen=True)
class Attention:
    """Nodes that compute one attention.

    Attributes:
        node: the product with the values.
        steps: the other nodes of the attention, in order: maybe a scaling of the queries, the product of queries and keys, and
            all nodes from there to the weights.
        query: (..., L, E).
        key: (..., E, S) if `turned`, otherwise (..., S, E).
        value: (..., S, D).
        turned: whether `key` is already transposed for the product with the queries.
        scale: the factor of the scores, before masks.
        masks: the masks, in the order in which they are applied.
        heads: the sizes of batch and heads if some steps have one dimension for both, and others two; otherwise None.
    """

    node: Node
    steps: tuple[Node, ...]
    query: Node
    key: Node
    value: Node
    turned: bool
    scale: float
    masks: tuple[Mask, ...]
    heads: tuple[Any, Any] | None


class AttentionReader:
    """Finds and reads attention in one graph.

    Args:
        index: index of the graph.
        masks: the reader of its masks.
    """

    def __init__(self, index: GraphIndex, masks: MaskReader) -> None:
        self._index = index
        self._scores = ScoreReader(index, masks)
        self._read: set[Node] = set()

    def places(self) -> Iterator[tuple[Node, ...]]:
        """Yield paths of nodes from a product through a softmax to another product, in graph order."""
        for node in self._index.nodes:
            if step_name(self._index, node) == "softmax":
                before = self._path(node, _sources)
                behind = self._path(node, lambda step: [*step.users]) if before else ()
                if before and behind:
                    yield (*reversed(before), *behind[1:])

    def read(self, place: tuple[Node, ...]) -> Attention:
        """Read a path of `places` as an attention.

        Raises:
            Obstacle: the path is not attention, or one call cannot compute it.
        """
        *steps, last = place
        query, key, turned = factors(steps[0])
        weights, value, by_columns = factors(last)
        if weights is not steps[-1] or value is weights or not by_columns or name_of(last) == "baddbmm":
            raise Obstacle("the weights are not on the left of the product with the values")
        self._check_uses(place)
        stop(self._index.keeping_obstacle(last, last))
        for node in (*place, query, key, value):
            described(node)
        scores = self._scores.read(steps, graph.dtype_of(last))
        heads = heads_of(self._index, place, (query, key, value), turned, scores.masks)
        check_types(place, (query, key, value), scores.masks)
        reads = [(steps[0], query), (steps[0], key), *((mask.step, mask.node) for mask in scores.masks)]
        factor = factor_of(query)
        if factor is not None and [*query.users] == steps[:1] and not self._index.memory.writes(query):
            (source,) = query.all_input_nodes
            if graph.dtype_of(source) == graph.dtype_of(query):
                reads.append((query, source))
                steps, query, scores.scale = [query, *steps], source, scores.scale * factor
        for reader, tensor in [*reads, (last, value)]:
            stop(self._index.memory.write_between(reader, last, tensor))
            stop(self._index.keeping_obstacle(last, tensor))
        self._read.add(last)
        parts = last, tuple(steps), query, key, value, turned, scores.scale, tuple(scores.masks)
        return Attention(*parts, heads)

    def _path(self, start: Node, following: Callable[[Node], Sequence[Node]]) -> tuple[Node, ...]:
        """The nodes from `start` to a product near it; empty if there is no product."""
        came: dict[Node, Node | None] = {start: None}
        pending = [start]
        while pending and len(came) < _NEAR:
            node = pending.pop()
            if node is not start and name_of(node) in _PRODUCTS:
                path = [node]
                while (before := came[path[-1]]) is not None:
                    path.append(before)
                return tuple(reversed(path))
            if node is start or (step_name(self._index, node) and Fact.MIXES not in facts_of(node)):
                found = [other for other in following(node) if other not in came]
                came.update(dict.fromkeys(found, node))
                pending += reversed(found)
        return ()

    def _check_uses(self, place: tuple[Node, ...]) -> None:
        if place[0] in self._read:
            raise Obstacle(f"{place[0].name} is the product of another attention")
        for node, following in itertools.pairwise(place):
            stop(graph.use_obstacle(node, [following]))
            written = self._index.memory.written_by(node)
            if written and not (len(written) == 1 and written[0] in place):
                raise Obstacle(f"{node.name} may write into what is no part of the attention")
        if self._index.memory.writes(place[0]) or self._index.memory.writes(place[-1]):
            raise Obstacle("a product writes into a tensor")


def _sources(step: Node) -> list[Node]:
    """The inputs of a step that may be the scores, the most likely first."""
    if name_of(step) == "where" and step.op == "call_function":
        nodes = [arg for arg in step.args[1:] if isinstance(arg, Node)]
    elif name_of(step) in ("masked_fill", "where"):
        nodes = step.all_input_nodes[:1]
    else:
        nodes = step.all_input_nodes
    return sorted(nodes, key=lambda node: len(node.users) > 1)


_NEAR = 64
"""The number of nodes around a softmax that are searched for a product."""

_PRODUCTS = ("matmul", "bmm", "baddbmm", "einsum")
