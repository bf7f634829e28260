"""Finds the parts of a graph that can compute in channels_last instead of torch's default layout, and their borders."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping

from torch import Tensor, nn
from torch.fx import Node
from torch.fx.node import map_arg

from fxopt import graph, memory_formats
from fxopt.graph_index import GraphIndex
from fxopt.operators import Fact, facts_of, hooks_of, name_of
from fxopt.torch_internals import FakeTensor

_KEEPING = {
    *("max_pool2d", "maxpool2d", "avg_pool2d", "avgpool2d", "adaptive_avg_pool2d", "adaptiveavgpool2d"),
    *("group_norm", "groupnorm", "interpolate", "upsample", "upsamplingnearest2d", "zeropad2d"),
}
"""Operators, and types of layers in lower case, whose value has the layout of their input."""


@dataclasses.dataclass(frozen=True)
class Region:
    """Calls of convolutions, and the nodes that connect them, all of which keep the layout of their inputs.

    Attributes:
        convs: the calls of the convolutions, in graph order.
        nodes: these calls, and all nodes whose values are in channels_last if those of the convolutions are.
        borders: pairs of a value and its users outside of the region, which get a copy in the previous layout.
        entries: pairs of a value in channels_last with ambiguous strides, and its users in the region.
    """

    convs: tuple[Node, ...]
    nodes: tuple[Node, ...]
    borders: tuple[tuple[Node, tuple[Node, ...]], ...]
    entries: tuple[tuple[Node, tuple[Node, ...]], ...] = ()


def regions(index: GraphIndex, convs: Collection[Node]) -> Iterator[Region]:
    """Find the regions of some convolutions.

    Args:
        index: index of the graph.
        convs: the calls of convolutions whose outputs should be in channels_last.
    """
    members: dict[Node, list[Node]] = {}  # for each node, all nodes of its region: one list for all
    for node in index.nodes:
        if node in convs or _keeps_layout(index, node):
            inside = [value for value in node.all_input_nodes if value in members]
            if inside or node in convs or _hides_layout(node):
                own = [node]
                for part in {id(members[value]): members[value] for value in inside}.values():
                    own = part + own
                members.update(dict.fromkeys(own, own))
    for nodes in {id(part): part for part in members.values()}.values():
        ordered = sorted(nodes)
        borders = (
            (
                node,
                tuple(
                    user
                    for user in node.users
                    if members.get(user) is not nodes and not _takes_any_layout(index, node, user)
                ),
            )
            for node in ordered
        )
        entries = dict[Node, tuple[Node, ...]]()
        for node in filter(_hides_layout, ordered):
            for value in node.all_input_nodes:
                entries[value] = (*entries.get(value, ()), node) if members.get(value) is not nodes else ()
        calls = tuple(node for node in ordered if node in convs)
        if calls:
            yield Region(
                calls,
                tuple(ordered),
                tuple((node, users) for node, users in borders if users),
                tuple((value, users) for value, users in entries.items() if users),
            )


def region_obstacle(index: GraphIndex, region: Region) -> str | None:
    """Return why a region cannot compute in channels_last; `None` if it can."""
    for node in region.nodes:
        if not isinstance(graph.value_of(node), Tensor):
            return graph.unknown_shape(node)
    memory, roots, inside = index.memory, _roots(index, region), {*region.nodes}
    returned = any(memory.is_returned(node) for node, _ in region.borders)
    for value in (node.all_input_nodes[0] for node in region.convs if returned):
        if value not in inside and _has_strides_of_both(value):
            return f"the layout of {value.name} decides that of an output, and its one channel has the strides of both"
    for node, users in region.borders:
        if not (is_contiguous(node) or is_channels_last(node)):
            return f"{node.name} is neither in torch's default layout nor in channels_last: what follows would get it so"
        twins = [other for other, _ in region.borders if other is not node and roots[node] & roots[other]]
        if twins and memory.is_returned(node):
            return f"{node.name} and {twins[0].name} may share memory that the graph returns"
        late = [writer for writer in memory.writers(node) if writer >= min(users)]
        if late:
            return f"{late[0].name} may write into the memory of {node.name} after that is copied"
    return None


def _has_strides_of_both(value: Node) -> bool:
    """Tell whether a value has the strides of channels_last, but also counts as contiguous in the default layout."""
    described = graph.value_of(value)
    usual = str(graph.like(described, described.shape).stride()) == str(described.stride())
    return not usual and is_contiguous(value) and is_channels_last(value)


def _may_copy(index: GraphIndex, node: Node) -> bool:
    """Tell whether the value of a node is a view or a copy depending on the strides of its input."""
    module = index.called(node)
    return Fact.COPIES in facts_of(node, module) or name_of(node) == "to"


def _roots(index: GraphIndex, region: Region) -> dict[Node, set[Node]]:
    """For each node of a region, the nodes of the region that allocated the memory of its value."""
    found: dict[Node, set[Node]] = {}
    for node in region.nodes:
        inside = [found[value] for value in node.all_input_nodes if value in found]
        found[node] = {node}.union(*(() if index.memory.gives_new_memory(node) else inside))
    return found


def is_channels_last(node: Node) -> bool:
    """Tell whether a value is known to be in channels_last."""
    return _has(node, memory_formats.is_channels_last)


def is_contiguous(node: Node) -> bool:
    """Tell whether a value is known to be in torch's default layout."""
    return _has(node, Tensor.is_contiguous)


def _has(node: Node, layout: Callable[[Tensor], bool]) -> bool:
    """Tell whether a value has a layout; False if this depends on a size that the values of inputs determine."""
    value = graph.value_of(node)
    if not isinstance(value, Tensor):
        return False
    with graph.describing(value):
        try:
            return bool(layout(value))
        except RuntimeError:
            return False


def _hides_layout(node: Node) -> bool:
    """Tell whether all inputs of a node are in channels_last, but its value is not, as for a batch of 1 with other strides."""
    return bool(node.all_input_nodes) and (
        all(map(is_channels_last, node.all_input_nodes)) and not is_channels_last(node)
    )


def _takes_any_layout(index: GraphIndex, value: Node, user: Node) -> bool:
    """Tell whether a user of a value accepts the value in channels_last: neither it nor a later node depends on strides."""
    described = graph.value_of(value)
    if not isinstance(described, FakeTensor):
        return False
    if index.memory.writers(value) or index.memory.is_returned(value):
        return False
    try:
        with graph.describing(described):
            turned = memory_formats.channels_last(described)
    except RuntimeError:  # the strides depend on a size that is not known from the inputs
        return False
    return _is_as_before(index, user, {value: turned})


def _is_as_before(index: GraphIndex, node: Node, turned: Mapping[Node, Tensor]) -> bool:
    """Tell whether neither a node nor any later node depends on the strides of the node's inputs.

    False if the node has further inputs, because their strides may change, too.

    Args:
        index: index of the graph.
        node: a node.
        turned: the fake tensors of the inputs that get other strides.
    """
    module = index.called(node)
    facts, before = facts_of(node, module), graph.value_of(node)
    if not isinstance(before, Tensor) or "out" in node.kwargs:
        return False
    others = (each for each in node.all_input_nodes if each not in turned and each.op != "get_attr")
    if any(isinstance(graph.value_of(each), Tensor) for each in others):
        return False
    if _may_copy(index, node) and (index.memory.writers(node) or index.memory.is_returned(node)):
        return False  # a copy may become a view
    if isinstance(module, nn.Linear | nn.LayerNorm) and facts:  # these layers write a new tensor, row by row
        return is_contiguous(node)
    if not facts & (Fact.ELEMENTWISE | Fact.RESHAPES | Fact.VIEW) or not index.memory.is_pure(node):
        return False
    if name_of(node) == "as_strided":
        return False
    try:
        found = value_with(node, module, turned)
    except Exception:  # a view that these strides do not allow
        return False
    if str(found.stride()) == str(before.stride()):
        return True
    return all(_is_as_before(index, user, {**turned, node: found}) for user in node.users)


def value_with(node: Node, module: nn.Module | None, turned: Mapping[Node, Tensor]) -> Tensor:
    """Compute the fake tensor of a node's value if some of its inputs have other strides."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda each: turned.get(each, graph.value_of(each)))
    with graph.describing(graph.value_of(node)):
        found: Tensor = graph.called_with(node, module, args, kwargs)
    return found


def _keeps_layout(index: GraphIndex, node: Node) -> bool:
    """Tell whether the value of a node has the layout of its inputs, and the same elements in any layout."""
    value = graph.value_of(node)
    if not isinstance(value, Tensor) or value.dim() not in (3, 4) or "out" in node.kwargs:
        return False
    module = index.called(node)
    name = name_of(node) if module is None else type(module).__name__.lower()
    if name == "zeropad2d":
        return module is not None and not hooks_of(module)
    facts = facts_of(node, module)
    if not facts:
        return False  # not one of torch's own operators, or a layer with hooks
    # Other operators return sequences in the default layout.
    if value.dim() == 3 and name not in ("identity", "dropout"):
        return _is_elementwise(node, facts)
    if name in ("cat", "concat"):
        return bool((node.kwargs.get("dim") if len(node.args) < 2 else node.args[1]) == 1)
    if name in ("identity", "dropout", "dropout2d", "batch_norm", "batchnorm2d"):
        return index.memory.is_pure(node)
    if name == "pad":  # other modes use views and copies
        return graph.argument(node, "mode") in (None, "constant")
    if name in _KEEPING:
        return True
    if name in ("mean", "amax", "amin", "sum"):
        return bool(graph.argument(node, "keepdim"))
    return _is_elementwise(node, facts)


def _is_elementwise(node: Node, facts: Fact) -> bool:
    inputs = map(graph.value_of, node.all_input_nodes)
    return Fact.ELEMENTWISE in facts and all(isinstance(each, Tensor) for each in inputs)
