"""Removes copies into torch's default layout if no later node depends on the layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor
from torch.fx import GraphModule, Node

from fxopt import graph
from fxopt.graph_index import GraphIndex
from fxopt.obstacles.layouts import value_with
from fxopt.operators import Fact, facts_of, name_of
from fxopt.rewriting.explanation import Refusal
from fxopt.rewriting.rewrite import ReversibleRewrite
from fxopt.rewriting.rewriter import Rewriter
from fxopt.torch_internals import is_erased

_ATTENTION = "scaled_dot_product_attention"
_TURNING = ("transpose", "swapaxes", "swapdims", "permute", _ATTENTION)
_READING = ("reshape", "flatten", "contiguous")


@dataclasses.dataclass(frozen=True)
class Copy:
    """A value that is a copy of an earlier value, in the same order and shape.

    Attributes:
        node: the value.
        steps: the nodes that copy and reshape `source` into the value, last first.
        source: the earlier value, with the same elements in other memory.
        turned: later values that get other strides or become views, with their new fake tensors.
    """

    node: Node
    steps: tuple[Node, ...]
    source: Node
    turned: Mapping[Node, Tensor] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class RemoveCopies(ReversibleRewrite[Copy]):
    """Removes `contiguous()`, and reshapes there and back, if later nodes give the same results for other strides.

    Such nodes are attention, which reads any layout, and a `reshape` or `flatten` whose output has the same strides as
    before, with transpositions before it. The values do not change. Models that write attention out with `bmm` make five
    copies in each layer that one call of `scaled_dot_product_attention` does not need: apply this pass after `FuseAttention`.

    Example:
        >>> import fxopt, torch
        >>> class Heads(torch.nn.Module):
        ...     def forward(self, x):
        ...         q = x.view(1, 5, 2, 4).transpose(1, 2).contiguous()
        ...         y = torch.nn.functional.scaled_dot_product_attention(q, q, q)
        ...         return y.transpose(1, 2).reshape(1, 5, 8)
        >>> removed = RemoveCopies()(fxopt.trace(Heads(), (torch.ones(1, 5, 8),)))
        >>> [node.name for node in removed.graph.nodes if node.op == "call_method"]
        ['view', 'transpose', 'transpose_1', 'reshape']
    """

    preserves_computation = True

    def match(self, graph_module: GraphModule) -> Iterator[Copy | Refusal]:
        """Yield the values that are copies of an earlier value in another layout."""
        index, taken, values = GraphIndex(graph_module), set[Node](), dict[Node, Tensor]()
        if index.guard is None:
            return  # without a guard, equal expressions for sizes may differ in a later run
        for node in reversed(index.nodes):
            copy = None if node in taken else _copy(node)
            if copy is None:
                continue
            taken |= {*copy.steps}
            source, read = values.get(copy.source, graph.value_of(copy.source)), set[Node]()
            found = _obstacle(index, copy) or _turned(index, node, source, values, read)
            returned = [each.name for each in index.nodes if each in read and index.memory.is_returned(each)]
            if len(returned) > 1:
                found = f"{' and '.join(returned)} may share memory that the graph returns"
            if isinstance(found, str):
                yield Refusal(node, found)
            else:
                values |= found
                yield dataclasses.replace(copy, turned={n: v for n, v in found.items() if n is not node})

    def apply(self, rewriter: Rewriter, site: Copy) -> Node:
        """Redirect the users of the copy to the source."""
        rewriter.replace_uses(site.node, site.source)
        for step in site.steps:
            if not step.users:
                rewriter.erase(step)
        for node, value in site.turned.items():
            if not is_erased(node):  # it may have been a step of another copy
                rewriter.set(node, val=value)
        return site.source

    def opens_sites(self, graph_module: GraphModule, sites: Sequence[Copy]) -> bool:
        """Return True: after an attention without copies, its inputs may have other strides, too."""
        return True


def _copy(node: Node) -> Copy | None:
    """Follow a value back to the earliest value of the same shape, if a copy is made in between; otherwise None."""
    steps, found, value = list[Node](), None, node
    while Fact.RESHAPES in facts_of(value) and _is_plain(value):
        steps.append(value)
        source = value.args[0]
        assert isinstance(source, Node)
        if graph.same_kind(node, source) and any(name_of(step) == "contiguous" for step in steps):
            found = Copy(node, tuple(steps), source)
        value = source
    return found


def _is_plain(node: Node) -> bool:
    """Tell whether a node only reshapes its first argument, in every run.

    `view` may change the dtype, and `squeeze` drops a free size if it is 1.
    """
    if name_of(node) == "squeeze":
        return False
    if not node.args or not isinstance(node.args[0], Node) or not isinstance(graph.value_of(node), Tensor):
        return False
    return graph.dtype_of(node) == graph.dtype_of(node.args[0])


def _obstacle(index: GraphIndex, copy: Copy) -> str | None:
    """Return why a copy has to stay; None if it can be removed."""
    writer = index.memory.written(copy.node)  # also into the source: the copy may be a view
    if writer:
        return f"{writer.name} may write into {copy.node.name}"
    if index.memory.is_returned(copy.node):
        return "the graph returns it or a view of it"
    return None


def _turned(
    index: GraphIndex, node: Node, value: Tensor, values: Mapping[Node, Tensor], read: set[Node]
) -> dict[Node, Tensor] | str:
    """Follow a value with other strides to the later nodes whose strides do not change.

    Args:
        index: index of the graph.
        node: the value that gets other strides.
        value: its fake tensor with the new strides.
        values: other values that get other strides, with their fake tensors.
        read: set to which values are added that were copies and may become views.

    Returns:
        The value and all later values with other strides or other memory, or a reason if a node depends on the strides.
    """
    values, turned = {**values, node: value}, {node: value}
    for user in node.users:
        name = name_of(user)
        if name not in (*_READING, *_TURNING):
            return f"{user.name} ({name or user.op}) may depend on its strides"
        if name == _ATTENTION and str(value.stride()[-1]) != "1":
            return f"{user.name} reads the numbers of a row one after the other"
        try:
            found = value_with(user, None, values)
        except RuntimeError:  # a size that depends on values decides whether the result is a view
            return f"{user.name} may depend on its strides"
        changes = str(found.stride()) != str(graph.value_of(user).stride())
        if name in _READING:
            if changes:
                return f"{user.name} would have other strides"
            if writer := index.memory.written(user):
                return f"{writer.name} may write into {user.name}, which may become a view"
            read.add(user)
            turned[user] = found
        layouts = [found] if changes else []
        if name == _ATTENTION:
            layouts = _layouts(found) if node is user.args[0] else []
        for layout in reversed(layouts):
            behind = _turned(index, user, layout, values, read)
            if isinstance(behind, str):
                return behind
            turned = behind | turned if layout is found else turned
    return turned


def _layouts(value: Tensor) -> list[Tensor]:
    """The possible layouts of the output of attention, which depend on the kernel."""
    batch, heads, rows, columns = value.shape
    turned = graph.like(value, (batch, rows, heads, columns)).transpose(1, 2)
    return [value, graph.like(value, value.shape), turned]
