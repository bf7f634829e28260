"""Folds multiplications and additions of constants into adjacent layers."""

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
from fxopt.obstacles.scaling import LAYERS, channel_dimension, channels, mismatch, wide_dtype
from fxopt.operators import name_of
from fxopt.passes.folding import Folding

ScaleAndShift = tuple[Tensor, Tensor | None]


class FoldScaleAndShift(Folding):
    """Folds multiplications and additions of constants into the layer before them, otherwise into the layers after them.

    The layers are `torch.nn.Linear` and convolutions of every kind. The constants are numbers, or parameters and buffers with
    one value, or one value for each channel. The graph may compute them from such constants, as in `1 + weight`. Examples are
    the scale of a residual branch (LayerScale), the scale of queries, and the weight of an RMSNorm that is not a layer. No
    other node may use the value between layer and operator.

    New layers replace the old ones, which are not changed. A folded parameter stays in the graph module, but is no longer
    read, and so no longer trained. Undo restores the weights from copies, or raises `UndoError` if the folded weights, or a
    folded parameter, were changed.

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
        """Yield the multiplications and additions; the parameters and buffers of their constants stay."""
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
        """Return True: another operator may come before or after a folded one."""
        return True


_OPERATORS: dict[str, Callable[[Tensor, bool], ScaleAndShift]] = {
    **dict.fromkeys(("mul", "multiply"), lambda c, first: (c, None)),
    **dict.fromkeys(("div", "divide", "truediv", "true_divide"), lambda c, first: (1 / c, None)),
    **dict.fromkeys(("add",), lambda c, first: (torch.ones_like(c), c)),
    **dict.fromkeys(("sub", "subtract"), lambda c, first: _difference(c, first)),
    "rsub": lambda c, first: _difference(c, not first),
}
"""For each operator, a function of a constant and whether it is the first operand; it returns the factor and the summand."""


def _difference(constant: Tensor, first: bool) -> ScaleAndShift:
    one = torch.ones_like(constant)
    return (-one, constant) if first else (one, -constant)


def _scale_and_shift(index: GraphIndex, node: Node, constant: Node | float) -> ScaleAndShift:
    values = _constant(index, constant).flatten()
    return _OPERATORS[name_of(node)](values.to(wide_dtype(values)), not is_changing(node.args[0]))


def _operands(node: Node) -> tuple[Node, Node | float] | None:
    """The operand that changes from run to run, and the constant one; None if a node does not have one of each."""
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
    """Return why an operator cannot be folded into a layer; None if it can."""
    behind = layer is path[0]
    if index.memory.writes(node):
        return f"{node.name} writes into what it takes"
    if reason := constant_obstacle(index, parts_of(constant), node):
        return reason
    module, found = index.module(layer), _constant(index, constant)
    weight = module.get_parameter("weight")
    number = not found.ndim and found.dtype == torch.float64  # a number adopts the dtype of the layer
    if not number and (reason := mismatch("the constant", found, module)):
        return reason
    if not behind and graph.dtype_of(value) != weight.dtype:
        return f"{value.name} is not known to be {weight.dtype}, which the layer is"
    return _shape_obstacle(module, found, value, behind, checked=index.guard is not None)


def _shape_obstacle(
    layer: nn.Module, constant: Tensor, value: Node, behind: bool, checked: bool
) -> str | None:
    """Return why a constant has neither one value nor one for each channel of a layer; None if it has."""
    dimension, number = channel_dimension(layer), channels(layer, behind)
    rank = graph.rank_of(value) if checked else None  # without a guard, another run may have another rank
    if constant.ndim > (-dimension if rank is None else rank):
        return f"the constant has {constant.ndim} dimensions, which the value is not known to have"
    if constant.numel() == 1:
        return None
    if constant.ndim < -dimension or constant.numel() != number or constant.shape[dimension] != number:
        return f"the constant {[*constant.shape]} has not one value for each of {number} channels"
    if not behind and not (checked and graph.value_of(value).shape[dimension] == number):
        return f"{value.name} has fewer channels than the product with the constant"
    return None
