"""Checks that an undo restored everything."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from fxopt.compare import first_difference, same
from fxopt.graph import grouped
from fxopt.objects import tensors_in
from fxopt.outputs import same_bits
from fxopt.rewriting.record import MARKS, RECORD
from fxopt.torch_internals import COMPILED


def assert_round_trip(before: GraphModule, after: GraphModule) -> int:
    """Assert that `after` equals `before`: nothing of a rewrite is left, and nothing is lost.

    The comparison covers nested graph modules, too: the nodes (names, order, operations, targets, arguments, marks of passes,
    and the values that their metadata describes, unless a pickle has dropped these), the modules (names, order, types, options,
    training flags), their hooks and other attributes, parameters and buffers (names, order, values bit for bit, dtype, device,
    strides, `requires_grad`, persistence, and which of them are the same tensor), and the generated code.

    Args:
        before: a deep copy of the graph module, made before the pass.
        after: the graph module after the pass and its undo.

    Returns:
        The number of values compared bit for bit.

    Raises:
        AssertionError: something differs; the message names all kinds of differences found.

    Example:
        >>> import copy, torch
        >>> from fxopt import FuseBiasInLinear
        >>> traced = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 3)))
        >>> before, fuse = copy.deepcopy(traced), FuseBiasInLinear()
        >>> assert_round_trip(before, fuse(fuse(traced), reverse=True))
        9
    """
    views: dict[str, Callable[[GraphModule], Any]] = {
        "nodes": lambda gm: [node.format_node() or f"output {node.args}" for node in gm.graph.nodes],
        "targets": lambda gm: [node.target for node in gm.graph.nodes],
        "marks": lambda gm: [(node.name, node.meta.get(MARKS, ())) for node in gm.graph.nodes],
        "metadata": _described if _described(after) else lambda gm: [],  # pickles drop the metadata
        "code": lambda gm: gm.code,
    }
    others, problems = dict(after.named_modules(remove_duplicate=False)), list[str]()
    for path, module in before.named_modules(remove_duplicate=False):
        other, where = others.get(path), f"{path}: " if path else ""
        if isinstance(module, GraphModule) and isinstance(other, GraphModule):
            seen = ((name, view(module), view(other)) for name, view in views.items())
            problems += [
                f"{where}{name}: {first_difference(*two)}" for name, *two in seen if two[0] != two[1]
            ]
        if other is not None and path != RECORD:  # the record refers to the graph module itself
            problems += (
                f"{place} differs" for place in differences(path, attributes(module), attributes(other))
            )
    if _ties(before) != _ties(after):
        problems.append(f"ties: {first_difference(_ties(before), _ties(after))}")
    if problems:
        raise AssertionError("the round trip is not exact:\n  " + "\n  ".join(problems))
    return sum(tensor.numel() for tensor in dict(_tensors(before)).values())


def _described(gm: GraphModule) -> list[tuple[str, str, object]]:
    """The values that the metadata of nodes describes, as written by a capture, dynamo, or `ShapeProp` of torch.fx."""
    return [
        (node.name, key, [*map(_facts, tensors_in(node.meta[key]))] or str(node.meta[key]))
        for node in gm.graph.nodes
        for key in ("val", "example_value", "tensor_meta")
        if node.meta.get(key) is not None
    ]


def attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module without caches, which include the private attributes that a graph module fills in a run."""
    is_graph = isinstance(module, GraphModule)
    caches = _OF_EVERY_GRAPH_MODULE if is_graph else _CACHES
    # A scripted module keeps its methods as attributes once they are called.
    is_scripted = isinstance(module, torch.jit.ScriptModule)
    kept = {
        key: value
        for key, value in vars(module).items()
        if key in _OF_EVERY_MODULE
        or not (key in caches or (is_graph and key.startswith("_")) or (is_scripted and callable(value)))
    }
    return {"class": _kind(module), **dict(sorted(kept.items()))}


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_OF_EVERY_GRAPH_MODULE = frozenset(vars(GraphModule(nn.Module(), Graph())))
# Caches of packed layers and of `torch.compile`, which copies do not have.
_CACHES = {"_packed", COMPILED}


def differences(place: str, left: Any, right: Any) -> Iterator[str]:
    """Yield the paths at which a value and its deep copy differ."""
    one, other = _parts(left), _parts(right)
    if _kind(left) is not _kind(right):
        yield place
    elif one is not None and other is not None:
        for key in {**one, **other}:
            values = one.get(key, _ABSENT), other.get(key, _ABSENT)
            yield from differences(f"{place}.{key}".lstrip("."), *values)
        if one.keys() == other.keys() and [*one] != [*other]:
            yield f"the order of {place}"
    elif isinstance(left, Tensor):
        if _facts(left) != _facts(right) or not same_bits(left, right):
            yield place
    elif not same(left, right):
        yield place


_ABSENT = object()


def _kind(value: Any) -> type:
    """The type of a value; GraphModule for graph modules, because each has its own subclass."""
    return GraphModule if isinstance(value, GraphModule) else type(value)


def _parts(value: Any) -> dict[Any, Any] | None:
    """The parts of a value; None if it has none. Modules have no parts here, because each is compared under its own name."""
    if isinstance(value, nn.Module):
        return {}
    if isinstance(value, tuple | list):
        return dict(enumerate(value))
    if isinstance(value, functools.partial):
        return {"func": value.func, "args": value.args, "keywords": value.keywords}
    if hasattr(value, "to_dict"):  # configs of transformers, whose `==` also compares private attributes
        return dict(value.to_dict())
    return value if isinstance(value, dict) else None


def _tensors(gm: GraphModule) -> list[tuple[str, Tensor]]:
    parameters = list(gm.named_parameters(remove_duplicate=False))
    return [*parameters, *gm.named_buffers(remove_duplicate=False)]


def _facts(tensor: Tensor) -> tuple[object, ...]:
    strides = [*map(_size, tensor.stride())] if tensor.layout == torch.strided else None
    sizes = [*map(_size, tensor.shape)]
    return tensor.dtype, tensor.device, sizes, strides, tensor.requires_grad


def _size(size: int | torch.SymInt) -> object:
    """A size to compare; symbolic sizes are compared as expressions, because their text takes long to build."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _ties(gm: GraphModule) -> list[list[str]]:
    names = grouped((id(tensor), name) for name, tensor in _tensors(gm))
    return sorted(group for group in names.values() if len(group) > 1)
