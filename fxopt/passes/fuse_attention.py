"""Attention that is written out becomes one call."""

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
    """Computes attention that is written out by `torch.nn.functional.scaled_dot_product_attention`.

    Written out is `softmax(query @ key.transpose(-2, -1) * scale + mask, dim=-1) @ value` in its usual spellings, with three
    or four dimensions, and with views between two of them. The call takes the name of the product with the values. Masks stay
    what they are, numbers that are added, also where they were booleans.

    The call is as exact in float32 and float64 as what it takes the place of, and in float16 and bfloat16 it is more exact,
    because it rounds less on the way.

    A row of scores that is masked entirely gives something else, or has other gradients, where scores are set to a value
    (`masked_fill`), where a mask holds -inf, on a GPU also the least float32, where two masks that are added in turn make
    -inf, in float16, and in training mode where a mask holds -1e4 or less. Such masks are refused, but for a single constant
    one with a key in each row, as in causal attention, and with `each_row_has_a_key` or `inference`. A mask that comes in from
    outside is not looked at: a row of it that is -inf gives NaN when it is written out, and zeros from the call. So does a row
    of queries that is NaN.
    In eval mode, a row that a mask of -1e4 or less hides entirely has other gradients. The kernels of the CPU have no second
    derivatives, and none in forward mode.

    Attributes:
        each_row_has_a_key: tell that no row is masked entirely in any run. Random masks of `verify=True` may have such rows.
        inference: tell that no run records gradients, and that parameters and buffers stay as they are: a mask that is made of
            them is a constant, and one that sets scores to a finite number is rewritten on the CPU.

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
        """Yield what is attention, and refuse what looks like it."""
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
        """Put the call in the place of the product with the values, and erase the other nodes."""
        builder, last = _Builder(rewriter, site), site.node
        inputs = [builder.with_heads(node) for node in (site.query, builder.key(), site.value)]
        mask = builder.mask(inputs[0])
        options = {"attn_mask": mask} if mask else {}
        call: Any = {
            "op": "call_function",
            "target": F.scaled_dot_product_attention,
            "args": tuple(inputs),
            "kwargs": {**options, "dropout_p": 0.0, "scale": site.scale},
        }
        shape = whole = graph.value_of(last).shape
        if len(whole) == 3:
            shape = (*(site.heads or (1, whole[0])), *whole[1:])
        for method in ["flatten"] * (len(whole) == 3) + ["contiguous"] * site.contiguous:
            node = rewriter.create(**call, before=last, val=graph.like(graph.value_of(last), shape))
            shape = whole
            call = {"op": "call_method", "target": method, "args": (node,), "kwargs": {}}
            call["args"] += (0, 1) if method == "flatten" else ()
        rewriter.set(last, **call)
        for step in reversed(site.steps):
            rewriter.erase(step)
        if not site.key.users:
            rewriter.erase(site.key)  # which was only turned
        return last


def _slower(site: Attention) -> str | None:
    """Why torch would compute one call on the CPU by its slow path, which takes longer than what is written out."""
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
    """Makes what the call takes, in front of the product with the values."""

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
        """A value with four dimensions: those of three are split into batch and heads, or get one in front."""
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
        """A mask with two or four dimensions, as the kernels take it."""
        rank = graph.rank_of(mask.node)
        if rank == 1:
            return self._made("unsqueeze", mask.node, 0)
        return self.with_heads(mask.node, graph.rank_of(mask.step) == 3) if rank == 3 else mask.node

    def _made(self, target: Any, *args: Any) -> Node:
        op = "call_method" if isinstance(target, str) else "call_function"
        return self._rewriter.create(op, target, args, before=self._attention.node)
