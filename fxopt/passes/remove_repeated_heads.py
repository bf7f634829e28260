"""Removes the copies of key and value heads that attention does not need."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from fxopt import graph
from fxopt.graph import alike
from fxopt.graph_index import GraphIndex
from fxopt.operators import name_of
from fxopt.rewriting.explanation import Refusal
from fxopt.rewriting.rewrite import ReversibleRewrite
from fxopt.rewriting.rewriter import Rewriter
from fxopt.rewriting.spelling import call_of


@dataclasses.dataclass(frozen=True)
class RepeatedHeads:
    """A call of `scaled_dot_product_attention`, and the steps that repeat the heads of its keys and values."""

    node: Node
    keys: tuple[Node, ...]
    values: tuple[Node, ...]


@dataclasses.dataclass(frozen=True)
class RemoveRepeatedHeads(ReversibleRewrite[RepeatedHeads]):
    """Removes copies of key and value heads before `scaled_dot_product_attention`, which supports groups of heads.

    `repeat_kv` of transformers and similar functions make such copies: `x[:, :, None].expand(...).reshape(...)`. Without the
    copies the call gets `enable_gqa=True`. On the CPU its kernel then computes the same values, bit for bit, and reads less
    memory. On other devices some kernels do not support groups: these sites are refused.

    Example:
        >>> import fxopt, torch
        >>> class Attention(torch.nn.Module):
        ...     def forward(self, query, key):
        ...         key = key[:, :, None].expand(1, 2, 3, 5, 4).reshape(1, 6, 5, 4)
        ...         return torch.nn.functional.scaled_dot_product_attention(query, key, key)
        >>> traced = fxopt.trace(Attention(), (torch.ones(1, 6, 5, 4), torch.ones(1, 2, 5, 4)))
        >>> print(RemoveRepeatedHeads()(traced).graph.output_node().args[0].format_node())
        %scaled_dot_product_attention : [num_users=1] = call_function[target=torch._C._nn.scaled_dot_product_attention](args = (%query, %key, %key), kwargs = {enable_gqa: True})
    """

    preserves_computation = True

    def match(self, graph_module: GraphModule) -> Iterator[RepeatedHeads | Refusal]:
        """Yield the calls whose keys and values both have repeated heads."""
        index = GraphIndex(graph_module)
        for node in index.nodes:
            call = call_of(node) if name_of(node) == "scaled_dot_product_attention" else None
            if call is None:
                continue
            query, key, value = (call.arguments.get(name) for name in ("query", "key", "value"))
            keys, values = _repeating(key), _repeating(value)
            if not keys or not values:
                continue
            site = RepeatedHeads(node, keys, values)
            reason = _obstacle(index, site, query)
            yield Refusal(node, reason) if reason else site

    def apply(self, rewriter: Rewriter, site: RepeatedHeads) -> Node:
        """Pass the original heads to the call, and erase the steps that repeat them."""
        node = site.node
        for steps in (site.keys, site.values):
            rewriter.replace_input(node, steps[-1], steps[0].all_input_nodes[0])
        rewriter.set(node, kwargs={**node.kwargs, "enable_gqa": True})
        for step in reversed(dict.fromkeys((*site.keys, *site.values))):
            if not step.users:
                rewriter.erase(step)
        return node


def _repeating(node: Any) -> tuple[Node, ...]:
    """The steps that repeat each head of (batch, heads, length, width), in order; empty if `node` is not made this way."""
    steps: list[Node] = []
    for names in (("reshape", "flatten", "view"), ("expand",), ("unsqueeze", "getitem")):
        if not isinstance(node, Node) or name_of(node) not in names:
            return ()
        steps.insert(0, node)
        node = node.args[0]
    heads, grouped, copied, flat = map(_sizes, (node, *steps))
    if len(heads) != 4 or len(copied) != 5 or not _only_slices(steps[0]):
        return ()
    batch, count, *rest = heads
    # These operators keep the order of elements, so the shapes determine what they compute.
    fits = alike(grouped, (batch, count, 1, *rest)) and alike(copied, (batch, count, copied[2], *rest))
    return tuple(steps) if fits and alike(flat, (batch, count * copied[2], *rest)) else ()


def _only_slices(node: Node) -> bool:
    """Tell whether a node takes only slices, so that the order of elements does not change."""
    keys = node.args[1] if isinstance(node.args[1], tuple) else node.args[1:]
    return name_of(node) != "getitem" or all(
        key in (None, Ellipsis) or isinstance(key, slice) for key in keys
    )


def _obstacle(index: GraphIndex, site: RepeatedHeads, query: Any) -> str | None:
    node, described = site.node, graph.value_of(site.node)
    if not isinstance(described, Tensor) or described.device.type != "cpu":
        return "kernels of other devices than the CPU may take no groups"
    if index.guard is None:
        return "nobody checks its sizes, which may be others in a run: capture the model with fxopt.trace"
    for steps in (site.keys, site.values):
        if not alike(_sizes(steps[-1])[:2], _sizes(query)[:2]):
            return "queries, keys and values are broadcast to each other"
        source = steps[0].all_input_nodes[0]
        reason = index.memory.write_between(steps[0], node, source) or index.keeping_obstacle(node, source)
        if reason:
            return reason
    return None


def _sizes(node: Any) -> tuple[Any, ...]:
    value = graph.value_of(node) if isinstance(node, Node) else None
    return tuple(value.shape) if isinstance(value, Tensor) else ()
