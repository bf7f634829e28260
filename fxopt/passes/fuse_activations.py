"""Activations that are written out become one call."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fxopt import graph
from fxopt.activations import ACTIVATIONS, Activation
from fxopt.graph_index import GraphIndex
from fxopt.rewriting.explanation import Refusal
from fxopt.rewriting.rewrite import ReversibleRewrite
from fxopt.rewriting.rewriter import Rewriter
from fxopt.rewriting.spelling import call_of

_ARITHMETIC = (
    *("add", "sub", "rsub", "mul", "div", "truediv", "neg", "pow", "square", "exp", "log1p", "erf"),
    *("tanh", "sigmoid", "softplus", "relu", "relu6", "hardtanh", "clamp", "hardsigmoid", "logsigmoid"),
)
_MOST = 12  # nodes of one formula
_CLOSE = 1e-8  # formulas round their constants, as 0.79788456 for the square root of 2 / pi


@dataclasses.dataclass(frozen=True)
class Formula:
    """An activation that is written out: `node` gives its values, of those of `root`, by `inside`."""

    node: Node
    root: Node
    inside: tuple[Node, ...]
    activation: Activation


@dataclasses.dataclass(frozen=True)
class FuseActivations(ReversibleRewrite[Formula]):
    """Computes an activation by one call where a model writes it out, as GPT-2 and ESM do with GELU.

    Each formula of one value and numbers is computed in float64 on a grid. Where it gives what an activation of torch gives
    there, whatever its spelling, it becomes a call of that. One call goes over the values once, and `FuseEpilogues` finds it
    behind a packed layer.

    Sources: GELU: Hendrycks and Gimpel, 2016, arXiv:1606.08415, section 2. SiLU, as `x * sigmoid(x)`: Elfwing et al., 2017,
    arXiv:1702.03118.

    Example:
        >>> import torch, fxopt
        >>> from transformers.activations import NewGELUActivation
        >>> fused = FuseActivations()(fxopt.trace(NewGELUActivation(), (torch.ones(2),)))
        >>> print(*fused.graph.nodes)
        input_1 input_guard gelu output
    """

    preserves_computation = True

    def match(self, graph_module: GraphModule) -> Iterator[Formula | Refusal]:
        """Yield the formulas that are activations, the longest of those that overlap."""
        index, taken = GraphIndex(graph_module), set[Node]()
        for node in reversed(index.nodes):
            found = None if node in taken else _formula(index, node)
            if found is not None:
                reason = _obstacle(index, found)
                taken.update(found.inside)
                yield Refusal(node, reason) if reason else found

    def apply(self, rewriter: Rewriter, site: Formula) -> Node:
        """Call the activation, and erase the formula."""
        function, options = site.activation.function, dict(site.activation.options)
        made = rewriter.create("call_function", function, (site.root,), options, before=site.node)
        rewriter.replace_uses(site.node, made)
        for node in site.inside:
            rewriter.erase(node)
        return made


def _formula(index: GraphIndex, node: Node) -> Formula | None:
    """The shortest formula that ends in a node and is an activation."""
    inside, border = list[Node](), {node}
    while len(inside) < _MOST:
        last = max(border, key=index.position.__getitem__)
        call = call_of(last, index.module(last) if last.op == "call_module" else None)
        if call is None or call.name not in _ARITHMETIC:
            return None
        inside.append(last)
        border = (border | {*last.all_input_nodes}) - {last}
        if len(border) == 1 and len(inside) > 1:
            (root,) = border
            activation = _activation(index, root, inside) if _is_alike(root, node) else None
            if activation is not None:
                return Formula(node, root, tuple(inside), activation)
        if not border:
            return None
    return None


def _is_alike(root: Node, node: Node) -> bool:
    """Tell whether two values are floating-point tensors of one dtype: the shape is that of the only tensor in a formula."""
    values = [graph.value_of(each) for each in (root, node)]
    dtypes = {value.dtype for value in values if isinstance(value, Tensor)}
    return (
        all(isinstance(value, Tensor) for value in values)
        and len(dtypes) == 1
        and dtypes.pop().is_floating_point
    )


def _activation(index: GraphIndex, root: Node, inside: Sequence[Node]) -> Activation | None:
    """The activation that gives the values of a formula, everywhere on the grids."""
    fitting = [each for each in ACTIVATIONS.values() if each.function is not None]
    for dtype, tolerance in ((torch.float64, _CLOSE), (torch.float32, 1e-4)):
        found = _values(index, root, inside, _grid(dtype))
        fitting = [
            each
            for each in fitting
            if torch.allclose(found, _known(each, dtype), rtol=tolerance, atol=tolerance, equal_nan=True)
        ]
    return fitting[0] if fitting else None


def _values(index: GraphIndex, root: Node, inside: Sequence[Node], grid: Tensor) -> Tensor:
    known: dict[Node, Any] = {root: grid}
    for node in reversed(inside):
        args, kwargs = map_arg((node.args, node.kwargs), known.__getitem__)
        function: Any = index.module(node) if node.op == "call_module" else node.target
        if node.op == "call_method":
            function = getattr(Tensor, str(node.target))
        known[node] = function(*args, **kwargs)
    found: Tensor = known[inside[0]]
    return found


def _grid(dtype: torch.dtype) -> Tensor:
    """Numbers on both sides of zero; in float32 those, too, at which steps of a formula may overflow."""
    if dtype == torch.float32:
        return torch.tensor([-1e4, -1e2, 0.0, 1e2, 1e4, float("nan")], device="cpu")
    return torch.linspace(-12, 12, 4801, dtype=dtype, device="cpu")


def _known(activation: Activation, dtype: torch.dtype) -> Tensor:
    assert activation.function is not None
    values: Tensor = activation.function(_grid(dtype), **activation.options)
    return values


def _obstacle(index: GraphIndex, found: Formula) -> str | None:
    """Why a formula cannot become one call."""
    inside = {*found.inside}
    for node in found.inside:
        if node.op == "call_module" and (reason := index.removing_obstacle(node)):
            return reason
        written = index.memory.written_by(node)
        if written is None or not inside.issuperset(written):
            return f"{node.name} writes into what is used elsewhere"
        if others := [user.name for user in node.users if user not in inside and node is not found.node]:
            return f"{node.name} is also used by {', '.join(others)}"
        if reason := index.memory.write_between(node, found.node, found.root):
            return reason
    return None
