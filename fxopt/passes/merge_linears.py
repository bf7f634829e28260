"""Linear layers on the same input become one larger linear layer."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fxopt import graph, operators, submodules
from fxopt.errors import UndoError
from fxopt.graph_index import GraphIndex
from fxopt.rewrite import Change, Refusal, ReversibleRewrite, leave_trace


@dataclasses.dataclass(frozen=True)
class LinearGroup:
    """Calls of linear layers that read the same value, in graph order."""

    value: Node
    calls: tuple[Node, ...]

    @property
    def node(self) -> Node:
        return self.calls[0]


@dataclasses.dataclass(frozen=True)
class MergedLinear:
    """What undo needs of one of the merged layers."""

    path: str
    shell: nn.Linear
    has_bias: bool
    keyword: str | None  # the name of the argument, where the layer was called by keyword
    ties: dict[str, tuple[int, str]]  # parameter -> number of an earlier layer and its parameter: the same


@dataclasses.dataclass(frozen=True)
class MergeLinears(ReversibleRewrite[LinearGroup]):
    """Merges `torch.nn.Linear` layers that take the same input into one, whose output is sliced.

    Layers are merged when they agree in dtype, device, having a bias, and what requires gradients. Each of the
    old nodes becomes a slice of the merged output, under its old name. Where the graph returns such a slice,
    the values are the same, but it is a view, and not contiguous. Undoing splits the current weights, so
    that training, `.half()` or `.to()` in between are kept.

    Example:
        >>> import torch
        >>> class Heads(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.key, self.value = torch.nn.Linear(4, 3), torch.nn.Linear(4, 2)
        ...     def forward(self, x):
        ...         return self.key(x), self.value(x)
        >>> merge = MergeLinears()
        >>> merged = merge(torch.fx.symbolic_trace(Heads()))
        >>> merge.get_transformed_nodes(merged)
        [fxopt_merged_key_value]
        >>> merge(merged, reverse=True)
        Heads(
          (key): Linear(in_features=4, out_features=3, bias=True)
          (value): Linear(in_features=4, out_features=2, bias=True)
        )
    """

    preserves_computation = True

    def match(self, graph_module: GraphModule) -> Iterator[LinearGroup | Refusal]:
        """Yield the groups of layers that can be merged."""
        index = GraphIndex(graph_module)
        by_value: dict[Node, list[Node]] = {}
        for call in index.calls_like(nn.Linear):
            value = graph.input_of(call, index.module(call))
            if value is not None:
                by_value.setdefault(value, []).append(call)
        for value, calls in by_value.items():
            if len(calls) > 1:
                yield from self._groups(index, value, calls)

    def _groups(self, index: GraphIndex, value: Node, calls: list[Node]) -> Iterator[LinearGroup | Refusal]:
        runs: dict[tuple[object, ...], list[list[Node]]] = {}
        between: dict[Node, str] = {}
        for call in calls:
            reason = (
                index.inexact(call, nn.Linear)
                or index.obstacle(call, own=_paths(calls))
                or _obstacle(index, call)
            )
            if reason:
                yield Refusal(call, reason)
                continue
            same_kind = runs.setdefault(_kind(index.module(call)), [])
            first = same_kind[-1][0] if same_kind else None
            obstacle = index.memory.write_between(first, call, value) if first else None
            if first and obstacle is None:
                same_kind[-1].append(call)
                continue
            same_kind.append([call])
            if first and obstacle:
                between[call] = obstacle
                between.setdefault(first, obstacle)
        for run in (run for same_kind in runs.values() for run in same_kind):
            kept = _tied_among_themselves(index, run)
            for call in run:
                if call not in kept:
                    yield Refusal(
                        call, index.obstacle(call, own=_paths(kept)) or "it is tied to such a layer"
                    )
            if len(kept) > 1:
                yield LinearGroup(value, tuple(kept))
            elif kept:
                why = between.get(kept[0])
                yield Refusal(
                    kept[0],
                    f"a write or side effect stands between it and the others on the same input: {why}"
                    if why
                    else "no layer that it can be merged with: the others on the same input differ in dtype, "
                    "device, bias, gradients or training flag",
                )

    def apply(self, graph_module: GraphModule, site: LinearGroup) -> Change:
        """Put the merged layer before the first call, and slices in the place of the calls."""
        paths = _paths(site.calls)
        layers = [_linear(graph_module, path) for path in paths]
        parent = _common_parent(paths)
        names = [path.removeprefix(f"{parent}.").replace(".", "_") for path in paths]
        path = submodules.free_path(graph_module, parent, "fxopt_merged_" + "_".join(names))
        merged = _merge(layers)
        leave_trace(merged, self, layers)
        submodules.set_module(graph_module, path, merged)
        for old in paths:
            submodules.remove_module(graph_module, old)

        with graph_module.graph.inserting_before(site.calls[0]):
            node = graph_module.graph.call_module(path, (site.value,))
        graph.describe(node, site.calls[0], site.calls[0], merged.out_features)
        parts, start = [], 0
        for call, layer in zip(site.calls, layers, strict=True):
            keyword = next(iter(call.kwargs), None)
            shell = submodules.without_tensors(layer)
            assert isinstance(shell, nn.Linear)
            parts.append(
                MergedLinear(str(call.target), shell, layer.bias is not None, keyword, _ties(layers, layer))
            )
            call.op, call.target, call.kwargs = "call_function", operator.getitem, {}
            call.args = _slice(node, start, start + layer.out_features)
            start += layer.out_features
        nodes = {"merged": node} | {str(number): call for number, call in enumerate(site.calls)}
        return Change((node,), nodes, (path, *paths), {"path": path, "parts": parts})

    def revert(self, graph_module: GraphModule, nodes: dict[str, Node], data: Any) -> None:
        """Give each slice its own layer again, with its part of the current weights."""
        node, parts = nodes["merged"], data["parts"]
        calls = [nodes[str(number)] for number in range(len(parts))]
        merged = graph_module.get_submodule(data["path"])
        if not isinstance(merged, nn.Linear) or not _as_left(node, merged, calls, parts):
            raise self.changed(node, "the merged layer or a slice of it")
        taken = [part.path for part in parts if submodules.has_module(graph_module, part.path)]
        if taken:
            raise UndoError(
                f"{self!r} cannot be undone: other modules stand at {', '.join(taken)} now, the names of layers "
                f"that it merged at {graph.place(node)}. Give them other names first"
            )
        layers = _split(merged, parts)
        submodules.remove_module(graph_module, data["path"])
        for part, layer in zip(parts, layers, strict=True):
            submodules.set_module(graph_module, part.path, layer)
        value = node.args[0]
        for call, part in zip(calls, parts, strict=True):
            call.op, call.target = "call_module", part.path
            call.args = () if part.keyword else (value,)
            call.kwargs = {part.keyword: value} if part.keyword else {}
        graph_module.graph.erase_node(node)


def _merge(layers: list[nn.Linear]) -> nn.Linear:
    """One layer whose rows are those of `layers`, one after the other."""
    first = layers[0]
    merged = nn.Linear(first.in_features, sum(layer.out_features for layer in layers), device="meta")
    for name, parameter in first._parameters.items():
        joined = None if parameter is None else _joined([layer._parameters[name] for layer in layers])
        merged._parameters[name] = joined
    return merged.train(first.training)


def _slice(merged: Node, start: int, stop: int) -> tuple[Any, ...]:
    """The arguments of `getitem` for some of the last dimension."""
    return merged, (Ellipsis, slice(start, stop))


def _joined(parameters: list[nn.Parameter | None]) -> nn.Parameter:
    present = [parameter for parameter in parameters if parameter is not None]
    return nn.Parameter(torch.cat([p.detach() for p in present]), present[0].requires_grad)


def _split(merged: nn.Linear, parts: list[MergedLinear]) -> list[nn.Linear]:
    """The inverse of `_merge`, with the current weights."""
    layers: list[nn.Linear] = []
    sizes = [part.shell.out_features for part in parts]
    for part, stop in zip(parts, itertools.accumulate(sizes), strict=True):
        rows = slice(stop - part.shell.out_features, stop)
        layer = submodules.without_tensors(part.shell)
        assert isinstance(layer, nn.Linear)
        layers.append(layer.train(merged.training))
        for name, parameter in merged._parameters.items():
            if parameter is None:
                continue
            own = nn.Parameter(parameter.detach()[rows].clone(), parameter.requires_grad)
            if name in part.ties:
                number, other = part.ties[name]
                tied = layers[number]._parameters[other]
                assert tied is not None
                if tied.device.type != "meta" and not torch.equal(tied, own):
                    raise UndoError(
                        f"{part.path}.{name} was tied to {parts[number].path}.{other} before they were merged; "
                        "training has made them differ, so the tie cannot be restored: make these parts of the merged "
                        "weight equal first"
                    )
                own = tied
            layer._parameters[name] = own
    return layers


def _ties(layers: list[nn.Linear], layer: nn.Linear) -> dict[str, tuple[int, str]]:
    found: dict[str, tuple[int, str]] = {}
    for number, earlier in enumerate(layers[: layers.index(layer)]):
        for name, parameter in layer._parameters.items():
            for other, candidate in earlier._parameters.items():
                if parameter is not None and parameter is candidate:
                    found.setdefault(name, (number, other))
    return found


def _kind(layer: nn.Module) -> tuple[object, ...]:
    """What layers must agree in, so that one parameter can hold the weights of all, and come apart again."""
    parameters = [layer._parameters["weight"], layer._parameters["bias"]]
    facts = [None if p is None else (p.dtype, p.device, p.requires_grad) for p in parameters]
    return layer.in_features, layer.training, *facts


def _obstacle(index: GraphIndex, call: Node) -> str | None:
    """What keeps a layer from becoming a slice; `GraphIndex.obstacle` has said that it can be replaced."""
    layer = index.module(call)
    assert isinstance(layer, nn.Linear)
    if not submodules.is_plain_linear(layer):
        return "it does not have the weight and bias of a plain Linear"
    writer = index.memory.written(call)
    if writer is not None:
        return f"{writer.name} may write into its output, which becomes a part of a larger tensor"
    return _contiguity_obstacle(index, call, layer.out_features)


def _contiguity_obstacle(index: GraphIndex, call: Node, width: int) -> str | None:
    """A use of the output that may depend on its memory being contiguous, which a slice is not."""
    pending, seen = [call], {call}
    while pending:
        value = pending.pop()
        for user in value.users:
            name = graph.function_name(user)
            depends = operators.Fact.LAYOUT in operators.facts_of(user)
            if depends and not (value is call and _splits_last(user, width)):
                return f"{user.name} ({name}) depends on the memory layout of the output"
            if user.op == "call_module" and not operators.is_torch_module(index.module(user)):
                return f"{user.name} is a module whose use of the memory layout is unknown"
            known = operators.is_torch_function(user.target) or operators.is_container(user.target)
            if user.op == "call_function" and not known:
                return f"{user.name} ({name}) is a function whose use of the memory layout is unknown"
            if user not in seen and name != "contiguous" and not index.memory.gives_new_memory(user):
                seen.add(user)
                pending.append(user)
    return None


def _splits_last(view: Node, width: int) -> bool:
    """Whether a `view` keeps the last dimension apart from the others: then it works on a slice as well."""
    if view.target != "view" or view.kwargs or isinstance(view.args[1], torch.dtype):
        return False
    value = view.meta.get("val")
    shape: Any = value.shape if isinstance(value, Tensor) else view.args[1:]
    if len(shape) == 1 and isinstance(shape[0], tuple | list):
        shape = shape[0]
    product = 1
    for size in reversed(shape):
        if not isinstance(size, int) or size < 1:
            return False
        product *= size
        if product >= width:
            return product == width
    return False


def _tied_among_themselves(index: GraphIndex, run: list[Node]) -> list[Node]:
    """The largest part of `run` whose layers are tied to each other only."""
    while True:
        kept = [call for call in run if not index.obstacle(call, own=_paths(run))]
        if len(kept) == len(run):
            return run
        run = kept


def _as_left(node: Node, merged: nn.Linear, calls: list[Node], parts: list[MergedLinear]) -> bool:
    if set(node.users) != set(calls):
        return False
    start = 0
    for call, part in zip(calls, parts, strict=True):
        stop = start + part.shell.out_features
        if call.target is not operator.getitem or call.args != _slice(node, start, stop):
            return False
        start = stop
    shape, has_bias = (start, parts[0].shell.in_features), parts[0].has_bias
    return merged.weight.shape == shape and (merged.bias is not None) == has_bias and len(node.args) == 1


def _linear(graph_module: GraphModule, path: str) -> nn.Linear:
    layer = graph_module.get_submodule(path)
    assert isinstance(layer, nn.Linear)
    return layer


def _paths(calls: Iterable[Node]) -> list[str]:
    return [str(call.target) for call in calls]


def _common_parent(paths: list[str]) -> str:
    parents = [submodules.split_path(path)[0].split(".") for path in paths]
    shared = itertools.takewhile(lambda names: len(set(names)) == 1, zip(*parents, strict=False))
    return ".".join(names[0] for names in shared)
