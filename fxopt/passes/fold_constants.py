"""What depends on no input is computed once, when the pass is applied."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fxopt import graph
from fxopt.graph_index import GraphIndex
from fxopt.operators import Fact, facts_of
from fxopt.rewriting.explanation import Refusal
from fxopt.rewriting.rewrite import ReversibleRewrite
from fxopt.rewriting.rewriter import Rewriter
from fxopt.submodules import attribute, split_path


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
        constants: dict[Node, None] = {}
        for node in index.nodes:
            if _is_constant(index, node, constants):
                constants[node] = None
        for node in constants:
            needed = any(user not in constants for user in node.users)
            if needed and node.op != "get_attr" and isinstance(graph.value_of(node), Tensor):
                reason = self._obstacle(index, node)
                yield Refusal(node, reason) if reason else node

    def apply(self, rewriter: Rewriter, site: Node) -> Node:
        """Compute the constant, let a buffer take its place, and erase what nothing needs any more."""
        holder, computed = nn.Module(), dict[Node, Any]()
        with torch.no_grad():
            value = _value(rewriter.graph_module, site, computed)
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


def _is_constant(index: GraphIndex, node: Node, constants: Collection[Node]) -> bool:
    """Tell whether a node gives the same in every run of the graph."""
    if node.op == "get_attr":
        path, name = split_path(str(node.target))
        owner = index.modules[path]
        return name in owner._non_persistent_buffers_set and index.memory.written(node) is None
    facts = facts_of(node)
    if node.op == "call_module" or Fact.MIXES in facts or not index.memory.is_pure(node):
        return False
    changing = [value for value in node.all_input_nodes if value not in constants]
    if Fact.DESCRIBES in facts and Fact.LAYOUT not in facts:
        return changing in ([], node.all_input_nodes[:1]) and _is_described(node)
    return not changing


def _is_described(node: Node) -> bool:
    """Tell whether the trace knows all that a node reads of its first input."""
    value = graph.value_of(node.all_input_nodes[0])
    if not isinstance(value, Tensor):
        return False
    free = not all(isinstance(size, int) for size in value.shape)
    return not free or (node.target is getattr and node.args[1] in ("device", "dtype", "ndim"))


def _value(graph_module: GraphModule, node: Node, known: dict[Node, Any]) -> Any:
    """Compute a constant; what is `known` already is not computed again."""
    if node not in known:
        described = node.all_input_nodes[:1] if Fact.DESCRIBES in facts_of(node) else []

        def value_of(value: Node) -> Any:
            return _empty(value) if value in described else _value(graph_module, value, known)

        args, kwargs = map_arg(node.args, value_of), map_arg(node.kwargs, value_of)
        if node.op == "get_attr":
            known[node] = attribute(graph_module, str(node.target)).clone()
        elif node.op == "call_method":
            known[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        elif callable(node.target):
            known[node] = node.target(*args, **kwargs)
    return known[node]


def _empty(node: Node) -> Tensor:
    """A tensor of the shape, dtype and device of a value; a free size, which nobody reads, is 1."""
    value = graph.value_of(node)
    shape = [size if isinstance(size, int) else 1 for size in value.shape]
    return torch.empty((), dtype=value.dtype, device=value.device).expand(shape)
