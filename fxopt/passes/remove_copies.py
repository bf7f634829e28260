"""Copies into torch's default layout go where nothing behind them depends on the layout."""

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
from fxopt.torch_internals import FakeTensor, is_erased

_ATTENTION = "scaled_dot_product_attention"
_TURNING = ("transpose", "swapaxes", "swapdims", "permute", _ATTENTION)
_READING = ("reshape", "flatten", "contiguous")


@dataclasses.dataclass(frozen=True)
class Copy:
    """A value, the steps that lead to it, last first, and what it holds in the same order and shape before them.

    Attributes:
        node: the value.
        steps: the steps.
        source: what it holds, in other memory.
        turned: the values behind it that get other strides or become views, with their descriptions.
    """

    node: Node
    steps: tuple[Node, ...]
    source: Node
    turned: Mapping[Node, Tensor] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class RemoveCopies(ReversibleRewrite[Copy]):
    """Removes `contiguous()`, and reshapes there and back, where all that follows is as it was with other strides.

    That is attention, which reads any layout, and a `reshape` or `flatten` that gives the same strides as before, with
    transpositions on the way to it. The values are the same; only copies are fewer. Models that write attention out with
    `bmm` make five copies in each layer that one call of `scaled_dot_product_attention` does not need: apply this pass after
    `FuseAttention`.

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
        """Yield the values that are copies in another layout of what they are made of."""
        index, taken, values = GraphIndex(graph_module), set[Node](), dict[Node, Tensor]()
        if index.guard is None:
            return  # without it, sizes that are written alike may be others in a later run
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
        """Give the source to the users of the copy."""
        rewriter.replace_uses(site.node, site.source)
        for step in site.steps:
            if not step.users:
                rewriter.erase(step)
        for node, value in site.turned.items():
            if not is_erased(node):  # as a step of another copy
                rewriter.set(node, val=value)
        return site.source

    def opens_sites(self, graph_module: GraphModule, sites: Sequence[Copy]) -> bool:
        """Tell whether there may be others: behind an attention whose copies are gone, its inputs can have other strides."""
        return True


def _copy(node: Node) -> Copy | None:
    """The longest way back from a value to one of the same shape, if it makes a copy."""
    steps, found, value = list[Node](), None, node
    while Fact.RESHAPES in facts_of(value) and _is_plain(value):
        steps.append(value)
        source = value.args[0]
        assert isinstance(source, Node)
        if _alike(node, source) and any(name_of(step) == "contiguous" for step in steps):
            found = Copy(node, tuple(steps), source)
        value = source
    return found


def _is_plain(node: Node) -> bool:
    """Tell whether a node reshapes its first argument, and that alone, in every run.

    `view` may change the dtype, and `squeeze` drops a free size where it is 1.
    """
    if name_of(node) == "squeeze":
        return False
    if not node.args or not isinstance(node.args[0], Node) or not isinstance(graph.value_of(node), Tensor):
        return False
    return graph.dtype_of(node) == graph.dtype_of(node.args[0])


def _alike(left: Node, right: Node) -> bool:
    mine, its = graph.value_of(left), graph.value_of(right)
    if not isinstance(mine, FakeTensor) or not isinstance(its, FakeTensor):
        return False
    return mine.dtype == its.dtype and str(mine.shape) == str(its.shape)


def _obstacle(index: GraphIndex, copy: Copy) -> str | None:
    """Why a copy has to stay."""
    writer = index.memory.written(copy.node)  # or into the source, of which it may be a view
    if writer:
        return f"{writer.name} may write into {copy.node.name}"
    if index.memory.is_returned(copy.node):
        return "the graph returns it or a view of it"
    return None


def _turned(
    index: GraphIndex, node: Node, value: Tensor, values: Mapping[Node, Tensor], read: set[Node]
) -> dict[Node, Tensor] | str:
    """Follow a value with other strides to where the strides are those of before.

    Args:
        index: the graph.
        node: what gets other strides.
        value: its description with these.
        values: all values that get other strides besides.
        read: takes the values that were copies and may become views.

    Returns:
        All values behind it with other strides or other memory; or what depends on the strides.
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
        except RuntimeError:  # whether it is a view depends on a size that no input tells
            return f"{user.name} may depend on its strides"
        changes = str(found.stride()) != str(graph.value_of(user).stride())
        if name in _READING:
            writer = index.memory.written(user)
            if changes or writer:
                written = (
                    f"{writer.name} may write into {user.name}, which may become a view" if writer else ""
                )
                return written or f"{user.name} would have other strides"
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
    """The layouts that kernels of attention give their output: none is the right one for all kernels."""
    batch, heads, rows, columns = value.shape
    turned = graph.like(value, (batch, rows, heads, columns)).transpose(1, 2)
    return [value, graph.like(value, value.shape), turned]
