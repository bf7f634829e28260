"""The base class of passes that merge layers of one kind with the same input into one larger layer."""

from __future__ import annotations

import abc
import dataclasses
import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from fxopt import submodules
from fxopt.errors import UndoError
from fxopt.graph_index import GraphIndex
from fxopt.obstacles.scaling import channel_dimension
from fxopt.obstacles.slicing import layout_obstacle
from fxopt.rewriting.explanation import Refusal
from fxopt.rewriting.rewrite import ReversibleRewrite
from fxopt.rewriting.rewriter import Rewriter
from fxopt.torch_internals import parameters_of


@dataclasses.dataclass(frozen=True)
class LayerGroup:
    """Calls of layers with the same input `value`, in graph order; `node` is the first call, and the graph returns `returned`."""

    node: Node
    calls: tuple[Node, ...]
    value: Node
    returned: frozenset[Node]


class Merging(ReversibleRewrite[LayerGroup]):
    """A pass that merges layers with the same input into one layer, whose output is sliced."""

    @property
    @abc.abstractmethod
    def layers(self) -> tuple[type[nn.Module], ...]:
        """The types of layers to merge; only layers of one type are merged with each other."""

    preserves_computation = True

    def match(self, graph_module: GraphModule) -> Iterator[LayerGroup | Refusal]:
        """Yield the groups of layers that can be merged."""
        index = GraphIndex(graph_module)
        for kind in self.layers:
            for value, calls in index.calls_by_input(kind).items():
                kinds: dict[object, list[Node]] = {}
                for call in calls if len(calls) > 1 else ():
                    reason = index.obstacle(call, kind) or _obstacle(index, call)
                    if reason:
                        yield Refusal(call, reason)
                    else:
                        kinds.setdefault(_kind(index.module(call)), []).append(call)
                for alike in kinds.values():
                    yield from _groups(index, value, alike)

    def apply(self, rewriter: Rewriter, site: LayerGroup) -> Node:
        """Insert the merged layer before the first call, and replace the calls by slices."""
        paths = [str(call.target) for call in site.calls]
        layers: dict[str, Any] = {path: submodules.module_at(rewriter.graph_module, path) for path in paths}
        parent = submodules.common_parent(paths)
        name = "fxopt_merged_" + "_".join(path.removeprefix(f"{parent}.").replace(".", "_") for path in paths)
        path = submodules.free_path(rewriter.graph_module, parent, name)
        merged = _merged([*layers.values()])
        shells = {path: submodules.without_tensors(layer) for path, layer in layers.items()}
        layouts = {path: submodules.layout_of(layer) for path, layer in layers.items()}
        rewriter.swap({path: merged}, paths, restore=functools.partial(_split, shells, layouts))
        node = rewriter.create("call_module", path, (site.value,), before=site.node)
        start, rest = 0, [slice(None)] * (-1 - channel_dimension(merged))
        for call, layer in zip(site.calls, layers.values(), strict=True):
            part = (node, (Ellipsis, slice(start, start + _width(layer)), *rest))
            if call in site.returned:  # callers could not `view` a slice, because its strides differ
                sliced = rewriter.create("call_function", operator.getitem, part, before=call)
                rewriter.set(call, op="call_method", target="clone", args=(sliced,), kwargs={})
            else:
                rewriter.set(call, op="call_function", target=operator.getitem, args=part, kwargs={})
            start += _width(layer)
        return node


def _obstacle(index: GraphIndex, call: Node) -> str | None:
    """Return why the output of a layer cannot be a slice; None if it can."""
    layer: Any = index.module(call)
    if getattr(layer, "groups", 1) != 1:
        return f"it has {layer.groups} groups, of which each would take other channels"
    reason = layout_obstacle(index, call, layer.out_features if isinstance(layer, nn.Linear) else None)
    if reason is None and (writer := index.memory.written(call)):
        return f"{writer.name} may write into its output, which becomes a part of a larger tensor"
    return reason


def _groups(index: GraphIndex, value: Node, calls: list[Node]) -> Iterator[LayerGroup | Refusal]:
    """Yield runs of layers of one kind, in which no node between the calls writes into their input."""
    alone = "no layer that it can be merged with: the others on the same input differ in dtype, device, gradients, training flag or options, or cannot be merged"
    write = index.memory.write_between(calls[0], calls[-1], value)
    if write:
        alone = f"a write or side effect is between it and the others on the same input: {write}"
    for run in index.memory.runs(calls, value):
        if len(run) > 1:
            yield LayerGroup(run[0], tuple(run), value, frozenset(filter(index.memory.is_returned, run)))
        else:
            yield from (Refusal(call, alone) for call in run)


def _kind(layer: nn.Module) -> object:
    """The facts in which layers must agree, so that one parameter can contain the weights of all and be split again."""
    weight, bias = submodules.weight_of(layer), parameters_of(layer)["bias"]
    trains = layer.training and weight.requires_grad  # would change the zeros of a layer without a bias
    like = weight if bias is None and not trains else bias
    facts = [None if p is None else (p.dtype, p.device, p.requires_grad) for p in (weight, like)]
    options = [getattr(layer, name, None) for name in ("stride", "padding", "dilation", "padding_mode")]
    options.append(weight.stride() if weight.ndim > 2 else None)  # the memory format
    return weight.shape[1:], layer.training, *facts, *options


def _merged(layers: Sequence[nn.Module]) -> nn.Module:
    """Make one layer whose rows are those of `layers`, one after the other."""
    merged, sizes = submodules.without_tensors(layers[0]), [_width(layer) for layer in layers]
    setattr(merged, _width_name(merged), sum(sizes))
    for name in parameters_of(merged):
        held = [parameters_of(layer)[name] for layer in layers]
        if gradients := {part.requires_grad for part in held if part is not None}:
            zeros = submodules.weight_of(layers[0]).detach().new_zeros
            parts = [zeros(n) if p is None else p.detach() for p, n in zip(held, sizes, strict=True)]
            parameters_of(merged)[name] = nn.Parameter(torch.cat(parts), gradients.pop())
    return merged


def _width_name(layer: nn.Module) -> str:
    return "out_features" if isinstance(layer, nn.Linear) else "out_channels"


def _width(layer: nn.Module) -> int:
    """The number of output channels of a layer."""
    return int(getattr(layer, _width_name(layer)))


def _split(
    shells: Mapping[str, nn.Module], layouts: Mapping[str, Any], now: Mapping[str, Any], left: object
) -> dict[str, nn.Module]:
    """Split the merged layer into the original layers, with the current weights."""
    (merged,) = now.values()
    layers: dict[str, nn.Module] = {path: submodules.without_tensors(each) for path, each in shells.items()}
    sizes = [_width(shell) for shell in shells.values()]
    for name, parameter in merged.named_parameters():
        for path, part in zip(layers, parameter.detach().split(sizes), strict=True):
            if name in layouts[path]:
                copied = submodules.laid_out(part, layouts[path][name])
                parameters_of(layers[path])[name] = nn.Parameter(copied, parameter.requires_grad)
            elif not part.is_meta and part.any():
                raise UndoError(
                    f"{path} had no bias, and its part of the merged bias is not zero any more (by training, or load_state_dict): set it to zero first"
                )
    return layers
