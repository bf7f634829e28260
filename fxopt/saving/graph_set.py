"""The loaded form of a module of `fxopt.optimize`: its graphs, with kernels chosen for this machine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.fx import GraphModule

from fxopt.errors import GuardError
from fxopt.kernels import PackedLayer, kernels_for, plain_layer
from fxopt.memory_formats import images_in_channels_last
from fxopt.tuning import fastest

Call = tuple[int, tuple[str, ...], tuple[int, ...]]
"""The number of positional arguments of a call, the names of the others, and the positions of images in channels_last."""


class GraphSet(nn.Module):
    """Computes a forward by the first of several graphs that accepts the inputs.

    Args:
        graphs: the graphs in the order in which they are tried, each with the kind of call that it was made for.
        tune: whether `choose_kernels` measures kernels; otherwise it does nothing.
    """

    def __init__(self, graphs: Iterable[tuple[Call, GraphModule]], tune: bool) -> None:
        super().__init__()
        calls, made = zip(*graphs, strict=True)
        self.calls, self.graphs, self.tune = tuple(calls), nn.ModuleList(made), tune
        self.training = made[0].training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the outputs of the model; raise GuardError if no graph accepts the inputs."""
        call, reasons = (len(args), tuple(kwargs), images_in_channels_last(args, kwargs)), list[str]()
        graphs = zip(self.calls, self.graphs, strict=True)
        # Try graphs for the same kind of call first: the order of names may matter. Old folders do not record images.
        for (count, names, *_), graph in sorted(graphs, key=lambda each: each[0] != call[: len(each[0])]):
            if count == len(args) and set(names) == kwargs.keys():
                try:
                    return graph(*args, **kwargs)
                except GuardError as error:
                    reasons.append(str(error).rstrip("."))
        count, names, *_ = self.calls[0]
        given = f"they are for inputs given {count} by position and {list(names)} by name"
        raise GuardError(
            f"none of the {len(self.graphs)} saved graphs takes these inputs: {'; '.join(dict.fromkeys(reasons)) or given}. "
            "The eager model would, but it is not saved: call the module of fxopt.optimize with such inputs, and save "
            "this module again."
        )

    def choose_kernels(self) -> None:
        """Give packed layers the fastest kernels on this machine, for the input shapes that they were packed for."""
        graphs: Any = self.graphs
        for graph in graphs if self.tune else ():
            for node in graph.graph.find_nodes(op="call_module"):
                layer = graph.get_submodule(str(node.target))
                if isinstance(layer, PackedLayer):
                    _choose_kernel(layer, node.kwargs.get("activation"))


def _choose_kernel(layer: Any, activation: str | None) -> None:
    plain = plain_layer(layer)
    kernels, exact = kernels_for(plain, rounding=True), kernels_for(plain)
    if kernels:
        rounding = layer.kernel in kernels and layer.kernel not in exact
        layer.kernel, _ = fastest(plain, layer.packed_for, rounding=rounding, activation=activation)
