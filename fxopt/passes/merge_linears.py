"""Linear layers on the same input become one larger linear layer."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from fxopt import graph, submodules
from fxopt.errors import UndoError
from fxopt.graph_index import GraphIndex
from fxopt.rewriting.explanation import Refusal
from fxopt.rewriting.rewrite import ReversibleRewrite
from fxopt.rewriting.rewriter import Rewriter
from fxopt.slicing import layout_obstacle, write_obstacle


@dataclasses.dataclass(frozen=True)
class LinearGroup:
    """Calls of linear layers that read the same value, in graph order; `node` is the first one."""

    node: Node
    calls: tuple[Node, ...]
    value: Node


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
        for value, calls in index.calls_by_input(nn.Linear).items():
            kinds: dict[object, list[Node]] = {}
            for call in calls if len(calls) > 1 else ():
                layer: Any = index.module(call)
                reason = index.obstacle(call, nn.Linear) or layout_obstacle(index, call, layer.out_features)
                if reason:
                    yield Refusal(call, reason)
                else:
                    kinds.setdefault(_kind(layer), []).append(call)
            for alike in kinds.values():
                yield from _groups(index, value, alike)

    def apply(self, rewriter: Rewriter, site: LinearGroup) -> Node:
        """Put the merged layer before the first call, and slices in the place of the calls."""
        paths = [str(call.target) for call in site.calls]
        layers: dict[str, Any] = {path: rewriter.graph_module.get_submodule(path) for path in paths}
        parent = submodules.common_parent(paths)
        name = "fxopt_merged_" + "_".join(path.removeprefix(f"{parent}.").replace(".", "_") for path in paths)
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


def _groups(index: GraphIndex, value: Node, calls: list[Node]) -> Iterator[LinearGroup | Refusal]:
    """Runs of layers of one kind, between which nothing writes into their input."""
    alone = "no layer that it can be merged with: the others on the same input differ in dtype, device, gradients or training flag"
    write = index.memory.write_between(calls[0], calls[-1], value)
    if write:
        alone = f"a write or side effect stands between it and the others on the same input: {write}"
    for run in index.memory.runs(calls, value):
        written = {call: write_obstacle(index, call, {*run} - {call}) for call in run if len(run) > 1}
        yield from (Refusal(call, reason) for call, reason in written.items() if reason)
        kept = [call for call in run if not written.get(call)]
        if len(kept) > 1:
            yield LinearGroup(kept[0], tuple(kept), value)
        else:
            yield from (Refusal(call, alone) for call in kept)


def _kind(layer: nn.Linear) -> object:
    """What layers must agree in, so that one parameter can hold the weights of all, and come apart again."""
    weight, bias = layer.weight, layer._parameters["bias"]
    trains = layer.training and weight.requires_grad  # would give a bias to a layer that has none
    like = weight if bias is None and not trains else bias
    facts = [None if p is None else (p.dtype, p.device, p.requires_grad) for p in (weight, like)]
    return weight.shape[1], layer.training, *facts


def _merged(layers: list[nn.Linear]) -> nn.Linear:
    """One layer whose rows are those of `layers`, one after the other."""
    merged, sizes = submodules.without_tensors(layers[0]), [layer.out_features for layer in layers]
    merged.out_features = sum(sizes)
    for name in merged._parameters:
        held = [layer._parameters[name] for layer in layers]
        gradients = {part.requires_grad for part in held if part is not None}
        if gradients:
            zeros = layers[0].weight.detach().new_zeros
            parts = [zeros(n) if p is None else p.detach() for p, n in zip(held, sizes, strict=True)]
            merged._parameters[name] = nn.Parameter(torch.cat(parts), *gradients)
    return merged


def _split(
    shells: Mapping[str, nn.Linear], biased: frozenset[str], now: Mapping[str, Any], left: object
) -> dict[str, nn.Module]:
    """The inverse of `_merged`, with the current weights."""
    (merged,) = now.values()
    layers: dict[str, nn.Module] = {path: submodules.without_tensors(each) for path, each in shells.items()}
    sizes = [shell.out_features for shell in shells.values()]
    for name, parameter in merged.named_parameters():
        for path, part in zip(layers, parameter.detach().split(sizes), strict=True):
            if name == "weight" or path in biased:
                layers[path]._parameters[name] = nn.Parameter(part.clone(), parameter.requires_grad)
            elif not part.is_meta and part.any():
                raise UndoError(
                    f"{path} had no bias, and its part of the merged bias is not zero any more (by training, or "
                    "load_state_dict): set it to zero first"
                )
    return layers
