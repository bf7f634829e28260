"""A saved module of `fxopt.optimize` that was loaded: its graphs, with kernels chosen for the machine that loads them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.fx import GraphModule

from fxopt.errors import GuardError
from fxopt.kernels import PACKED, kernels_for, plain_layer
from fxopt.tuning import fastest

Call = tuple[int, tuple[str, ...]]
"""How many arguments a call gives by position, and the names of the others, in their order."""


class GraphSet(nn.Module):
    """Computes a forward by the first of some graphs that takes the inputs.

    Args:
        graphs: in the order in which they are tried, each with the kind of call that it was made for.
        tune: whether kernels are measured.
    """

    def __init__(self, graphs: Iterable[tuple[Call, GraphModule]], tune: bool) -> None:
        super().__init__()
        found = list(graphs)
        self.calls, self.tune = tuple(call for call, _ in found), tune
        self.graphs = nn.ModuleList(graph for _, graph in found)
        self.training = found[0][1].training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what the model does; GuardError where no graph was made for such inputs."""
        call, reasons = (len(args), tuple(kwargs)), list[str]()
        graphs = zip(self.calls, self.graphs, strict=True)
        for (count, names), graph in sorted(graphs, key=lambda each: each[0] != call):  # the order may matter
            if (count, sorted(names)) == (len(args), sorted(kwargs)):
                try:
                    return graph(*args, **kwargs)
                except GuardError as error:
                    reasons.append(str(error))
        raise GuardError(
            f"none of the {len(self.graphs)} saved graphs takes these inputs: {_text(reasons, self.calls)}. The model itself "
            "would, but it is not saved: call what fxopt.optimize made of it with such inputs, and save that again."
        )

    def choose_kernels(self) -> None:
        """Give packed layers the kernels that are the fastest on this machine, for the inputs that they were packed for."""
        if self.tune:
            for layer in self.modules():
                if isinstance(layer, tuple(PACKED.values())):
                    _choose_kernel(layer)


def _choose_kernel(packed: Any) -> None:
    layer = plain_layer(packed)
    kernels, exact = kernels_for(layer, rounding=True), kernels_for(layer)
    if kernels:
        rounding = packed.kernel in kernels and packed.kernel not in exact
        packed.kernel, _ = fastest(layer, packed.packed_for, rounding=rounding)


def _text(reasons: Sequence[str], calls: Sequence[Call]) -> str:
    count, names = calls[0]
    parts = [f"{count} by position"] * bool(count) + [f"{', '.join(names)} by name"] * bool(names)
    return (
        "; ".join(dict.fromkeys(reason.rstrip(".") for reason in reasons))
        or f"they are for inputs given {' and '.join(parts)}"
    )
