"""Makes convolutions compute with packed weights and in channels_last."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from torch import nn
from torch.fx import GraphModule, Node

from fxopt import graph
from fxopt.graph_index import GraphIndex
from fxopt.kernels import PackedLayer
from fxopt.memory_formats import channels_last, contiguous
from fxopt.obstacles.layouts import Region, is_channels_last, is_contiguous, region_obstacle, regions
from fxopt.packing import Tune, kernel_for, put_packed
from fxopt.rewriting.explanation import Refusal
from fxopt.rewriting.rewrite import ReversibleRewrite
from fxopt.rewriting.rewriter import Rewriter
from fxopt.tuning import MARGIN, PLAIN, copying


@dataclasses.dataclass(frozen=True)
class ConvRegion:
    """A region of convolutions, and the kernel of each; `node` is the first convolution."""

    node: Node
    region: Region
    kernels: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class PackConvs(ReversibleRewrite[ConvRegion]):
    """Gives `torch.nn.Conv1d` and `torch.nn.Conv2d` layers on the CPU packed kernels that compute in channels_last.

    The kernels are those of oneDNN, or a matrix product for 1 x 1. Convolutions form a region if only operators that keep the
    layout (activations, additions, pooling, normalization) connect them. The whole region computes in channels_last. Its
    outputs are copied to their previous layout, unless no later node depends on the layout. So for images in the captured
    layout, views and outputs of the graph have the same strides as before.

    With `tune=True`, each distinct shape is timed once, and a region is packed if its layers together are faster, including
    the copies at its borders. oneDNN's kernel stores the weight twice; `PackLinears` describes packed layers.

    Args:
        tune: `True` measures, and skips regions that are not faster. `False` packs every region. `"known"` measures nothing,
            and skips layers that earlier measurements on this machine found slower.

    Example:
        >>> import torch, fxopt
        >>> layers = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3)).eval()
        >>> traced = fxopt.trace(layers, (torch.zeros(1, 3, 16, 16),))
        >>> packed = PackConvs()(traced)
        >>> print(*packed.graph.nodes)
        input_1 input_guard _0 _1 _2 contiguous output
        >>> PackConvs()(packed, reverse=True).get_submodule("2")
        Conv2d(8, 4, kernel_size=(3, 3), stride=(1, 1))
    """

    tune: Tune = False

    preserves_computation = True

    def match(self, graph_module: GraphModule) -> Iterator[ConvRegion | Refusal]:
        """Yield the regions that can compute in channels_last."""
        index, kernels = GraphIndex(graph_module), dict[Node, str]()
        seconds = dict[Node, Mapping[str, float]]()
        ranks: dict[type[nn.Module], int] = {nn.Conv1d: 3, nn.Conv2d: 4}
        calls = ((kind, call) for kind in ranks for call in index.calls_like(kind))
        for kind, node in calls:
            layer = index.module(node)
            if isinstance(layer, PackedLayer):
                continue
            found = kernel_for(index, node, kind, tune=self.tune)
            if len(index.call_sites(layer)) > 1 or len(index.names(layer)) > 1:
                yield Refusal(node, "the module is called more than once, or has several names")
            elif found.shape and len(found.shape) != ranks[kind]:
                yield Refusal(node, "its input has no batch dimension")
            elif found.kernel or found.seconds:  # a slower kernel between others may save copies
                kernels[node] = found.kernel or min({*found.seconds} - {PLAIN}, key=found.seconds.__getitem__)
                seconds[node] = found.seconds
            else:
                yield Refusal(node, found.reason)
        for region in regions(index, kernels):
            reason = region_obstacle(index, region)
            if reason is None and self.tune is True:
                reason = _slower(region, kernels, seconds)
            if reason:
                yield from (Refusal(node, reason) for node in region.convs)
            else:
                yield ConvRegion(region.convs[0], region, tuple(kernels[node] for node in region.convs))

    def apply(self, rewriter: Rewriter, site: ConvRegion) -> list[Node]:
        """Replace the layers by packed ones, and insert copies at the borders."""
        for node, kernel in zip(site.region.convs, site.kernels, strict=True):
            shape = graph.shape_of(node.all_input_nodes[0])
            assert shape is not None
            put_packed(rewriter, [str(node.target)], kernel, shape)
        copies = [
            (contiguous if is_contiguous(v) else channels_last, v, users) for v, users in site.region.borders
        ]
        copies += [(channels_last, value, users) for value, users in site.region.entries]
        made = []
        for layout, value, users in copies:
            made.append(rewriter.create("call_function", layout, (value,), before=min(users)))
            for user in users:
                rewriter.replace_input(user, value, made[-1])
        return [*site.region.convs, *made]


def _slower(
    region: Region, kernels: Mapping[Node, str], seconds: Mapping[Node, Mapping[str, float]]
) -> str | None:
    """Return why a region is not faster with packed layers, including the copies at its borders; None if it is."""
    plain = sum(seconds[node][PLAIN] for node in region.convs)
    packed = sum(seconds[node][kernels[node]] for node in region.convs)
    copied = [value for value, _ in region.borders if is_contiguous(value)]
    inside = {*region.nodes}
    firsts = [node.all_input_nodes[0] for node in region.convs]
    copied += [value for value in firsts if value not in inside and not is_channels_last(value)]
    packed += sum(copying(graph.shape_of(value) or ()) for value in dict.fromkeys(copied))
    if packed <= MARGIN * plain:
        return None
    return (
        f"torch's own kernels are as fast for the {len(region.convs)} convolutions of its region: {1e6 * plain:.0f} µs, "
        f"packed {1e6 * packed:.0f} µs with the copies at its borders"
    )
