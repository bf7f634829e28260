"""Checks that one call can compute an attention with its shapes and dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from fxopt import graph
from fxopt.attention.attention_steps import Obstacle, described, is_number
from fxopt.attention.masks import Mask
from fxopt.graph import alike
from fxopt.graph_index import GraphIndex
from fxopt.operators import Fact, facts_of, name_of


def heads_of(
    index: GraphIndex, place: Sequence[Node], inputs: Sequence[Node], turned: bool, masks: Sequence[Mask]
) -> tuple[Any, Any] | None:
    """Check that all shapes fit; return the sizes of batch and heads if some steps, but not all, join them in one dimension."""
    *steps, _ = place
    (*front, rows, columns), (*behind, _, _) = described(steps[0]).shape, described(steps[-1]).shape
    query, key, value = (described(node).shape for node in inputs)
    inner = (query[-1], columns) if turned else (columns, query[-1])
    fits = alike(query[:-1], (*front, rows)) and alike(key, (*front, *inner))
    if not fits or not alike(value[:-1], (*behind, columns)):
        raise Obstacle("queries, keys and values are broadcast to each other")
    shapes = [described(step).shape for step in steps]
    for before, after, step in zip(shapes, shapes[1:], steps[1:], strict=False):
        regrouped = Fact.RESHAPES in facts_of(step) and index.guard and alike(before[-2:], after[-2:])
        drops = name_of(step) == "squeeze" and not all(isinstance(size, int) for size in before)
        if drops or not (regrouped or alike(before, after)):
            raise Obstacle(f"{step.name} changes the shape of the scores")
    if not all(len(shape) in (3, 4) for shape in shapes):
        raise Obstacle("the scores do not have 3 or 4 dimensions")
    if not all(described(mask.node).shape for mask in masks):
        raise Obstacle("a mask is one number")
    grouped = [shape[:2] for shape in shapes if len(shape) == 4]
    if not all(alike(grouped[0], sizes) for sizes in grouped):
        raise Obstacle("batch and heads are grouped in two ways")
    if not grouped or len(grouped) == len(shapes):
        return None
    heads = min(grouped, key=lambda sizes: not isinstance(sizes[1], int))
    if not any(isinstance(size, int) for size in heads):
        raise Obstacle("the number of heads is not known")
    return heads[0], heads[1]


def check_types(place: Sequence[Node], inputs: Sequence[Node], masks: Sequence[Mask]) -> None:
    """Raise an Obstacle if one call would compute in lower precision, or with other values of masks."""
    dtype = graph.dtype_of(place[-1])
    half = dtype in (torch.float16, torch.bfloat16)
    for node in (*inputs, *place):
        other = graph.dtype_of(node)
        if other != dtype and not (half and other == torch.float32 and node in place):
            raise Obstacle(f"{node.name} is in {other}, and the output in {dtype}")
    if dtype is None or not dtype.is_floating_point:
        raise Obstacle(f"{place[-1].name} is in {dtype}")
    for mask in masks:
        own = graph.dtype_of(mask.node)
        if own != (dtype if mask.fill is None else torch.bool):
            raise Obstacle(f"the mask {mask.node.name} is in {own}")
        if is_number(mask.fill) and mask.fill < torch.finfo(dtype).min:
            raise Obstacle(f"masked scores are {mask.fill}, which {dtype} cannot hold")
