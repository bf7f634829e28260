"""Removes operators that return their input unchanged."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fxopt import graph
from fxopt.graph_index import GraphIndex
from fxopt.obstacles.input_dtypes import CASTS, input_of_any_dtype
from fxopt.operators import Fact, facts_of, reads_bits
from fxopt.rewriting.explanation import Refusal
from fxopt.rewriting.rewrite import ReversibleRewrite
from fxopt.rewriting.rewriter import Rewriter


@dataclasses.dataclass(frozen=True)
class RemoveIdentity(ReversibleRewrite[Node]):
    """Removes `nn.Identity`, inactive dropout, and views, casts and copies that change nothing.

    A view is removed if it has the shape of its input, in a graph that checks the sizes of its inputs, as those of
    `fxopt.trace` do. Moves to another device stay, and so do nodes that depend on strides. A cast that changes nothing still
    shows the precision in which the model wants to compute: apply `ChangePrecision` before this pass, not after it.

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
        """Yield the nodes that return their input unchanged."""
        index = GraphIndex(graph_module)
        for node in index.nodes:
            module = index.called(node)
            facts = facts_of(node, module)
            candidate = Fact.VIEW in facts or graph.function_name(node) == "pad"
            if not candidate or node.all_input_nodes[:1] != [graph.first_argument(node)]:
                continue  # `nn.Identity` accepts anything: tuples, dicts, None
            if Fact.RANDOM in facts and not index.memory.is_pure(node):
                yield Refusal(node, "it is active: the model is in training mode, or it works in place")
            elif _gives_back(index, node, module, facts) and index.memory.is_pure(node):
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
        return index.removing_obstacle(node)
    if graph.function_name(node) in CASTS:
        free = input_of_any_dtype(index, node.all_input_nodes[0])
        if free is not None:
            return f"the input {free.name} may come in another dtype, from which this casts"
    source, memory = node.all_input_nodes[0], index.memory
    made_here = not any(each.op in ("placeholder", "get_attr") for each in memory.aliases(source))
    returned = memory.is_returned(node) and Fact.RANDOM not in facts_of(node)
    if returned and (graph.function_name(node) == "pad" or not made_here):
        return "the graph returns it, which is a copy, or a view of an input or weight"
    # Autograd treats a write into a view differently, and a copy does not see a write into its source.
    writer = memory.written(node) or memory.written(source)
    if writer:
        return f"{writer.name} may write into it"
    if index.graph_module.graph.output_node() in source.users.keys() & node.users.keys():
        return f"the graph returns it beside {source.name}"
    # Under `no_grad`, a view has no gradients, so no mode may change between the value and the view. A parameter, or a
    # tensor in a container, is older than the node that reads it.
    older = not (source.all_input_nodes and isinstance(graph.value_of(source.all_input_nodes[0]), Tensor))
    return memory.write_between(index.guard or index.nodes[0] if older else source, node)


def _gives_back(index: GraphIndex, node: Node, module: nn.Module | None, facts: Fact) -> bool:
    if Fact.RANDOM in facts or type(module) is nn.Identity:
        return True
    name, source = graph.function_name(node), node.all_input_nodes[0]
    value, taken = graph.value_of(node), graph.value_of(source)
    if not isinstance(value, Tensor) or not isinstance(taken, Tensor):
        return False
    if name == "contiguous":
        return _is_always_contiguous(source) and len(node.args) + len(node.kwargs) == 1
    options = (*node.args[1:], *node.kwargs.values())
    if name == "pad":
        same = str((value.shape, value.stride())) == str((taken.shape, taken.stride()))
        return same and not any(graph.argument(node, "pad") or [1])
    if name in CASTS:
        return value.dtype == taken.dtype and all(isinstance(option, torch.dtype) for option in options)
    if reads_bits(node):
        return False  # even for the same dtype, `view(dtype)` has no gradients
    # With the same shape, the value is the same, whatever the strides. Free sizes are equal if their expressions are.
    same = value.dtype == taken.dtype and str(value.shape) == str(taken.shape) and index.guard is not None
    # `squeeze` also drops a free size that is 1 in a later run.
    reshapes = name != "squeeze" and (Fact.RESHAPES in facts_of(node) or name == "expand")
    return same and (reshapes or (name == "getitem" and _takes_all(node.args[1])))


def _takes_all(key: object) -> bool:
    keys = key if isinstance(key, tuple) else (key,)
    return all(item is Ellipsis or (isinstance(item, slice) and item.step in (None, 1)) for item in keys)


def _is_always_contiguous(node: Node) -> bool:
    while graph.function_name(node) in ("reshape", "view", "flatten", "unsqueeze"):
        node = node.all_input_nodes[0]
    return graph.function_name(node) == "contiguous" and len(node.args) + len(node.kwargs) == 1
