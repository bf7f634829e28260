"""Replaces attention that is written out by one call."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from fxopt import graph
from fxopt.attention.attention_reader import Attention, AttentionReader
from fxopt.attention.attention_steps import Obstacle, swaps_last
from fxopt.attention.masks import Mask, MaskReader
from fxopt.graph_index import GraphIndex
from fxopt.rewriting.explanation import Refusal
from fxopt.rewriting.rewrite import ReversibleRewrite
from fxopt.rewriting.rewriter import Rewriter


@dataclasses.dataclass(frozen=True)
class FuseAttention(ReversibleRewrite[Attention]):
    """Replaces attention that is written out by `torch.nn.functional.scaled_dot_product_attention`.

    The pass finds `softmax(query @ key.transpose(-2, -1) * scale + mask, dim=-1) @ value` in its usual spellings, with three
    or four dimensions and views between its steps. The call gets the name of the product with the values. Masks are added to
    the scores as numbers, even if they were booleans.

    The call is as exact as the original in float32 and float64, and more exact in float16 and bfloat16, because it rounds
    fewer intermediate values.

    If a row of scores is masked entirely, the call may have another output or other gradients in these cases: scores are set
    to a value (`masked_fill`); a mask contains -inf, or on a GPU the least float32; the sum of two masks overflows to -inf;
    the dtype is float16; a mask contains -1e4 or less in training mode. The pass refuses such masks. It accepts a single
    constant mask with a key in each row, as in causal attention, and other masks with `each_row_has_a_key` or `inference`.
    The pass does not check masks that are inputs: for a row of -inf, the original gives NaN, and the call zeros. The same
    holds for a row of queries that is NaN. In eval mode, a row that is masked entirely by -1e4 or less has other gradients.
    The kernels of the CPU have neither second nor forward-mode derivatives.

    Attributes:
        each_row_has_a_key: assert that no row is masked entirely in any run. Random masks of `verify=True` may have such rows.
        inference: assert that no run records gradients, and that parameters and buffers do not change. Then masks computed
            from them are constants, and on the CPU a mask that sets scores to a finite number is accepted.

    Example:
        >>> import fxopt, torch
        >>> class Attention(torch.nn.Module):
        ...     def forward(self, query, key, value):
        ...         scores = query @ key.transpose(-2, -1) / 2
        ...         return scores.softmax(dim=-1) @ value
        >>> traced = fxopt.trace(Attention(), (torch.ones(1, 2, 5, 4),) * 3)
        >>> FuseAttention()(traced).graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)
        [scaled_dot_product_attention]
    """

    each_row_has_a_key: bool = False
    inference: bool = False

    preserves_computation = True

    def match(self, graph_module: GraphModule) -> Iterator[Attention | Refusal]:
        """Yield the sites of attention, and refusals for similar computations."""
        index = GraphIndex(graph_module)
        reader = AttentionReader(index, MaskReader(index, self.each_row_has_a_key, self.inference))
        for place in reader.places():
            try:
                found: Attention | Refusal = reader.read(place)
            except Obstacle as obstacle:
                found = Refusal(place[-1], str(obstacle))
            if isinstance(found, Attention) and (reason := _slower(found)):
                found = Refusal(found.node, reason)
            yield found

    def apply(self, rewriter: Rewriter, site: Attention) -> Node:
        """Replace the product with the values by the call, and erase the other nodes."""
        builder, last = _Builder(rewriter, site), site.node
        inputs = [builder.with_heads(node) for node in (site.query, builder.key(), site.value)]
        mask = builder.mask(inputs[0])
        options = {**({"attn_mask": mask} if mask else {}), "dropout_p": 0.0, "scale": site.scale}
        value = graph.value_of(last)
        joined = value.dim() == 3
        shape = (*(site.heads or (1, value.shape[0])), *value.shape[1:]) if joined else value.shape
        attention, described = F.scaled_dot_product_attention, graph.like(value, shape)
        node = rewriter.create("call_function", attention, tuple(inputs), options, before=last, val=described)
        if joined:
            node = rewriter.create(
                "call_method", "flatten", (node, 0, 1), before=last, val=graph.like(value, value.shape)
            )
        # Kernels choose the layout of their output, and a product is contiguous.
        rewriter.set(last, op="call_method", target="contiguous", args=(node,), kwargs={})
        for step in reversed(site.steps):
            rewriter.erase(step)
        if not site.key.users:
            rewriter.erase(site.key)  # the transposition of the keys
        return last


def _slower(site: Attention) -> str | None:
    """Return why torch would use its slow path on the CPU, which takes longer than the original; None if it would not."""
    query, key, value = (graph.value_of(node) for node in (site.query, site.key, site.value))
    if query.device.type != "cpu":
        return None
    steps = [query.stride()[-1], key.stride()[-2 if site.turned else -1], value.stride()[-1]]
    if any(str(step) != "1" for step in steps):
        return "the rows of its queries, keys or values have gaps, which torch's fused kernel does not take"
    if str(query.shape[-1]) != str(value.shape[-1]):
        return "its values have another width than its queries, which torch's fused kernel does not take"
    return None


class _Builder:
    """Creates the arguments of the call, before the product with the values."""

    def __init__(self, rewriter: Rewriter, attention: Attention) -> None:
        self._rewriter = rewriter
        self._attention = attention

    def key(self) -> Node:
        """The keys as (..., S, E)."""
        key = self._attention.key
        if not self._attention.turned:
            return key
        return key.all_input_nodes[0] if swaps_last(key) else self._made("transpose", key, -2, -1)

    def with_heads(self, node: Node, split: bool = True) -> Node:
        """A value with four dimensions: the first of three is split into batch and heads, or a dimension is added before it."""
        front, heads = graph.value_of(node).shape[:-2], self._attention.heads
        if len(front) == 2:
            return node
        if not split or not heads or str(*front) == "1":
            return self._made("unsqueeze", node, 0)
        batch, count = heads
        return self._made("unflatten", node, 0, (-1, count) if isinstance(count, int) else (batch, -1))

    def mask(self, query: Node) -> Node | None:
        """The sum of all masks; None without one."""
        total: Node | None = None
        for mask in self._attention.masks:
            node = self._with_rows(mask)
            if mask.fill is None:
                total = node if total is None else self._made(operator.add, total, node)
            else:
                total = total or self._made("new_zeros", query, ())
                chosen = (mask.fill, total) if mask.where else (total, mask.fill)
                total = self._made(torch.where, node, *chosen)
        return total

    def _with_rows(self, mask: Mask) -> Node:
        """A mask with two or four dimensions, as the kernels require."""
        rank = graph.rank_of(mask.node)
        if rank == 1:
            return self._made("unsqueeze", mask.node, 0)
        return self.with_heads(mask.node, graph.rank_of(mask.step) == 3) if rank == 3 else mask.node

    def _made(self, target: Any, *args: Any) -> Node:
        op = "call_method" if isinstance(target, str) else "call_function"
        return self._rewriter.create(op, target, args, before=self._attention.node)
