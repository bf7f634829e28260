"""Computes tensors that depend on no input once, when the pass is applied."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fxopt import graph, submodules
from fxopt.constants import Constant, computed_constant, constants_of, follows_buffers
from fxopt.errors import PassError
from fxopt.graph_index import GraphIndex
from fxopt.obstacles.input_dtypes import input_of_any_dtype
from fxopt.obstacles.parametrized import computes_weights, plain_obstacle, with_computed_weights
from fxopt.operators import Fact, facts_of, name_of
from fxopt.rewriting.explanation import Refusal
from fxopt.rewriting.rewrite import ReversibleRewrite
from fxopt.rewriting.rewriter import Rewriter
from fxopt.rewriting.weights import Left


@dataclasses.dataclass(frozen=True)
class FoldConstants(ReversibleRewrite[Node]):
    """Replaces tensors that depend on no input by buffers: position ids, causal masks, rotary tables.

    A tensor is constant if functions of torch compute it from numbers, and from buffers that are not in the `state_dict`. The
    device of an input counts as known: a folded graph module and its inputs are on one device. The dtype of an input does
    not, if the graph accepts several: `torch.ones_like(x)` stays. The new buffers are not in the `state_dict` either.
    `.half()` and the like cast a constant if they would have cast the buffers that it was computed from.

    Args:
        max_bytes: larger tensors are skipped; with `freeze`, unless the weights that they are computed from are as large.
        freeze: whether parameters, all buffers, and outputs of layers for these are constants, too, as in `torch.jit.freeze`.
            A later change of the weights does not affect folded values. Linear layers and convolutions with `weight_norm`, or
            another parametrization of torch's own, become plain layers.

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
    freeze: bool = False

    preserves_computation = True

    def match(self, graph_module: GraphModule) -> Iterator[Node | Refusal]:
        """Yield the constants that have a user that is not constant."""
        index = GraphIndex(graph_module)
        for node in index.calls_like(nn.Module) if self.freeze else ():
            if computes_weights(index.module(node)):
                reason = plain_obstacle(index, node)
                yield Refusal(node, reason) if reason else node
        constants = constants_of(index, self.freeze)
        for node in constants:
            needed = any(user not in constants for user in node.users) and not self._is_weight(index, node)
            if needed and node.op != "get_attr" and isinstance(graph.value_of(node), Tensor):
                reason = self._obstacle(index, node)
                yield Refusal(node, reason) if reason else node

    def apply(self, rewriter: Rewriter, site: Node) -> Node:
        """Compute the constant, replace it by a buffer, and erase nodes that are no longer used."""
        called = graph.called_module(rewriter.graph_module, site)
        if called is not None and computes_weights(called):
            rewriter.replace_module(str(site.target), with_computed_weights(called))
            return site
        computed, described = dict[Node, Any](), graph.value_of(site)
        value = computed_constant(rewriter.graph_module, site, computed)
        if (value.dtype, value.shape) != (described.dtype, described.shape):
            raise PassError(
                f"{site.name} is {value.dtype} {[*value.shape]} here, and was {described.dtype} "
                f"{[*described.shape]} in the trace: apply the pass under the default dtype of the trace"
            )
        constant = Constant(value, follows_buffers(rewriter.graph_module, site, computed))
        path = rewriter.add_module("", "constant", constant, restore=_nothing)
        read = rewriter.create("get_attr", f"{path}.value", before=site, val=site.meta.get("val"))
        rewriter.replace_uses(site, read)
        for node in reversed(computed):
            if not node.users:
                rewriter.erase(node)
        return read

    def _is_weight(self, index: GraphIndex, node: Node) -> bool:
        """Tell whether a value may be a view of a weight, which costs nothing to compute."""
        return self.freeze and any(each.op == "get_attr" for each in index.memory.aliases(node))

    def _obstacle(self, index: GraphIndex, node: Node) -> str | None:
        described = graph.value_of(node)
        if described.device.type == "meta":
            return "it is on the meta device"
        if described.requires_grad and not self.freeze:
            return "it requires gradients"
        size = described.numel() * described.element_size()
        if not isinstance(size, int):
            return "its size is known only when the graph runs"
        free = next(filter(None, (input_of_any_dtype(index, each) for each in _giving_dtypes(node))), None)
        if free is not None:
            return f"the input {free.name} may come in another dtype, and gives this its own"
        writer = index.memory.written(node)
        if writer:
            return f"{writer.name} may write into it"
        if index.memory.is_returned(node):
            return "the graph returns its memory, which the caller may write into"
        if size <= self.max_bytes or (self.freeze and size <= _bytes_of_weights(index, node)):
            return None
        return f"it takes {size} bytes: more than max_bytes={self.max_bytes}"


def _made_of(node: Node) -> list[Node]:
    """The inputs of a constant, without a tensor of which it reads only the shape, dtype or device."""
    described = graph.first_argument(node) if Fact.DESCRIBES in facts_of(node) else None
    return [value for value in node.all_input_nodes if value is not described]


def _giving_dtypes(node: Node) -> Iterator[Node]:
    """Yield the tensors whose dtype a constant depends on."""
    for each in graph.reached([node], _made_of):
        facts, first = facts_of(each), graph.first_argument(each)
        reads = Fact.KEEPS_DTYPE in facts or name_of(each) in ("dtype", "is_floating_point", "is_complex")
        named = isinstance(each.kwargs.get("dtype"), torch.dtype)
        if Fact.DESCRIBES in facts and reads and not named and isinstance(first, Node):
            yield first


def _bytes_of_weights(index: GraphIndex, node: Node) -> int:
    """The size in bytes of the parameters and buffers that a constant is computed from."""
    parts = [each for each in graph.reached([node], _made_of) if each.op in ("get_attr", "call_module")]
    held = {path: submodules.find(index.graph_module, path) for path in map(str, (n.target for n in parts))}
    tensors = submodules.tensors_of(held)
    return sum({id(tensor): tensor.nbytes for _, tensor in tensors}.values())


def _nothing(now: Mapping[str, Any], left: Mapping[str, Left]) -> dict[str, Any]:
    return {}
