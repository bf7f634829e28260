"""Linear layers compute with a weight that is packed for the processor."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from torch import nn
from torch.fx import GraphModule, Node

from fxopt import graph
from fxopt.graph_index import GraphIndex
from fxopt.kernels import PackedLinear
from fxopt.packing import kernel_for, put_packed
from fxopt.rewriting.explanation import Refusal
from fxopt.rewriting.rewrite import ReversibleRewrite
from fxopt.rewriting.rewriter import Rewriter


@dataclasses.dataclass(frozen=True)
class LinearKernel:
    """A linear layer, all its names and calls, and the kernel for it; `node` is its first call."""

    node: Node
    paths: tuple[str, ...]
    kernel: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class PackLinears(ReversibleRewrite[LinearKernel]):
    """Gives `torch.nn.Linear` layers on the CPU a kernel with packed weights: oneDNN's, or MKL's where that is missing.

    Which kernel is the fastest depends on the shape and the processor. With `tune=True`, each distinct shape is timed
    once with each kernel, torch's own among them, which takes some 0.1 s; the fastest one is taken, and the times
    are kept in a file for later processes (`fxopt.tuning`). A packed layer holds its weight twice. It has the parameters of the old layer, so that `state_dict` is the same and tied weights stay tied; it follows
    changes of them, and computes as before where gradients are recorded, under autocast and on other devices.
    It differs from the old layer by rounding errors: kernels add up in another order.

    Args:
        tune: measure, and leave alone what torch's own kernel computes as fast. Else every layer is packed.

    Example:
        >>> import torch, fxopt
        >>> traced = fxopt.trace(torch.nn.Sequential(torch.nn.Linear(64, 32)), (torch.zeros(8, 64),))
        >>> packed = PackLinears()(traced)
        >>> type(packed.get_submodule("0")).__name__
        'PackedLinear'
        >>> PackLinears()(packed, reverse=True).get_submodule("0")
        Linear(in_features=64, out_features=32, bias=True)
    """

    tune: bool = False

    preserves_computation = True

    def match(self, graph_module: GraphModule) -> Iterator[LinearKernel | Refusal]:
        """Yield the layers for which there is a kernel."""
        index = GraphIndex(graph_module)
        for node in index.calls_like(nn.Linear):
            layer = index.module(node)
            if index.call_sites(layer)[0] is not node or isinstance(layer, PackedLinear):
                continue
            value = graph.input_of(node, layer)
            shape = None if value is None else graph.shape_of(value)
            found = kernel_for(index, node, nn.Linear, shape, self.tune)
            if found.kernel and shape:
                yield LinearKernel(node, tuple(index.names(layer)), found.kernel, shape)
            else:
                yield Refusal(node, found.reason)

    def apply(self, rewriter: Rewriter, site: LinearKernel) -> list[Node]:
        """Put the packed layer in the place of the old one, under all its names."""
        put_packed(rewriter, site.paths, site.kernel, site.shape)
        return [n for n in rewriter.graph.find_nodes(op="call_module") if n.target in site.paths]
