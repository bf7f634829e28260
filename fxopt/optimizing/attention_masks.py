"""Masks of booleans in the function of a graph are made ready once for all layers, and left out where they mask nothing.

The kernel of attention turns such a mask into numbers in each call, and adds it even where it adds zeros.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node

from fxopt import graph
from fxopt.graph import alike
from fxopt.graph_index import GraphIndex


def ready_mask(mask: Tensor, dtype: torch.dtype) -> Tensor | None:
    """The numbers that a mask of booleans adds to scores of a dtype; None where these are all zeros.

    Example:
        >>> import torch
        >>> ready_mask(torch.tensor([[True, False]]), torch.float32)
        tensor([[0., -inf]])
        >>> ready_mask(torch.tensor([[True, True]]), torch.float32)
    """
    if mask.all():
        return None
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)


class AttentionMasks:
    """Writes calls of attention with masks of booleans into a graph of functions.

    Args:
        index: of the graph that these come from.
        made: the graph of functions.
        known: the nodes of that for those of the other.
    """

    def __init__(self, index: GraphIndex, made: Graph, known: dict[Node, Node]) -> None:
        self._index, self._made, self._known = index, made, known
        self._ready: dict[tuple[Node, object], tuple[Node, Node]] = {}

    def write(self, node: Node) -> Node | None:
        """Write the call in the place of `node`; None where it is another one, or its mask changes between two calls."""
        mask, key = _boolean_mask(node), graph.dtype_of(node)
        if mask is None:
            return None
        if (mask, key) not in self._ready:
            made = self._made.create_node("call_function", ready_mask, (self._known[mask], key), {})
            self._ready[mask, key] = node, made
        first, ready = self._ready[mask, key]
        if first is not node and self._index.memory.write_between(first, node, mask):
            return None
        called = self._made.node_copy(node, self._known.__getitem__)
        called.replace_input_with(self._known[mask], ready)
        return called


def _boolean_mask(node: Node) -> Node | None:
    """The mask of a call of attention whose kernel, and so the layout of its output, is the same without it."""
    if node.op != "call_function" or node.target is not F.scaled_dot_product_attention:
        return None
    mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
    if not isinstance(mask, Node) or graph.dtype_of(mask) is not torch.bool:
        return None
    query, output = graph.value_of(node.all_input_nodes[0]), graph.value_of(node)
    if not isinstance(output, Tensor) or query.dim() != 4 or output.device.type != "cpu":
        return None
    _, heads, length, width = output.shape
    # Torch has two kernels, of which only the fused one, for which the mask is no obstacle, gives this layout.
    fused = alike(output.stride(), (length * heads * width, width, heads * width, 1))
    return mask if fused and alike(query.shape, output.shape) and query.dtype == output.dtype else None
