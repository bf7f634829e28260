"""What depends on no input is computed once, when the pass is applied."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fxopt import graph
from fxopt.constants import computed_constant, constants_of
from fxopt.graph_index import GraphIndex
from fxopt.rewriting.explanation import Refusal
from fxopt.rewriting.rewrite import ReversibleRewrite
from fxopt.rewriting.rewriter import Rewriter


@dataclasses.dataclass(frozen=True)
class FoldConstants(ReversibleRewrite[Node]):
    """Replaces tensors that depend on no input by buffers: position ids, causal masks, rotary tables.

    A tensor is constant where it is made of numbers, and of buffers that are not in the `state_dict`, by functions
    of torch. The device of an input counts as known: a folded graph module and its inputs are on one device. The
    buffers are not in the `state_dict`, either.

    Args:
        max_bytes: a tensor that takes more memory is left alone.

    Example:
        >>> import fxopt, torch
        >>> class Positions(torch.nn.Module):
        ...     def forward(self, x):
        ...         return x + torch.arange(4) * 2
        >>> folded = FoldConstants()(fxopt.trace(Positions(), (torch.ones(4),)))
        >>> print(folded.code.strip())
        def forward(self, x):
            input_guard = self.input_guard(x = x);  input_guard = None
            constant_value = self.constant.value
            add = x + constant_value;  x = constant_value = None
            return add
    """

    max_bytes: int = 2**20

    preserves_computation = True

    def match(self, graph_module: GraphModule) -> Iterator[Node | Refusal]:
        """Yield the constants that something else than a constant uses."""
        index = GraphIndex(graph_module)
        constants = constants_of(index)
        for node in constants:
            needed = any(user not in constants for user in node.users)
            if needed and node.op != "get_attr" and isinstance(graph.value_of(node), Tensor):
                reason = self._obstacle(index, node)
                yield Refusal(node, reason) if reason else node

    def apply(self, rewriter: Rewriter, site: Node) -> Node:
        """Compute the constant, let a buffer take its place, and erase what nothing needs any more."""
        holder, computed = nn.Module(), dict[Node, Any]()
        value = computed_constant(rewriter.graph_module, site, computed)
        holder.register_buffer("value", value, persistent=False)
        path = rewriter.add_module("", "constant", holder)
        read = rewriter.create("get_attr", f"{path}.value", before=site, val=site.meta.get("val"))
        rewriter.replace_uses(site, read)
        for node in reversed(computed):
            if not node.users:
                rewriter.erase(node)
        return read

    def _obstacle(self, index: GraphIndex, node: Node) -> str | None:
        size = graph.value_of(node).numel() * graph.value_of(node).element_size()
        writer = index.memory.written(node)
        if writer:
            return f"{writer.name} may write into it"
        if index.memory.is_returned(node):
            return "the graph returns its memory, which the caller may write into"
        return (
            f"it takes {size} bytes: more than max_bytes={self.max_bytes}" if size > self.max_bytes else None
        )
