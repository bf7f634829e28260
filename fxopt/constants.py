"""Values of a graph that are the same in every run, because they depend on no input."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fxopt import graph, submodules
from fxopt.graph_index import GraphIndex
from fxopt.operators import Fact, facts_of
from fxopt.submodules import attribute, split_path
from fxopt.torch_internals import non_persistent_of


class Constant(nn.Module):
    """Module that contains a constant of a graph, and moves to other devices with the graph module.

    Attributes:
        value: the constant; a buffer that is not in the `state_dict`.
        follows: whether `.half()` and the like convert the constant, as they convert the buffers it is computed from.
    """

    value: Tensor
    follows: bool = False

    def __init__(self, value: Tensor, follows: bool = False) -> None:
        super().__init__()
        self.follows = follows
        self.register_buffer("value", value, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Constant:
        before = self.value
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.value.dtype != before.dtype and not self.follows:
            self.value = before.to(self.value.device)
        return self


def constants_of(index: GraphIndex, freeze: bool = False) -> dict[Node, None]:
    """Find the nodes whose value is the same in every run of a graph, in order.

    These values are computed by functions of torch from numbers and from buffers that are not in the `state_dict`. The
    device of an input counts as known.

    Args:
        index: index of the graph.
        freeze: whether parameters, all buffers, and outputs of torch's layers for constant inputs count as constants.
    """
    found: dict[Node, None] = {}
    if any(map(graph.turns_autocast_on, index.nodes)):
        return found  # autocast chooses dtypes by the place of a call
    for node in index.nodes:
        if _is_constant(index, node, found, freeze):
            found[node] = None
    return found


def is_watched(value: nn.Module | Tensor) -> bool:
    """Tell whether writes into a tensor, or into those of a module, can be detected: inference tensors have no version."""
    return not any(tensor.is_inference() for tensor in submodules.weights_of(value))


def is_changing(value: Any, depth: int = 6) -> bool:
    """Tell whether a value is neither a finite number nor computed from parameters and buffers only."""
    if not isinstance(value, Node):
        return type(value) not in (int, float) or not math.isfinite(value)
    if value.op == "get_attr":
        return False
    inputs = value.all_input_nodes if value.op in ("call_function", "call_method") else []
    return not inputs or not depth or any(is_changing(each, depth - 1) for each in inputs)


def computed_constant(graph_module: GraphModule, node: Node, known: dict[Node, Any]) -> Any:
    """Compute a constant; values in `known` are reused, and new values are added to `known`."""
    if node in known:
        return known[node]
    first = graph.first_argument(node) if Fact.DESCRIBES in facts_of(node) else None

    def value_of(value: Node) -> Any:
        described = value is first and isinstance(graph.value_of(value), Tensor)
        return _empty(value) if described else computed_constant(graph_module, value, known)

    args, kwargs = map_arg((node.args, node.kwargs), value_of)
    with torch.inference_mode(False), torch.no_grad():
        if node.op == "get_attr":
            held = attribute(graph_module, str(node.target))
            known[node] = held.detach() if isinstance(held, nn.Parameter) else held.clone()
        else:
            module = graph.called_module(graph_module, node)
            known[node] = graph.called_with(node, module, args, kwargs)
    return known[node]


def follows_buffers(graph_module: GraphModule, node: Node, computed: Mapping[Node, Any]) -> bool:
    """Tell whether a constant would have a lower dtype if its buffers had that dtype.

    Args:
        graph_module: the graph module.
        node: the node of the constant.
        computed: the values of the constant and of all nodes that it depends on.
    """
    lower = torch.float16 if computed[node].dtype == torch.bfloat16 else torch.bfloat16
    lowered: dict[Node, Any] = {
        each: value.to(lower)
        for each, value in computed.items()
        if (each.op == "call_module" or (each.op == "get_attr" and _is_cast(graph_module, str(each.target))))
        and value.is_floating_point()
    }
    if not lowered or not computed[node].is_floating_point():
        return False
    try:
        return bool(computed_constant(graph_module, node, lowered).dtype == lower)
    except RuntimeError:  # the graph itself would not run in that dtype either
        return False


def _is_cast(graph_module: GraphModule, path: str) -> bool:
    """Tell whether `.half()` and the like convert the buffer at `path`."""
    owner = graph_module.get_submodule(split_path(path)[0])
    return not isinstance(owner, Constant) or owner.follows


def _is_constant(index: GraphIndex, node: Node, constants: Collection[Node], freeze: bool) -> bool:
    """Tell whether the value of a node is the same in every run of the graph."""
    if node.op == "get_attr" and freeze:
        held = submodules.find(index.graph_module, str(node.target))
        plain = type(held) in (Tensor, nn.Parameter) and is_watched(held)
        return plain and index.memory.written(node) is None
    if node.op == "get_attr":
        paths = [str(node.target), *(other for _, other in index.sharing(node))]
        holders = [(index.modules[owner], name) for owner, name in map(split_path, paths)]
        own = all(name in non_persistent_of(owner) for owner, name in holders)
        return own and index.memory.written(node) is None
    facts = facts_of(node)
    if not freeze and (node.op == "call_module" or Fact.MIXES in facts):
        return False
    if not index.memory.is_pure(node):
        return False
    if node.op == "call_module" and not (node.all_input_nodes and is_watched(index.module(node))):
        return False
    # A value in memory that any node writes is not constant, even if the write comes later in the graph.
    changing = [v for v in node.all_input_nodes if v not in constants or index.memory.written(v)]
    if Fact.DESCRIBES in facts and Fact.LAYOUT not in facts:
        return changing in ([], [graph.first_argument(node)]) and _is_described(index, node)
    return not changing


def _is_described(index: GraphIndex, node: Node) -> bool:
    """Tell whether the capture recorded everything that a node reads about its first input."""
    first = graph.first_argument(node)
    value = graph.value_of(first) if isinstance(first, Node) else None
    if not isinstance(value, Tensor):
        return False
    fixed = index.guard is not None and all(isinstance(size, int) for size in value.shape)
    return fixed or (node.target is getattr and node.args[1] in ("device", "dtype", "ndim"))


def _empty(node: Node) -> Tensor:
    """Make an empty tensor with the shape, dtype, device and known strides of a value; free sizes, which are not read, are 1."""
    value = graph.value_of(node)
    shape = [size if isinstance(size, int) else 1 for size in value.shape]
    if all(isinstance(number, int) for number in (*value.shape, *value.stride())):
        return torch.empty_strided(shape, value.stride(), dtype=value.dtype, device=value.device)
    return torch.empty((), dtype=value.dtype, device=value.device).expand(shape)
