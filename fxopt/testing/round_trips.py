"""Checks that an undo gave everything back."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from fxopt.compare import first_difference, same
from fxopt.objects import tensors_in
from fxopt.outputs import same_bits
from fxopt.rewriting.edits import ADDRESS
from fxopt.rewriting.record import MARKS, RECORD
from fxopt.torch_internals import COMPILED, REGISTRIES


def assert_round_trip(before: GraphModule, after: GraphModule) -> int:
    """Assert that `after` is `before` again: nothing of a rewrite is left, and nothing is lost.

    Compared are, of the graph and of those inside it, the nodes (names, order, operations, targets, arguments, marks of passes, and the values that their metadata
    describes, unless a pickle has dropped those), the modules
    (names, order, types, options, training flags), their hooks and other attributes, parameters and buffers (names, order, values bit for
    bit, dtype, device, strides, `requires_grad`, persistence, and which of them are the same tensor), and the
    generated code.

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
        "nodes": _nodes,
        "targets": lambda gm: [node.target for node in gm.graph.nodes],
        "marks": lambda gm: [(node.name, node.meta.get(MARKS, ())) for node in gm.graph.nodes],
        "metadata": _described if _described(after) else lambda gm: [],  # which pickles drop
        "code": lambda gm: gm.code,
    }
    of_all: dict[str, Callable[[GraphModule], Any]] = {
        "modules": _modules,
        "names": _names,
        "hooks": _hooks,
        "tensors": _tensor_facts,
        "ties": _ties,
        "state_dict": lambda gm: list(gm.state_dict()),
    }
    problems = _problems(before, after, views | of_all)
    inner = dict(after.named_modules())
    for path, graph in before.named_modules():
        if path and isinstance(graph, GraphModule) and isinstance(inner.get(path), GraphModule):
            problems += _problems(graph, inner[path], views, f"{path}: ")
    problems += [f"attributes: {name} differs" for name in _changed_attributes(before, after)]
    kept, others = dict(_tensors(before)), dict(_tensors(after))
    changed = (name for name in kept if name in others and not same_bits(kept[name], others[name]))
    problems += [f"values: {name} differs" for name in changed]
    if problems:
        raise AssertionError("the round trip is not exact:\n  " + "\n  ".join(problems))
    return sum(tensor.numel() for tensor in kept.values())


def _problems(
    before: GraphModule, after: Any, views: dict[str, Callable[[GraphModule], Any]], where: str = ""
) -> list[str]:
    seen = ((name, view(before), view(after)) for name, view in views.items())
    return [f"{where}{name}: {first_difference(old, new)}" for name, old, new in seen if old != new]


def _nodes(gm: GraphModule) -> list[str]:
    return [node.format_node() or f"output {node.args}" for node in gm.graph.nodes]


def _described(gm: GraphModule) -> list[tuple[str, str, object]]:
    """The values that the metadata of nodes describes: of a capture, of dynamo, and of fx's `ShapeProp`."""
    return [
        (node.name, key, [*map(_facts, tensors_in(node.meta[key]))] or str(node.meta[key]))
        for node in gm.graph.nodes
        for key in ("val", "example_value", "tensor_meta")
        if node.meta.get(key) is not None
    ]


def _modules(gm: GraphModule) -> list[tuple[str, type, str, bool]]:
    return [
        # Each graph module has a class of its own.
        (name, GraphModule if isinstance(m, GraphModule) else type(m), m.extra_repr(), m.training)
        for name, m in gm.named_modules(remove_duplicate=False)
    ]


def _names(gm: GraphModule) -> list[tuple[str, str]]:
    """The names that modules have for parameters, buffers and modules, those of nothing, too."""
    tables = REGISTRIES[:3]
    return sorted(
        (name, key)
        for name, module in gm.named_modules(remove_duplicate=False)
        for table in tables
        for key in vars(module)[table]
    )


def _hooks(gm: GraphModule) -> list[tuple[str, str, list[Any]]]:
    """The hooks of each module: functions as they are, which a deep copy keeps, other callables by their types."""
    return [
        (name, table, [*map(_hook, hooks.values())])
        for name, module in gm.named_modules(remove_duplicate=False)
        for table, hooks in vars(module).items()
        if table in _OF_EVERY_MODULE and "hooks" in table and hooks
    ]


def _hook(hook: Any) -> Any:
    if isinstance(hook, functools.partial):
        return _hook(hook.func), ADDRESS.sub("", repr((hook.args, hook.keywords)))
    return hook if inspect.isfunction(hook) else type(hook)


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
# Of packed layers and of `torch.compile`, which a copy does not have.
_CACHES = {"_packed", COMPILED}
_OF_EVERY_GRAPH_MODULE = frozenset(vars(GraphModule(nn.Module(), Graph())))


def _changed_attributes(before: GraphModule, after: GraphModule) -> Iterator[str]:
    """The attributes of modules that are no parameters, buffers, modules or hooks, and that differ."""
    others = dict(after.named_modules(remove_duplicate=False))
    for name, module in before.named_modules(remove_duplicate=False):
        if name in others and name != RECORD:  # which names the graph module itself
            left, right = _attributes(module), _attributes(others[name])
            for key in sorted(left.keys() | right.keys()):
                if key not in left or key not in right or not _same(left[key], right[key]):
                    yield f"{name}.{key}" if name else key


def _attributes(module: nn.Module) -> dict[str, Any]:
    if isinstance(module, GraphModule):  # its private ones are caches, which a run fills
        return {
            key: value
            for key, value in vars(module).items()
            if key not in _OF_EVERY_GRAPH_MODULE and not key.startswith("_")
        }
    return {key: value for key, value in vars(module).items() if key not in _OF_EVERY_MODULE | _CACHES}


def _same(left: Any, right: Any) -> bool:
    """Tell whether an attribute and its deep copy agree."""
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor):
        return same_bits(left, right) and left.stride() == right.stride()
    if isinstance(left, dict):
        return [*left] == [*right] and all(_same(item, right[key]) for key, item in left.items())
    if isinstance(left, tuple | list):
        return len(left) == len(right) and all(map(_same, left, right))
    if hasattr(left, "to_dict"):  # of transformers, where equality asks for private attributes, too
        return same(left.to_dict(), right.to_dict())
    return same(left, right)


def _tensors(gm: GraphModule) -> list[tuple[str, Tensor]]:
    parameters = list(gm.named_parameters(remove_duplicate=False))
    return [*parameters, *gm.named_buffers(remove_duplicate=False)]


def _tensor_facts(gm: GraphModule) -> list[tuple[str, str, bool, object]]:
    return [(name, type(t).__name__, t.requires_grad, _facts(t)) for name, t in _tensors(gm)]


def _facts(tensor: Tensor) -> tuple[object, ...]:
    strides = [*map(_size, tensor.stride())] if tensor.layout == torch.strided else None
    return tensor.dtype, tensor.device, [*map(_size, tensor.shape)], strides


def _size(size: int | torch.SymInt) -> object:
    """A size to compare: that of a symbolic one as an expression, whose text takes longer than all else here."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _ties(gm: GraphModule) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, tensor in _tensors(gm):
        names.setdefault(id(tensor), []).append(name)
    return sorted(group for group in names.values() if len(group) > 1)
