"""Chooses a kernel for a layer, packs the layer, and undoes packing."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from torch import nn
from torch.fx import GraphModule, Node

from fxopt import graph, submodules
from fxopt.activations import ACTIVATIONS, as_module, same_activation
from fxopt.graph_index import GraphIndex
from fxopt.kernels import PackedLinear, kernels_for, packed_layer
from fxopt.packed_operators import ACTIVATED
from fxopt.rewriting.explanation import Refusal
from fxopt.rewriting.rewrite import ReversibleRewrite
from fxopt.rewriting.rewriter import Rewriter
from fxopt.torch_internals import parameters_of
from fxopt.tuning import PLAIN, fastest, is_slower

Tune = bool | Literal["known"]
"""True measures kernels; `known` measures nothing, and skips kernels that earlier measurements on this machine found slower."""


@dataclasses.dataclass(frozen=True)
class LinearKernel:
    """A linear layer with all its names, its kernel, and the shape of its input; `node` is its first call."""

    node: Node
    paths: tuple[str, ...]
    kernel: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class PackingLinears(ReversibleRewrite[LinearKernel]):
    """A pass that packs linear layers."""

    tune: Tune = False
    alone: bool = False

    def match(self, graph_module: GraphModule) -> Iterator[LinearKernel | Refusal]:
        """Yield the layers for which there is a kernel."""
        index = GraphIndex(graph_module)
        for node in index.calls_like(nn.Linear):
            layer = index.module(node)
            if index.call_sites(layer)[0] is not node or isinstance(layer, PackedLinear):
                continue
            rounding = not self.preserves_computation
            found = kernel_for(index, node, nn.Linear, tune=self.tune, rounding=rounding, alone=self.alone)
            if found.kernel:
                yield LinearKernel(node, tuple(index.names(layer)), found.kernel, found.shape)
            else:
                yield Refusal(node, found.reason)

    def apply(self, rewriter: Rewriter, site: LinearKernel) -> list[Node]:
        """Replace the layer by the packed one, under all its names."""
        put_packed(rewriter, site.paths, site.kernel, site.shape)
        return [n for n in rewriter.graph.find_nodes(op="call_module") if n.target in site.paths]


class KernelChoice(NamedTuple):
    """The kernel for a layer, or the reason why there is none; the shape of its input, and the measured times, if any."""

    kernel: str | None
    reason: str = ""
    shape: tuple[int, ...] = ()
    seconds: Mapping[str, float] = {}


def kernel_for(
    index: GraphIndex,
    node: Node,
    kind: type[nn.Module],
    *,
    tune: Tune,
    rounding: bool = False,
    alone: bool = False,
) -> KernelChoice:
    """Find the kernel for the layer that `node`, its first call, calls.

    Args:
        index: index of the graph.
        node: the call.
        kind: the required type of the layer.
        tune: `True` measures, `False` chooses the first available kernel, and `known` refuses it if it is known to be slower.
        rounding: whether the kernel must round the weight.
        alone: whether the kernel must not need the plain weight in addition to the packed one.
    """
    layer = index.module(node)
    reason = index.inexact(node, kind) or index.obstacle_in_place(layer)
    if reason is None and not submodules.is_plain(layer):
        reason = f"it does not have the weight and bias of a plain {kind.__name__}"
    if reason:
        return KernelChoice(None, reason)
    writer = index.memory.writer_of(layer)
    if writer:
        return KernelChoice(None, f"{writer.name} may write into its weight in each run")
    exact = kernels_for(layer) if rounding else ()
    kernels = [name for name in kernels_for(layer, rounding=rounding, alone=alone) if name not in exact]
    if not kernels:
        weight = layer.get_parameter("weight")
        what = f"{_text(weight.shape)}, {weight.dtype}, on {weight.device.type}"
        sizes = "; one that rounds takes a multiple of 64 input features" if rounding else ""
        return KernelChoice(
            None, f"this machine has no kernel for packed weights like its own ({what}{sizes})"
        )
    value = graph.input_of(node, layer)
    shape = None if value is None else graph.shape_of(value)
    if shape is None:
        return KernelChoice(None, graph.unknown_shape(value or node))
    if not all(shape):
        return KernelChoice(None, "its input is empty")
    users = [*node.users]
    activation = activation_of(index, users[0]) if len(users) == 1 else None
    if tune is not True:
        if tune == "known" and is_slower(layer, shape, kernels[0], activation):
            return KernelChoice(None, f"{kernels[0]} was measured as slower", shape)
        return KernelChoice(kernels[0], shape=shape)
    name, seconds = fastest(layer, shape, rounding=rounding, alone=alone, activation=activation)
    if name in kernels:
        return KernelChoice(name, shape=shape, seconds=seconds)
    times = ", ".join(f"{kernel} {1e6 * took:.0f} µs" for kernel, took in seconds.items())
    which = "torch's own kernel" if name == PLAIN else f"{name}'s kernel"
    reason = f"{which} is the fastest for an input of {_text(shape)}: {times}"
    return KernelChoice(None, reason, shape, seconds)


def activation_of(index: GraphIndex, node: Node) -> str | None:
    """The name of the activation that a node computes, if a packed layer can compute it."""
    module = index.called(node) or as_module(node)
    named = (name for name in ACTIVATED if same_activation(module, ACTIVATIONS[name].make()))
    found = next(named, None) if len(node.all_input_nodes) == 1 else None
    if module is None or found is None:
        return None
    if node.op == "call_module" and (graph.input_of(node, module) is None or index.obstacle_in_place(module)):
        return None
    return found


def put_packed(rewriter: Rewriter, paths: Sequence[str], kernel: str, shape: Sequence[int]) -> None:
    """Replace the layer at `paths`, which are all its names, by a packed layer."""
    layer = rewriter.graph_module.get_submodule(paths[0])
    packed, shell = packed_layer(layer, kernel, shape), submodules.without_tensors(layer)
    rewriter.swap(dict.fromkeys(paths, packed), restore=functools.partial(_unpacked, shell))


def _unpacked(shell: nn.Module, now: Mapping[str, Any], left: object) -> dict[str, nn.Module]:
    """Return the plain layer for each name of a packed one, with the current weights of the packed layer."""
    packed, *_ = now.values()
    return dict.fromkeys(now, submodules.with_parameters(shell, parameters_of(packed)))


def _text(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))
