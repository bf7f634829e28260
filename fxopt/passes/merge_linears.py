"""Linear layers on the same input become one larger linear layer."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fxopt import graph, operators, submodules
from fxopt.errors import UndoError
from fxopt.graph_index import GraphIndex
from fxopt.operators import Fact
from fxopt.rewriting.explanation import Refusal
from fxopt.rewriting.rewrite import ReversibleRewrite
from fxopt.rewriting.rewriter import Rewriter


@dataclasses.dataclass(frozen=True)
class LinearGroup:
    """Calls of linear layers that read the same value, in graph order."""

    value: Node
    calls: tuple[Node, ...]

    @property
    def node(self) -> Node:
        return self.calls[0]


@dataclasses.dataclass(frozen=True)
class MergeLinears(ReversibleRewrite[LinearGroup]):
    """Merges `torch.nn.Linear` layers that take the same input into one, whose output is sliced.

    Layers are merged when they agree in dtype, device, training flag and what requires gradients; a layer
    without a bias gets zeros for its part of the merged one. Each of the old nodes becomes a slice of the merged
    output, under its old name. Where the graph returns such a slice, the values are the same, but it is a view,
    and not contiguous. Undoing splits the current weights, so that training, `.half()` or `.to()` in between are
    kept; it is refused where training has given a bias to a layer that had none.

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
                yield from _groups(index, value, calls)

    def apply(self, rewriter: Rewriter, site: LinearGroup) -> Node:
        """Put the merged layer before the first call, and slices in the place of the calls."""
        paths = [str(call.target) for call in site.calls]
        layers = {path: _linear(rewriter.graph_module, path) for path in paths}
        parent = _common_parent(paths)
        names = [path.removeprefix(f"{parent}.").replace(".", "_") for path in paths]
        name = "fxopt_merged_" + "_".join(names)
        path = submodules.free_path(rewriter.graph_module, parent, name)
        merged = _merged([*layers.values()])
        shells = {path: submodules.without_tensors(layer) for path, layer in layers.items()}
        biased = frozenset(path for path, layer in layers.items() if layer.bias is not None)
        rewriter.swap({path: merged}, paths, restore=functools.partial(_split, shells, biased))
        val = graph.with_width(site.node, merged.out_features)
        node = rewriter.create("call_module", path, (site.value,), before=site.node, val=val)
        start = 0
        for call, layer in zip(site.calls, layers.values(), strict=True):
            part = (node, (Ellipsis, slice(start, start + layer.out_features)))
            rewriter.set(call, op="call_function", target=operator.getitem, args=part, kwargs={})
            start += layer.out_features
        return node


def _merged(layers: list[nn.Linear]) -> nn.Linear:
    """One layer whose rows are those of `layers`, one after the other."""
    first = layers[0]
    merged = submodules.without_tensors(first)
    merged.out_features = sum(layer.out_features for layer in layers)
    weights = torch.cat([layer.weight.detach() for layer in layers])
    merged.weight = nn.Parameter(weights, first.weight.requires_grad)
    biases = [layer.bias for layer in layers if layer.bias is not None]
    if biases:
        parts = [
            first.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias.detach()
            for layer in layers
        ]
        merged.bias = nn.Parameter(torch.cat(parts), biases[0].requires_grad)
    return merged


def _split(
    shells: Mapping[str, nn.Linear], biased: frozenset[str], now: Mapping[str, Any], left: object
) -> dict[str, nn.Module]:
    """The inverse of `_merged`, with the current weights."""
    (merged,) = now.values()
    layers: dict[str, nn.Module] = {}
    stops = itertools.accumulate(shell.out_features for shell in shells.values())
    for (path, shell), stop in zip(shells.items(), stops, strict=True):
        layer = layers[path] = submodules.without_tensors(shell)
        for name, parameter in merged._parameters.items():
            if parameter is None:
                continue
            part = parameter.detach()[stop - shell.out_features : stop].clone()
            if name == "weight" or path in biased:
                layer._parameters[name] = nn.Parameter(part, parameter.requires_grad)
            elif not part.is_meta and part.any():
                raise UndoError(
                    f"{path} had no bias, and the part of the merged bias that stands for it is not zero any "
                    "more (by training, or load_state_dict): set it to zero first"
                )
    return layers


def _groups(index: GraphIndex, value: Node, calls: list[Node]) -> Iterator[LinearGroup | Refusal]:
    """Runs of layers of one kind, between which nothing writes into their input."""
    runs: dict[object, list[list[Node]]] = {}
    between: dict[Node, str] = {}
    for call in calls:
        reason = index.inexact(call, nn.Linear) or index.obstacle(call) or _obstacle(index, call)
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
    for run in itertools.chain.from_iterable(runs.values()):
        written = {call: _write_obstacle(index, call, run) for call in run if len(run) > 1}
        yield from (Refusal(call, reason) for call, reason in written.items() if reason)
        kept = [call for call in run if not written.get(call)]
        if len(kept) > 1:
            yield LinearGroup(value, tuple(kept))
        elif kept:
            why = between.get(kept[0])
            yield Refusal(
                kept[0],
                f"a write or side effect stands between it and the others on the same input: {why}"
                if why
                else "no layer that it can be merged with: the others on the same input differ in dtype, device, "
                "gradients or training flag",
            )


def _kind(layer: nn.Module) -> object:
    """What layers must agree in, so that one parameter can hold the weights of all, and come apart again."""
    weight, bias = layer._parameters["weight"], layer._parameters["bias"]
    assert weight is not None
    trains = layer.training and weight.requires_grad  # would give a bias to a layer that has none
    like = weight if bias is None and not trains else bias
    facts = [None if p is None else (p.dtype, p.device, p.requires_grad) for p in (weight, like)]
    return weight.shape[1], layer.training, *facts


def _obstacle(index: GraphIndex, call: Node) -> str | None:
    """What keeps a layer from becoming a slice; `GraphIndex.obstacle` has said that it can be replaced."""
    layer = index.module(call)
    assert isinstance(layer, nn.Linear)
    if not submodules.is_plain_linear(layer):
        return "it does not have the weight and bias of a plain Linear"
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


def _linear(graph_module: GraphModule, path: str) -> nn.Linear:
    layer = graph_module.get_submodule(path)
    assert isinstance(layer, nn.Linear)
    return layer


def _common_parent(paths: list[str]) -> str:
    parents = [submodules.split_path(path)[0].split(".") for path in paths]
    shared = itertools.takewhile(lambda names: len(set(names)) == 1, zip(*parents, strict=False))
    return ".".join(names[0] for names in shared)


def _write_obstacle(index: GraphIndex, call: Node, run: list[Node]) -> str | None:
    """Why a write into the output of one layer of a group is not safe when that is a slice of a larger tensor.

    A write of elements stays in its slice. Autograd counts it as a write into all of them, though, so that it must
    come before the others are used; and it must be seen by the same views, where some are copies of a slice.
    """
    writers = index.memory.writers(call)
    if not writers:
        return None
    copies = [alias for alias in index.memory.aliases(call) if Fact.COPIES in operators.facts_of(alias)]
    uses = [user for other in run if other is not call for user in other.users]
    first = min((index.position[user] for user in uses), default=len(index.nodes))
    for writer in writers:
        module = index.module(writer) if writer.op == "call_module" else None
        name = graph.function_name(writer).strip("_")
        if Fact.ELEMENTWISE not in operators.facts_of(writer, module) and name not in (
            "setitem",
            "fill",
            "zero",
        ):
            return f"{writer.name} may write into its output, which becomes a part of a larger tensor"
        if copies:
            return f"{writer.name} writes into its output, of which {copies[0].name} may be a view or a copy"
        if index.position[writer] > first:
            return f"{writer.name} writes into its output after that of another layer of the group is used"
    return None
