"""A multiplication or addition of constants beside a layer: the layer can do that, too."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fxopt import graph, submodules
from fxopt.constants import computed_constant, is_changing
from fxopt.graph_index import GraphIndex
from fxopt.obstacles.foldable import Fold, Scaling
from fxopt.obstacles.parameter_constants import constant_obstacle, parts_of
from fxopt.obstacles.scaling import LAYERS, channel_dimension, channels, wide_dtype
from fxopt.operators import name_of
from fxopt.passes.folding import Folding

ScaleAndShift = tuple[Tensor, Tensor | None]


class FoldScaleAndShift(Folding):
    """Folds multiplications and additions of constants into the layer before them, or else into the layers behind.

    The layers are `torch.nn.Linear` and convolutions of every kind. The constants are numbers, and parameters or
    buffers with one value for all or one for each channel, also where the graph makes them of such, as `1 + weight`:
    the scale of a residual branch (LayerScale), that of queries, the weight of a RMSNorm that the model writes itself.
    Nothing else may use the value between.

    New layers take the place of the old ones, which stay as they are. A parameter that was folded stays where it is, and
    nothing reads it: training it ends here. Undoing, its memory and what it refuses are as those of `FoldBatchNorms`.

    Args:
        reversible: `False` keeps no copies; then the pass cannot be undone.

    Example:
        >>> import fxopt, torch
        >>> class Scaled(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.linear, self.scale = torch.nn.Linear(4, 3), torch.nn.Parameter(torch.ones(3))
        ...     def forward(self, x):
        ...         return self.linear(x) * self.scale / 8
        >>> folded = FoldScaleAndShift()(torch.fx.symbolic_trace(Scaled()))
        >>> print(folded.code.strip())
        def forward(self, x):
            linear = self.linear(x);  x = None
            return linear
    """

    def scalings(self, index: GraphIndex) -> Iterator[Scaling]:
        """Yield the multiplications and additions; what their constants are made of stays."""
        for node in index.nodes:
            if (operands := _operands(node)) is not None:
                value, constant = operands
                paths = [str(part.target) for part in parts_of(constant) if part.op == "get_attr"]
                yield Scaling(
                    node,
                    value,
                    LAYERS,
                    functools.partial(_scale_and_shift, index, node, constant),
                    functools.partial(_obstacle, index, node, value, constant),
                    {path: submodules.attribute(index.graph_module, path) for path in paths},
                )

    def opens_sites(self, graph_module: GraphModule, sites: Sequence[Fold]) -> bool:
        """Something may follow what was folded, or come before it."""
        return True


_OPERATORS: dict[str, Callable[[Tensor, bool], ScaleAndShift]] = {
    **dict.fromkeys(("mul", "multiply"), lambda c, first: (c, None)),
    **dict.fromkeys(("div", "divide", "truediv", "true_divide"), lambda c, first: (1 / c, None)),
    **dict.fromkeys(("add",), lambda c, first: (torch.ones_like(c), c)),
    **dict.fromkeys(("sub", "subtract"), lambda c, first: _difference(c, first)),
    "rsub": lambda c, first: _difference(c, not first),
}
"""For each operator, what it multiplies by and adds, given a constant and whether that is its first operand."""


def _difference(constant: Tensor, first: bool) -> ScaleAndShift:
    one = torch.ones_like(constant)
    return (-one, constant) if first else (one, -constant)


def _scale_and_shift(index: GraphIndex, node: Node, constant: Node | float) -> ScaleAndShift:
    values = _constant(index, constant).flatten()
    return _OPERATORS[name_of(node)](values.to(wide_dtype(values)), not is_changing(node.args[0]))


def _operands(node: Node) -> tuple[Node, Node | float] | None:
    """The operand that changes from run to run, and the constant one; None where a node has not one of each."""
    name, operands = name_of(node), [*node.args, *node.kwargs.values()]
    if name not in _OPERATORS or len(operands) != 2 or not set(node.kwargs) <= {"other"}:
        return None
    for value, constant in (operands, operands[::-1]):
        if is_changing(value) and not is_changing(constant):
            divides = name.startswith(("div", "true")) and constant is operands[0]
            return None if divides else (value, constant)  # type: ignore[return-value]
    return None


def _constant(index: GraphIndex, constant: Node | float) -> Tensor:
    value = computed_constant(index.graph_module, constant, {}) if isinstance(constant, Node) else constant
    return value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)


def _obstacle(
    index: GraphIndex,
    node: Node,
    value: Node,
    constant: Node | float,
    layer: Node,
    path: Sequence[Node],
) -> str | None:
    """Why an operator cannot become a part of a layer; None if it can."""
    behind = layer is path[0]
    if index.memory.writes(node):
        return f"{node.name} writes into what it takes"
    if reason := constant_obstacle(index, parts_of(constant), node):
        return reason
    module, found = index.module(layer), _constant(index, constant)
    weight = module.get_parameter("weight")
    number = not found.ndim and found.dtype == torch.float64  # which takes the dtype of the layer
    if not number and (found.dtype, found.device) != (weight.dtype, weight.device):
        return f"the constant is {found.dtype} on {found.device}, the layer {weight.dtype} on {weight.device}"
    if not behind and graph.dtype_of(value) != weight.dtype:
        return f"{value.name} is not known to be {weight.dtype}, which the layer is"
    return _shape_obstacle(module, found, value, behind, checked=index.guard is not None)


def _shape_obstacle(
    layer: nn.Module, constant: Tensor, value: Node, behind: bool, checked: bool
) -> str | None:
    """Why a constant has not one value for each channel of a layer, or one for all; None if it has."""
    dimension, number = channel_dimension(layer), channels(layer, behind)
    rank = graph.rank_of(value) if checked else None  # which may be another one in another run
    if constant.ndim > (-dimension if rank is None else rank):
        return f"the constant has {constant.ndim} dimensions, which the value is not known to have"
    if constant.numel() == 1:
        return None
    if constant.ndim < -dimension or constant.numel() != number or constant.shape[dimension] != number:
        return f"the constant {[*constant.shape]} has not one value for each of {number} channels"
    if not behind and not (checked and graph.value_of(value).shape[dimension] == number):
        return f"{value.name} has fewer channels than the product with the constant"
    return None
