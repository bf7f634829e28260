"""Tensors that depend on no input are computed once, when the pass is applied."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from fxopt import graph
from fxopt.constants import Constant, computed_constant, constants_of, follows_buffers
from fxopt.errors import PassError
from fxopt.graph_index import GraphIndex
from fxopt.rewriting.explanation import Refusal
from fxopt.rewriting.rewrite import ReversibleRewrite
from fxopt.rewriting.rewriter import Rewriter
from fxopt.rewriting.weights import Left
from fxopt.submodules import free_path


@dataclasses.dataclass(frozen=True)
class FoldConstants(ReversibleRewrite[Node]):
    """Replaces tensors that depend on no input by buffers: position ids, causal masks, rotary tables.

    A tensor is constant where it is made of numbers, and of buffers that are not in the `state_dict`, by functions
    of torch. The device of an input counts as known: a folded graph module and its inputs are on one device. The
    buffers are not in the `state_dict`, either. `.half()` and the like cast a constant where they would have cast
    what it is made of.

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
        computed, described = dict[Node, Any](), graph.value_of(site)
        value = computed_constant(rewriter.graph_module, site, computed)
        if (value.dtype, value.shape) != (described.dtype, described.shape):
            raise PassError(
                f"{site.name} is {value.dtype} {[*value.shape]} here, and was {described.dtype} "
                f"{[*described.shape]} in the trace: apply the pass under the default dtype of the trace"
            )
        path = free_path(rewriter.graph_module, "", "constant")
        constant = Constant(value, follows_buffers(rewriter.graph_module, site, computed))
        rewriter.replace_module(path, constant, restore=_nothing)
        read = rewriter.create("get_attr", f"{path}.value", before=site, val=site.meta.get("val"))
        rewriter.replace_uses(site, read)
        for node in reversed(computed):
            if not node.users:
                rewriter.erase(node)
        return read

    def _obstacle(self, index: GraphIndex, node: Node) -> str | None:
        described = graph.value_of(node)
        if described.device.type == "meta":
            return "it is on the meta device"
        size = described.numel() * described.element_size()
        if not isinstance(size, int):
            return "its size is known only when the graph runs"
        writer = index.memory.written(node)
        if writer:
            return f"{writer.name} may write into it"
        if index.memory.is_returned(node):
            return "the graph returns its memory, which the caller may write into"
        return (
            f"it takes {size} bytes: more than max_bytes={self.max_bytes}" if size > self.max_bytes else None
        )


def _nothing(now: Mapping[str, Any], left: Mapping[str, Left]) -> dict[str, Any]:
    return {}
