"""Operators that give back what they take go."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fxopt import graph
from fxopt.graph_index import GraphIndex
from fxopt.memory import storage_of
from fxopt.operators import Fact, facts_of
from fxopt.rewriting.explanation import Refusal
from fxopt.rewriting.rewrite import ReversibleRewrite
from fxopt.rewriting.rewriter import Rewriter


@dataclasses.dataclass(frozen=True)
class RemoveIdentity(ReversibleRewrite[Node]):
    """Removes `nn.Identity`, inactive dropout, and views, casts and copies that change nothing.

    The trace tells which these are: the value is the same part of the same memory as the input. What depends on
    where a graph runs stays, as a move to the device of another tensor. A cast that changes nothing still says in
    which precision the model wants to compute: apply `ChangePrecision` before this pass, not after it.

    Example:
        >>> import torch
        >>> layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.1), torch.nn.Identity())
        >>> print(RemoveIdentity()(torch.fx.symbolic_trace(layers.eval())).code.strip())
        def forward(self, input):
            input_1 = input
            _0 = getattr(self, "0")(input_1);  input_1 = None
            return _0
    """

    preserves_computation = True

    def match(self, graph_module: GraphModule) -> Iterator[Node | Refusal]:
        """Yield the nodes that give back what they take."""
        index = GraphIndex(graph_module)
        for node in index.nodes:
            module = index.module(node) if node.op == "call_module" else None
            facts = facts_of(node, module)
            if Fact.VIEW not in facts:
                continue
            if Fact.RANDOM in facts and not index.memory.is_pure(node):
                yield Refusal(node, "it is active: the model is in training mode, or it works in place")
            elif _gives_back(node, module, facts) and index.memory.is_pure(node):
                reason = _obstacle(index, node, module)
                yield Refusal(node, reason) if reason else node

    def apply(self, rewriter: Rewriter, site: Node) -> Node:
        """Redirect the users of the node to its input."""
        value = site.all_input_nodes[0]
        rewriter.replace_uses(site, value)
        rewriter.erase(site)
        return value


def _obstacle(index: GraphIndex, node: Node, module: nn.Module | None) -> str | None:
    if module is not None:
        return index.reading_obstacle(node)
    writer = index.memory.written(node)  # autograd treats a write into a view otherwise
    if writer:
        return f"{writer.name} may write into it"
    return index.memory.write_between(node.all_input_nodes[0], node)  # a view without gradients has none


def _gives_back(node: Node, module: nn.Module | None, facts: Fact) -> bool:
    if Fact.RANDOM in facts or type(module) is nn.Identity:
        return True
    source = node.all_input_nodes[0]
    name = graph.function_name(node)
    if name in ("detach", "getattr", "as_strided") or (
        name == "contiguous" and not _is_always_contiguous(source)
    ):
        return False  # the trace shows neither gradients nor the strides that come with an input
    value, taken = graph.value_of(node), graph.value_of(source)
    known = isinstance(value, Tensor) and isinstance(taken, Tensor)
    return known and not _moves(node) and _view(value) == _view(taken)


def _moves(node: Node) -> bool:
    """Tell whether a call says on which device its value is to be."""
    others, name = (*node.args[1:], *node.kwargs.values()), graph.function_name(node)
    named = any(isinstance(value, Node | torch.device | str) for value in others)
    return name in ("cpu", "cuda") or (name in ("to", "type", "type_as") and named)


def _is_always_contiguous(node: Node) -> bool:
    while graph.function_name(node) in ("reshape", "view", "flatten", "unsqueeze"):
        node = node.all_input_nodes[0]
    return graph.function_name(node) == "contiguous" and len(node.args) + len(node.kwargs) == 1


def _view(value: Tensor) -> Any:
    """Which part of which memory a tensor is; free sizes are the same where they are written alike."""
    return storage_of(value), value.dtype, f"{value.shape} {value.stride()} {value.storage_offset()}"
